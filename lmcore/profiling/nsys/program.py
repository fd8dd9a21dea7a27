"""The program that a profiler watches: warm-ups unseen, then inference passes and training steps, each in a range.

`python -m lmcore.profiling.nsys.program config.json` runs it for Nsight Systems, which cannot look into a notebook.
"""

import contextlib
import copy
import gc
import json
import sys
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lmcore.config import from_dict
from lmcore.device import out_of_memory_reason
from lmcore.errors import EXIT_CODES, EXIT_USER_ERROR, UserError
from lmcore.files import read_json, write_json
from lmcore.profiling.nsys.nvtx import annotated, nvtx_span
from lmcore.profiling.workload import Span, Workload, WorkloadConfig, no_span, require_memory

WARM_UP, INFERENCE, TRAINING = "warm-up", "inference", "training step"
"""Outermost ranges of the program, one for each pass or step; the device has done its work when they end."""

OUTCOME_FILE = "outcome.json"


def run_passes(config: WorkloadConfig, span: Span, recording: AbstractContextManager) -> dict[str, Any]:
    """Warm-ups, then inside `recording` config.steps inference passes and as many training steps (not for "forward").

    All warm-ups come first. A lack of memory in training ends the training alone; in inference it is raised.
    Returns training_outcome (None, "complete" or "out of memory") and training_reason.
    """
    inference = Workload(replace(config, passes="forward"))
    training = copy.copy(inference)  # the same model and batch
    training.config = config
    outcome: dict[str, Any] = {"training_outcome": None, "training_reason": None}
    # a compiled model has no modules left to see, and hooks would break its graph
    with annotated(training.model, no_span if config.compile else span):
        repeat(inference, config.warmup_steps, WARM_UP, span)
        if config.passes != "forward":
            outcome = train(training, config.warmup_steps, WARM_UP, span)
        with recording:
            repeat(inference, config.steps, INFERENCE, span)
            if outcome["training_outcome"] == "complete":
                outcome = train(training, config.steps, TRAINING, span)
    return outcome


def repeat(workload: Workload, times: int, name: str, span: Span) -> None:
    """Steps in ranges of this name, each waited for."""
    workload.synchronize()
    for _ in range(times):
        with span(name):
            workload.step(span)
            workload.synchronize()


def train(workload: Workload, times: int, name: str, span: Span) -> dict[str, Any]:
    """Training steps as by `repeat`, and their outcome. What a step that did not fit had allocated is given back."""
    try:
        require_memory(workload.config, workload.device)
        repeat(workload, times, name, span)
    except Exception as error:
        if (reason := out_of_memory_reason(error)) is None:
            raise
    else:
        return {"training_outcome": "complete", "training_reason": None}
    workload.optimizer.zero_grad(set_to_none=True)
    workload.optimizer.state.clear()
    gc.collect()
    if workload.device.type == "cuda":
        torch.cuda.empty_cache()
    return {"training_outcome": "out of memory", "training_reason": reason}


def main(path: Path) -> int:
    """Runs the workload of a config file under the CUDA profiler's switch; outcome.json is written beside the file."""
    result: dict[str, Any] = {"outcome": "complete", "reason": None}
    try:
        config = from_dict(WorkloadConfig, read_json(path))
        on_cuda = torch.cuda.is_available()
        span = nvtx_span if on_cuda else no_span
        recording = torch.cuda.profiler.profile() if on_cuda else contextlib.nullcontext()
        result |= run_passes(config, span, recording)
    except UserError as error:
        print(f"lmcore: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    except Exception as error:
        if (reason := out_of_memory_reason(error)) is None:
            raise
        result |= {"outcome": "out of memory", "reason": reason}
    write_json(path.with_name(OUTCOME_FILE), result)
    print(json.dumps(result))
    return EXIT_CODES[result["outcome"]]


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
