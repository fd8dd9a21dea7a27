# shellcheck shell=bash
# What the job scripts share. Source it from the project's folder:
#   supervise COMMAND   runs it; at the time limit it is told to save itself, and the job is queued again
#   export_rendezvous   exports what torchrun and torch.distributed read; call it in each task of an srun, too
# Variables, the same as the Makefile's: SCALE, DATA, OUT, NOTEBOOKS. STOP_SECONDS: how long training may take to save
# itself, less than from the signal to the end (--signal in the scripts). LMCORE_SETUP: lines of shell to run first.

SCALE=${SCALE:-smoke} DATA=${DATA:-embedded} NOTEBOOKS=${NOTEBOOKS:-} STOP_SECONDS=${STOP_SECONDS:-100}
OUT=${OUT:-runs/$SCALE} STARTED=$(date +%s) # in seconds, by which what this start saves is known
STOPPED='' CHILD='' # the signal that this job got, USR1 or TERM; the process of the command
JOB=${SLURM_ARRAY_JOB_ID:-${SLURM_JOB_ID:-}}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID} # else a whole array is requeued

supervise() {
  local code=0
  trap 'pass_on USR1' USR1
  trap 'pass_on TERM' TERM INT HUP # a HUP that nohup ignores stays ignored
  prepare_job
  # bash lets commands in the background ignore Ctrl-C, which is how a notebook's cell is interrupted
  (trap - INT && exec "$@") &
  CHILD=$!
  if [[ -n $STOPPED ]]; then sleep 1 && pass_on "$STOPPED"; fi # it came during the setup
  while kill -0 "$CHILD" 2>/dev/null; do wait "$CHILD" || true; done # a signal ends `wait`, not the command
  wait "$CHILD" || code=$?
  if was_interrupted "$code" && is_to_resume; then
    code=75
    # Slurm ends the processes of a job that it queues again, before this one could say so
    (trap '' TERM && scontrol requeue "$JOB" && echo "Stopped by a signal: queued again, to resume from what is saved.") || true
  fi
  exit "$code"
}

# The site's setup, lmcore on the PATH, a folder for results, what torchrun reads.
prepare_job() {
  set +u # what modules and conda run may use variables that are not set
  eval "${LMCORE_SETUP:-}"
  set -u
  PATH=$PATH:$PWD/.venv/bin # made by make install
  if ! command -v workbook >/dev/null; then
    echo "lmcore: It is not installed here: activate its environment before sbatch (or in site.sh's LMCORE_SETUP), or run make install once in $PWD." >&2
    exit 2
  fi
  mkdir -p "$OUT" || exit 2
  unset "${!SLURM_STEP_@}" # of a step from which this was submitted
  export_rendezvous
}

# Slurm signals this script alone (--signal=B:), or all processes of the job (scancel): hearing one twice does no harm.
pass_on() {
  if [[ $STOPPED != TERM ]]; then STOPPED=$1; fi # whoever cancels a job that is about to be queued again wants it to end
  if [[ -n $CHILD ]]; then kill -s "$1" "$CHILD" 2>/dev/null || true; fi
}

# Whether the command saved itself (75), or was still starting and died of the signal.
was_interrupted() { [[ -n $STOPPED ]] && (($1 == 75 || $1 == 128 + $(kill -l "$STOPPED"))); }

# USR1: the time limit is near. TERM is mostly scancel, which is meant; but preempted jobs may get it, too.
is_to_resume() {
  [[ -n $JOB ]] || return 1 # nobody would start it again
  if scontrol show job "$JOB" 2>/dev/null | grep -q 'PreemptTime=[0-9]'; then return; fi
  [[ $STOPPED == USR1 ]] || return 1
  if [[ -n $(cd "$OUT" && find . -newermt "@$STARTED" \( -path '*/checkpoints/step_*' -o -path './runs/*.json' \)) ]]; then return; fi
  echo "lmcore: This job was stopped with nothing new saved, so it is not queued again: give it more time, or let it save more often (checkpoint_interval)." >&2
  return 1
}

# A process for each task of srun; or, with one task a node, torchrun's for each GPU. A step may have fewer nodes than its job.
export_rendezvous() {
  local name tasks=${SLURM_NTASKS:-1} gpus=${SLURM_GPUS_ON_NODE:-1}
  for name in SLURM_JOB_ID SLURM_NTASKS SLURM_GPUS_ON_NODE SLURM_NODEID \
    SLURM_STEP_NUM_NODES SLURM_JOB_NUM_NODES SLURM_NNODES; do # bash runs the command in HOME[$(command)0] if it computes
    if [[ ! ${!name:-0} =~ ^(0|[1-9][0-9]*)$ ]]; then
      printf 'lmcore: %s must be a whole number, not %q.\n' "$name" "${!name}" >&2
      exit 2
    fi
  done
  NNODES=${SLURM_STEP_NUM_NODES:-${SLURM_JOB_NUM_NODES:-${SLURM_NNODES:-1}}} NODE_RANK=${SLURM_NODEID:-0}
  if ((tasks > NNODES)); then
    NPROC_PER_NODE=$((tasks / NNODES)) WORLD_SIZE=$tasks RANK=${SLURM_PROCID:-0} LOCAL_RANK=${SLURM_LOCALID:-0}
  else
    NPROC_PER_NODE=$((gpus > 0 ? gpus : 1))
    WORLD_SIZE=$((NNODES * NPROC_PER_NODE)) RANK=$((NODE_RANK * NPROC_PER_NODE)) LOCAL_RANK=0
  fi
  if [[ -z ${MASTER_ADDR:-} ]] && ((NNODES > 1)); then
    MASTER_ADDR=$(scontrol show hostnames "${SLURM_STEP_NODELIST:-$SLURM_JOB_NODELIST}" | head -n 1)
  fi
  # the port: the same in all tasks, and below those that the system gives to anyone
  MASTER_ADDR=${MASTER_ADDR:-127.0.0.1} MASTER_PORT=${MASTER_PORT:-$((20000 + ${SLURM_JOB_ID:-0} % 12000))}
  LOCAL_WORLD_SIZE=$NPROC_PER_NODE
  export NNODES NODE_RANK NPROC_PER_NODE WORLD_SIZE RANK LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT
}
