#!/bin/bash
# All rows of parallel.py's tables for so many GPUs, and one: benchmarks/parallel.sh 2 [--out FILE] [--toy].
# Without --out to results/h200/parallel_2.json. Peers in a CUDA graph have a process each. Rows that the file holds are
# not measured again: after a break, the same.
set -u
gpus=$1
shift
options=(--out "results/h200/parallel_$gpus.json" "$@") # the last --out holds

measure() { # number of processes, works, and -- before the contestants
  local ranks=$1 works=()
  shift
  while [ "$1" != -- ]; do works+=("$1") && shift; done
  shift
  torchrun --standalone --nproc-per-node "$ranks" benchmarks/parallel.py "${options[@]}" \
    --only "${works[@]}" --times "$times" --contestants "$@"
}

ours=("lmcore explicit step, ddp" "lmcore explicit step, zero1" "lmcore explicit step, fsdp")
peers=("HF compiled, torch DDP" "HF compiled, FSDP2")
times=3 # in turns
measure "$gpus" 2.7b-4x512 -- "${ours[@]}" "lmcore explicit step, fsdp, recomputing" "${peers[@]}"
times=1
measure "$gpus" tinystories-256x256 large-4x1024 -- "${ours[@]}" "${peers[@]}"
measure "$gpus" "tinystories-256x256 in all" all-reduce -- "${ours[0]}" NCCL "lmcore ring"
for peer in "HF compiled + CUDA graph, FSDP2" "HF compiled + CUDA graph, torch DDP"; do
  for work in 2.7b-4x512 large-4x1024 tinystories-256x256; do measure "$gpus" "$work" -- "$peer"; done
done
measure 1 2.7b-4x512 -- "${ours[0]}" "${ours[2]}"
measure 1 tinystories-256x256 large-4x1024 "tinystories-256x256 in all" -- "${ours[0]}"
measure "$gpus" 2.7b-4x512 -- "lmcore ddp" "lmcore zero1" "lmcore fsdp" "lmcore torch-fsdp2"
