"""Any PyTorch code under the profilers: time, kernels and memory of a step, which is a function without arguments."""

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lmcore.device import select_device, synchronize
from lmcore.profiling.cases import WorkloadConfig
from lmcore.profiling.memory.profile import explained_step, known_storages
from lmcore.profiling.nsys.categories import OPTIMIZER_RANGE
from lmcore.profiling.nsys.nvtx import annotated, in_span
from lmcore.profiling.nsys.torch_trace import read_torch_trace
from lmcore.profiling.nsys.trace import Trace
from lmcore.profiling.timing import summary, timed_steps
from lmcore.profiling.workload import Span, no_span

STEP = "step"
"""The outermost range of a step."""

RECORD = "profile.json.gz"


@dataclass
class OwnStep:
    """A function as a step of a workload (see `lmcore.profiling.workload.Workload`)."""

    function: Callable[[], Any]
    device: torch.device

    def step(self, span: Span = no_span) -> Any:
        """Calls the function, in `span("step")`."""
        with span(STEP):
            return self.function()

    def synchronize(self) -> None:
        """Waits until the device has done all that it was given."""
        synchronize(self.device)


def device_of(model: Module | None, device: str) -> torch.device:
    """The device that `device` names; "auto": the one of the model's first parameter, without a model the best here."""
    parameter = next(model.parameters(), None) if model is not None else None
    return parameter.device if parameter is not None and device == "auto" else select_device(device)[0]


def time_steps(
    step: Callable[[], Any], *, warmup: int = 5, steps: int = 10, device: str = "auto", tokens: int | None = None
) -> dict[str, Any]:
    """Times `steps` calls of a step after `warmup` others, each with a synchronization on both sides.

    Returns "device", its name; "wall" by the host's clock, "cuda" by CUDA events and "busy", while the GPU works, each
    {"mean", "std", "median", "spread"} in seconds (`summary`), None off CUDA; "peak_memory_bytes" of CUDA's allocator;
    "joules_per_step", None where NVML counts none; of a step of so many `tokens` "tokens_per_second" and
    "joules_per_token". Raises `UserError` for a device that is not there and for numbers of steps that measure nothing.
    """
    own = OwnStep(step, select_device(device)[0])
    found = timed_steps(lambda _: own, WorkloadConfig(warmup_steps=warmup, steps=steps))
    counted = [sample for sample in found["samples"] if not sample["warmup"]]
    result = {name: found[name] for name in ("device", "peak_memory_bytes", "joules_per_step")}
    result |= {name: summary([sample[name] for sample in counted]) for name in ("wall", "cuda")}
    result["busy"] = summary([sample[STEP] for sample in found["busy_steps"]])
    if tokens is not None:
        joules = found["joules_per_step"]
        result["tokens_per_second"] = tokens / result["wall"]["median"]
        result["joules_per_token"] = None if joules is None else joules / tokens
    return result


@contextlib.contextmanager
def staged(span: Span) -> Iterator[None]:
    """Puts `span` on each pass of autograd ("backward") and each update ("optimizer") that is made inside.

    A pass inside of another one, as reentrant checkpointing makes, belongs to it.
    """
    running: set[str] = set()

    @contextlib.contextmanager
    def outermost(name: str) -> Iterator[None]:
        if name in running:
            yield
            return
        running.add(name)
        with span(name):
            yield
        running.remove(name)

    with contextlib.ExitStack() as undo:
        update = undo.enter_context(contextlib.ExitStack())

        def begin_update(*_: Any) -> None:
            update.enter_context(outermost(OPTIMIZER_RANGE))

        for name in ("backward", "grad"):
            original = getattr(torch.autograd, name)
            undo.callback(setattr, torch.autograd, name, original)
            setattr(torch.autograd, name, in_span(original, "backward", outermost))
        undo.callback(register_optimizer_step_pre_hook(begin_update).remove)
        undo.callback(register_optimizer_step_post_hook(lambda *_: update.close()).remove)
        yield


def profile_kernels(
    step: Callable[[], Any], model: Module | None = None, *, warmup: int = 3, steps: int = 3,
    folder: Path | str | None = None, device: str = "auto",
) -> Trace:  # fmt: skip
    """Records `steps` calls of a step with torch.profiler: kernels and copies on a GPU, else the CPU's operators.

    The trace has a range "step" for each call, inside it "backward" and "optimizer", and one for each module of `model`
    (`range_names`; none of a compiled one). Of `lmcore.profiling.nsys.trace`, `busy_table(trace, "step")` has busy and
    idle time by device, `totals(trace.kernels, ["category"])` what kernels do. Ranges take time on the CPU: see
    `time_steps`. In `folder` the record is kept as profile.json.gz, for ui.perfetto.dev and `read_torch_trace`.
    """
    own = OwnStep(step, device_of(model, device))
    span, profiler = torch.profiler.record_function, torch.profiler.profile()
    with annotated(model, span) if model is not None else contextlib.nullcontext(), staged(span):
        for number in range(warmup + steps):
            if number == warmup:
                profiler.start()
            with span(STEP):
                own.function()
                own.synchronize()
        profiler.stop()
    with tempfile.TemporaryDirectory() as scratch:
        record = Path(folder or scratch) / RECORD
        record.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(record))
        return read_torch_trace(record)


def record_memory(
    step: Callable[[], Any], model: Module | None = None, optimizer: Optimizer | None = None, *, warmup: int = 2,
    device: str = "auto",
) -> dict[str, Any]:  # fmt: skip
    """Records every allocation of one call of a step, after `warmup` others (at least one).

    Returns the keys of `profile_memory` but "snapshot", in bytes: such as "peak_by_category" when all is at its peak,
    "most_by_category", each owner's own peak, "timeline" and "largest". The stages are "forward" (since the stage
    before), "backward" and "optimizer", later ones "backward 2" and so on, or "step" without any. Parameters, gradients
    and optimizer state are known of `model` (several: in an `nn.ModuleList`) and `optimizer` alone.
    """
    own = OwnStep(step, device_of(model, device))
    for _ in range(max(1, warmup)):
        own.step()
    own.synchronize()

    def in_stages(span: Span) -> Any:
        with staged(span):
            return own.function()

    return explained_step(in_stages, own.device, partial(known_storages, own.device, model, optimizer))[0]
