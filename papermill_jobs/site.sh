# shellcheck shell=bash disable=SC2034
# What differs between clusters, for submit.sh, which sources this file. Everything is optional: what is not set stays as
# the scripts in this folder have it, or is your cluster's default. Two worked examples are in sites/; take one with
# SITE=papermill_jobs/sites/hyak.sh, or copy its lines here. To set something, remove the # before it.

# options=(                     # of sbatch, any of `man sbatch`
#   --account=mylab
#   --partition=gpu
#   --gres=gpu:a40:1            # of each node
#   --cpus-per-task=4
#   --mem=32G
#   --time=08:00:00             # the limit of each job; a job that needs longer saves itself and is queued again
#   --mail-type=END,FAIL
#   --signal=B:USR1@180         # 180 seconds before the limit, rather than 120, the training is told to save itself
# )
# export STOP_SECONDS=150       # how long saving may take (default 100); less than the seconds in --signal
# export LMCORE_GPT2=/shared/gpt2

# Lines of shell that run before anything else of a job:
# export LMCORE_SETUP='module load cuda
#   source ~/miniconda3/etc/profile.d/conda.sh
#   conda activate lmcore'

options_of=([writeup]="--gres=none --time=00:30:00") # other options for the jobs of these names: [02_train]=--mem=64G
