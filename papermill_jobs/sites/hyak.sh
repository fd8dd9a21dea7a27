# shellcheck shell=bash disable=SC2034,SC2016
# A big cluster with accounts, preemptible partitions, modules or conda, and scratch: in the words of UW's Hyak (klone),
# https://hyak.uw.edu/docs/compute/scheduling-jobs. `hyakalloc` lists your accounts and partitions.

# ckpt-all: idle nodes of everybody. Jobs there are ended after some hours (on GPUs 8 to 9), and without notice whenever
# an owner wants the node, and queued again; the training resumes from its last checkpoint each time. Where your lab
# has GPUs of its own: gpu-l40s, gpu-h200, ...
options=(--account=mylab --partition=ckpt-all --gres=gpu:l40s:1 --cpus-per-task=8 --mem=64G --time=04:00:00)

# The conda environment, in your lab's folder: homes have 10 GB. conda activate works in interactive shells only, unless
# its functions are loaded first.
export LMCORE_SETUP='
  source "/gscratch/mylab/$USER/miniconda3/etc/profile.d/conda.sh"
  conda activate lmcore'

# Results go to runs/, which is large: mkdir -p /gscratch/scrubbed/$USER/runs && ln -s /gscratch/scrubbed/$USER/runs runs
# Files there are deleted when nobody has used them for three weeks: copy OUT/writeup elsewhere.

# The time limit gives notice, preemption gives none: then a job's notebook starts over, its runs resume from their
# checkpoints, and finished cases are kept.
options+=(--signal=B:USR1@180)
export STOP_SECONDS=150

# the writeup needs no GPU
options_of=([02_train]=--cpus-per-task=16 [writeup]="--gres=none --cpus-per-task=2 --mem=8G --time=00:30:00")
