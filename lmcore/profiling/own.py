"""One's own PyTorch code under the profilers: time, energy, kernels, memory of a step, a function without arguments."""

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lmcore.device import select_device
from lmcore.errors import require
from lmcore.profiling.memory.profile import explained_step, tensors_of
from lmcore.profiling.nsys.categories import OPTIMIZER_RANGE
from lmcore.profiling.nsys.nvtx import annotated, in_span
from lmcore.profiling.nsys.profile import TORCH_RECORD, repeat
from lmcore.profiling.nsys.torch_trace import read_torch_trace
from lmcore.profiling.nsys.trace import Trace
from lmcore.profiling.timing import measured_columns, timed_steps
from lmcore.profiling.workload import PHASES, Span

STEP = "step"
"""The outermost range of a step."""


def device_of(model: Module | None, device: str) -> torch.device:
    """The device that `device` names; "auto": the one of the model's first parameter, without a model the best here."""
    parameter = next(model.parameters(), None) if model is not None else None
    return parameter.device if parameter is not None and device == "auto" else select_device(device)[0]


def require_steps(step: Callable[[], Any], warmup: int, steps: int = 1) -> None:
    """Raises `UserError` for what is no function, and for numbers of steps that measure nothing."""
    require(callable(step), f"step must be a function without arguments, not {step!r}.")
    require(steps > 0 <= warmup, f"steps must be positive and warmup not negative, not {steps} and {warmup}.")


def time_steps(
    step: Callable[[], Any], *, warmup: int = 5, steps: int = 10, tokens: int | None = None, device: str = "auto"
) -> dict[str, Any]:
    """Times `steps` calls of a step after `warmup` others, each with a synchronization on both sides.

    Returns columns of `lmcore.profiling.timing.timing_table`, None where a device does not count it: "device"; seconds
    by the host's clock as "wall_median", and mean, std and spread, by CUDA events as "cuda_median", and of the time in
    which the GPU works as "busy_median"; "busy_share", "host_bound"; "peak_memory_bytes"; "joules_per_step"; and of
    `tokens` in a step "tokens_per_second" and "joules_per_token". Raises `UserError` for a device that is not there.
    """
    require_steps(step, warmup, steps)

    def in_range(span: Span) -> Any:
        with span(STEP):
            return step()

    result = timed_steps(in_range, select_device(device)[0], warmup, steps)
    columns = {name: result[name] for name in ("device", "peak_memory_bytes")} | measured_columns([result], tokens)
    return {name: value for name, value in columns.items() if not name.startswith(PHASES)}


@contextlib.contextmanager
def staged(span: Span) -> Iterator[None]:
    """Puts `span` on each backward pass ("backward") and each update ("optimizer") that is made inside."""
    with contextlib.ExitStack() as undo:
        update = undo.enter_context(contextlib.ExitStack())
        for name in ("backward", "grad"):
            original = getattr(torch.autograd, name)
            undo.callback(setattr, torch.autograd, name, original)
            setattr(torch.autograd, name, in_span(original, "backward", span))

        def begin(*_: Any) -> None:
            update.enter_context(span(OPTIMIZER_RANGE))

        undo.callback(register_optimizer_step_pre_hook(begin).remove)
        undo.callback(register_optimizer_step_post_hook(lambda *_: update.close()).remove)
        yield


def profile_kernels(
    step: Callable[[], Any], model: Module | None = None, *, warmup: int = 3, steps: int = 3,
    folder: Path | str | None = None, device: str = "auto",
) -> Trace:  # fmt: skip
    """Records `steps` calls of a step with torch.profiler: kernels and copies on a GPU, else the CPU's operators.

    The trace has a range "step" for each call, inside it "backward" and "optimizer", and one for each module of `model`
    (`lmcore.profiling.nsys.nvtx.range_names`). Of `lmcore.profiling.nsys.trace`, `busy_table(trace, "step")` has busy
    and idle time, by device where there are several, and `totals(trace.kernels, ["category"])` what kernels do. Ranges
    take time on the CPU: durations are those of `time_steps`. In `folder` the record is kept as profile.json.gz, for
    ui.perfetto.dev and `read_torch_trace`.
    """
    require_steps(step, warmup, steps)
    where, span = device_of(model, device), torch.profiler.record_function
    with annotated(model, span) if model is not None else contextlib.nullcontext(), staged(span):
        repeat(lambda span: step(), where, warmup, "warm-up", span)
        with torch.profiler.profile() as profiler:
            repeat(lambda span: step(), where, steps, STEP, span)
    with tempfile.TemporaryDirectory() as scratch:
        record = Path(folder or scratch) / TORCH_RECORD
        record.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(record))
        return read_torch_trace(record)


def record_memory(
    step: Callable[[], Any], model: Module | None = None, optimizer: Optimizer | None = None, *, warmup: int = 2,
    device: str = "auto",
) -> dict[str, Any]:  # fmt: skip
    """Records every allocation of one call of a step, after `warmup` others.

    Returns the keys of `lmcore.profiling.memory.profile.profile_memory` but "snapshot", in bytes: "peak_by_category"
    when all is at its peak, "most_by_category", each owner's own peak, "timeline", "largest" and more. Stages are
    "forward" (what comes before a backward pass), "backward" and "optimizer", later ones "backward 2" and so on, or
    "step" without any. Parameters, gradients and optimizer state are those of `model` (several: in an `nn.ModuleList`)
    and `optimizer`.
    """
    require_steps(step, warmup)
    where = device_of(model, device)
    for _ in range(warmup):
        step()

    def in_stages(span: Span) -> Any:
        with staged(span):
            return step()

    return explained_step(in_stages, where, partial(tensors_of, model, optimizer))[0]
