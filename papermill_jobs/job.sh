# shellcheck shell=bash
# What the job scripts share. Source it from the project's folder:
#   supervise COMMAND   runs it; at the time limit it is told to save itself, and the job is queued again
#   export_rendezvous   what torchrun needs, also in the tasks of an srun: see the end of this file
#
# Variables, the same as the Makefile's: SCALE, DATA, OUT, NOTEBOOKS. ATTEMPTS: how often in a row a job may be stopped
# without having got anywhere before it is no longer queued again. STOP_SECONDS: how long training may take to save
# itself, less than the time between the signal and the end (--signal in the scripts). LMCORE_SETUP: lines of shell to
# run first (`setup` in site.yaml).

SCALE=${SCALE:-smoke}
DATA=${DATA:-embedded}
OUT=${OUT:-runs/$SCALE}
NOTEBOOKS=${NOTEBOOKS:-}
ATTEMPTS=${ATTEMPTS:-3}
STOP_SECONDS=${STOP_SECONDS:-100}

INTERRUPTED=75 # the exit code of lmcore when a signal stopped it and everything is saved
STOPPED=       # the signal that this job got: USR1 or TERM
CHILD=         # process id of the command under `supervise`

# A task of an array has a name of its own: Slurm would requeue the whole array by the id of its last task.
if [[ -n ${SLURM_ARRAY_TASK_ID:-} && -n ${SLURM_ARRAY_JOB_ID:-} ]]; then
  LMCORE_JOB_ID=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
else
  LMCORE_JOB_ID=${SLURM_JOB_ID:-${LMCORE_JOB_ID:-by-hand-$$}}
