# shellcheck shell=bash disable=SC2034
# One shared machine with a few GPUs on which everybody logs in and submits, as in CSE599-O's handout (A1 part 2,
# section 1.4): no accounts, one partition that is the default, GPUs by --gres. Use only one of such machines:
# they do not share a queue.

# The queue is shared: a short limit lets others in between; the job resumes after them.
options=(--gres=gpu:1 --cpus-per-task=4 --time=02:00:00)

# The .venv that `make install` made in the project is found without any setup. In another environment:
# export LMCORE_SETUP='source ~/venvs/lmcore/bin/activate'

options_of=([writeup]="--gres=none --time=00:20:00")
