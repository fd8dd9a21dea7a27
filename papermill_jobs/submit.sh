#!/usr/bin/env bash
# A Slurm job for each notebook, side by side but 03_generate after 02_train, and one for the writeup, which comes last,
# also when a notebook failed. A job waits for earlier ones of its name, which is that of its notebook and of OUT.
#
#   SCALE=gpu DATA=tinystories papermill_jobs/submit.sh
#   SCALE=gpu DATA=tinystories NOTEBOOKS=02 papermill_jobs/submit.sh --parameters workers=2
#
# Variables: SCALE, DATA, OUT, NOTEBOOKS; SITE, the file with what your cluster wants (site.sh beside this one);
# WRITEUP=no: none; DRY_RUN=1: the commands are shown, nothing is submitted. What follows goes to `workbook run` of each
# job: with --parameters, pick the NOTEBOOKS that have them.
set -euo pipefail

SCALE=${SCALE:-smoke} DATA=${DATA:-embedded} jobs=$(dirname "${BASH_SOURCE[0]}") ids=() names=() train=''
OUT=$(realpath -m "${OUT:-runs/$SCALE}") SITE=$(realpath -m "${SITE:-$jobs/site.sh}")
if [[ $DATA == */* && $DATA != hf:* ]]; then DATA=$(realpath -m "$DATA"); fi
declare -a options=() # of sbatch, for all jobs; SITE sets them, and those of one job by its name
declare -A options_of=()

refuse() { echo "lmcore: $1" >&2 && exit 2; }

# NAME SCRIPT AFTER ARGUMENTS...: the id goes into ids, or in a dry run the job's name.
submit() {
  local name=$1 script=$2 after=$3 own answer
  read -ra own <<<"${options_of[$name]:-}"
  set -- "--dependency=singleton$after" --kill-on-invalid-dep=yes "--job-name=$name.${OUT##*/}" \
    "--output=${OUT//%/%%}/jobs/$name-%j.log" ${options[@]+"${options[@]}"} ${own[@]+"${own[@]}"} "papermill_jobs/$script.sbatch" "${@:4}"
  if [[ -n ${DRY_RUN:-} ]]; then
    printf 'SCALE=%q DATA=%q OUT=%q NOTEBOOKS=%q sbatch' "$SCALE" "$DATA" "$OUT" "$NOTEBOOKS"
    printf ' %q' "$@" && echo && ids+=("<$name>")
  else
    answer=$(sbatch --parsable "$@") || refuse "sbatch refused $name; what your cluster wants goes into $SITE."
    answer=$(grep -oxE '[0-9]+(;.*)?' <<<"$answer") || refuse "sbatch gave no job id for $name."
    ids+=("${answer%%;*}") && echo "${answer%%;*}  $name"
  fi
}

cd "$jobs/.."
[[ -f $SITE ]] || refuse "There is no $SITE."
# shellcheck source=/dev/null
. "$SITE"
[[ -d papermill_jobs/parameters/$SCALE ]] || refuse "There is no scale $SCALE: papermill_jobs/parameters has no such folder."
read -rd '' -a picks <<<"${NOTEBOOKS:-[0-9][0-9]_}" || true
((${#picks[@]})) || refuse "NOTEBOOKS names no notebook."
for pick in "${picks[@]}"; do
  found=$(compgen -G "notebooks/$pick*.ipynb" | sort) || refuse "There is no notebook $pick in notebooks/."
  for file in $found; do names+=("$(basename "$file" .ipynb)"); done
done
mapfile -t names < <(printf '%s\n' "${names[@]}" | sort -u) # in order, each once
if [[ -z ${DRY_RUN:-} ]]; then
  command -v sbatch >/dev/null || refuse "There is no sbatch here; without Slurm, \`workbook run\` executes the notebooks."
  mkdir -p "$OUT/jobs"
  trap 'code=$?; if ((code && ${#ids[@]})); then scancel "${ids[@]}"; fi' EXIT # no half of a chain stays
fi
for name in "${!SLURM_@}" "${!MASTER_@}"; do # of a job around this one
  if [[ $name != SLURM_CONF && $name != SLURM_CLUSTERS ]]; then unset "$name"; fi
done
export SCALE DATA OUT NOTEBOOKS
for NOTEBOOKS in "${names[@]}"; do
  after=''
  if [[ $NOTEBOOKS == 03_generate && -n $train ]]; then after=,afterok:$train; fi
  submit "$NOTEBOOKS" workbook "$after" --no-writeup "$@"
  if [[ $NOTEBOOKS == 02_train ]]; then train=${ids[-1]}; fi
done
if [[ ${WRITEUP:-yes} != no ]]; then
  NOTEBOOKS='' && submit writeup writeup ",afterany$(printf ':%s' "${ids[@]}")"
fi