fi
LMCORE_JOB_NAME=${SLURM_JOB_NAME:-${LMCORE_JOB_NAME:-$(basename "$0" .sbatch)}}
LMCORE_JOB_NAME=${LMCORE_JOB_NAME//[[:space:]]/_}
export LMCORE_JOB_ID LMCORE_JOB_NAME

supervise() {
  local code=$INTERRUPTED
  trap 'pass_on USR1' USR1
  trap 'pass_on TERM' TERM INT HUP # a HUP that nohup ignores stays ignored
  prepare_job
  note running "host=$(hostname)" "restart=${SLURM_RESTART_COUNT:-0}"
  if [[ -z $STOPPED ]]; then
    # bash lets commands in the background ignore Ctrl-C, which is how a notebook's cell is interrupted
    (
      trap - INT
      exec "$@"
    ) &
    CHILD=$!
    if [[ -n $STOPPED ]]; then # it came before CHILD was known
      sleep 1
      pass_on "$STOPPED"
    fi
    # a signal ends `wait`, not the command: wait until it is gone, then ask for its exit code
    while kill -0 "$CHILD" 2>/dev/null; do wait "$CHILD" || true; done
    code=0
    wait "$CHILD" || code=$?
    CHILD=
  fi
  if was_interrupted "$code" && is_to_go_on; then
    code=$INTERRUPTED
    # it notes "requeued" or "gave-up"; Slurm ends the processes of a job that it queues again, before it could say so
    if (trap '' TERM && exec lmcore requeue "$OUT" --attempts "$ATTEMPTS"); then exit "$code"; fi
  fi
  note exit "code=$code"
  exit "$code"
}

# The site's setup, lmcore on the PATH, a folder for results, what torchrun reads.
prepare_job() {
  set +u # what modules and conda run may use variables that are not set
  eval "${LMCORE_SETUP:-}"
  set -u
  if ! command -v lmcore >/dev/null; then
    if [[ ! -x $PWD/.venv/bin/lmcore ]]; then
      echo "lmcore: It is not installed here: activate its environment before sbatch (or in site.yaml's setup), or run make install once in $PWD." >&2
      exit 2
    fi
    PATH=$PWD/.venv/bin:$PATH
  fi
  local said
  if ! said=$(mkdir -p "$OUT" 2>&1); then
    echo "lmcore: The folder $OUT cannot be made (${said##*: }); choose another OUT." >&2
    exit 2
  fi
  unset SLURM_STEP_NUM_NODES SLURM_STEP_NODELIST # of a step from which this was submitted
  export_rendezvous
}

# One line for each state of the job in OUT/jobs.log, which `lmcore jobs` reads where Slurm has forgotten the job: time,
# id, name, state, and more as name=value. Jobs on other nodes write there, too: the lock keeps their lines apart.
note() {
  {
    flock -w 5 9 2>/dev/null || true
    echo "$(date -u +%Y-%m-%dT%H:%M:%S+00:00) $LMCORE_JOB_ID $LMCORE_JOB_NAME $*" >&9
  } 9>>"$OUT/jobs.log" || true
}

# Slurm signals this script alone (--signal=B:), or all processes of the job at once (scancel): the command may get a
# signal twice, which does no harm.
pass_on() {
  if [[ $1 == TERM && $STOPPED != TERM && -n $CHILD ]]; then note stopping; fi # there may be no time for its end
  # whoever cancels a job that is about to be queued again wants it to end
  if [[ $STOPPED != TERM ]]; then STOPPED=$1; fi
  if [[ -n $CHILD ]]; then kill -s "$1" "$CHILD" 2>/dev/null || true; fi
}

# Whether the command saved itself, or was still starting and died of the signal.
was_interrupted() {
  [[ -n $STOPPED ]] && (($1 == INTERRUPTED || $1 == 128 + $(kill -l "$STOPPED")))
}

# USR1: the time limit is near, or somebody needs the node. TERM is mostly scancel, which is meant; but where a
# partition gives preempted jobs time, they get TERM too, and Slurm knows of the preemption.
is_to_go_on() {
  [[ $LMCORE_JOB_ID == by-hand-* ]] && return 1 # nobody would start it again
  [[ $STOPPED == USR1 ]] && return
  [[ -n ${SLURM_JOB_ID:-} ]] && scontrol show job "$LMCORE_JOB_ID" 2>/dev/null | grep -q 'PreemptTime=[0-9]'
}

# bash runs the command in a value that it computes with, as in HOME[$(command)0].
require_numbers() {
  local name
  for name; do
    if [[ ! ${!name:-0} =~ ^(0|[1-9][0-9]*)$ ]]; then
      printf 'lmcore: %s must be a whole number, not %q.\n' "$name" "${!name}" >&2
      exit 2
    fi
  done
}

# What torchrun and torch.distributed read, from Slurm's variables. Slurm starts this script on the first node alone;
# on several nodes call it in each task:
#   srun bash -c '. papermill_jobs/job.sh && export_rendezvous && exec python train_ddp.py'           one task a GPU
#   srun bash -c '. papermill_jobs/job.sh && export_rendezvous && exec torchrun --nnodes $NNODES \
#     --nproc-per-node $NPROC_PER_NODE --node-rank $NODE_RANK --master-addr $MASTER_ADDR \
#     --master-port $MASTER_PORT train_ddp.py'                                                         one task a node
# MASTER_ADDR and MASTER_PORT that are set already stay.
export_rendezvous() {
  require_numbers SLURM_JOB_ID SLURM_NTASKS SLURM_GPUS_ON_NODE SLURM_NODEID GPUS \
    SLURM_STEP_NUM_NODES SLURM_JOB_NUM_NODES SLURM_NNODES
  local tasks=${SLURM_NTASKS:-1} gpus=${SLURM_GPUS_ON_NODE:-1}
  # a step (srun) may have fewer nodes than its job
  NNODES=${SLURM_STEP_NUM_NODES:-${SLURM_JOB_NUM_NODES:-${SLURM_NNODES:-1}}}
  NODE_RANK=${SLURM_NODEID:-0}
  if ((tasks > NNODES)); then # a task for each process
    NPROC_PER_NODE=$((tasks / NNODES))
    WORLD_SIZE=$tasks
    RANK=${SLURM_PROCID:-0}
    LOCAL_RANK=${SLURM_LOCALID:-0}
  else # a task for each node, a process for each GPU
    NPROC_PER_NODE=$((gpus > 0 ? gpus : 1))
    WORLD_SIZE=$((NNODES * NPROC_PER_NODE))
    RANK=$((NODE_RANK * NPROC_PER_NODE))
    LOCAL_RANK=0
  fi
  if [[ -z ${MASTER_ADDR:-} ]]; then
    MASTER_ADDR=127.0.0.1
    if ((NNODES > 1)); then MASTER_ADDR=$(scontrol show hostnames "${SLURM_STEP_NODELIST:-$SLURM_JOB_NODELIST}" | head -n 1); fi
  fi
  # the same in all tasks, another one for each job of a node, and below those that the system gives to anyone (32768 on)
  MASTER_PORT=${MASTER_PORT:-$((20000 + ${SLURM_JOB_ID:-0} % 12000))}
  LOCAL_WORLD_SIZE=$NPROC_PER_NODE
  export NNODES NODE_RANK NPROC_PER_NODE WORLD_SIZE RANK LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT
}
