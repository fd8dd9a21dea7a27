"""The cases of `speed.py`: what is measured, against whom, and how well it has to do; and the rows that come of it."""

import importlib
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from timeit import default_timer
from typing import Any

import torch
from torch import Tensor

from lmcore.device import select_device
from lmcore.errors import UserError
from lmcore.profiling.kernels import allocated, relative_error
from lmcore.profiling.peak_rates import peak_rates
from lmcore.profiling.runner import ending
from lmcore.profiling.timing import MOST, Timer
from lmcore.provenance import environment

CUDNN, FLASH, FA4 = "SDPA cuDNN", "SDPA FlashAttention", "FlashAttention-4"
OURS, OUR_FLASH = FAST_PATH = ("lmcore fused", "lmcore flash")
"""Our own contestants; whatever else of ours takes part is there for comparison."""
HF_BEST = "HF compiled + CUDA graph"
PACKED, FLOAT8 = "torch.nn packed, compiled + CUDA graph", "torchao float8, compiled + CUDA graph"
GENERATE, GRAPH = "HF generate, static cache", "HF static cache, compiled + CUDA graph"

LENGTHS = (512, 1024, 4096, 16384)
TOKENS = 16384
"""Tokens of an attention call by length: the batch shrinks as the sequences grow."""
Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class BenchmarkCase:
    """One piece of work, which several contestants do in one process."""

    row: str
    group: str
    work: str
    measure: str
    """The function that does it, `module:function`; it gets the case and `Conditions` and returns rows."""
    settings: dict[str, Any]


@dataclass(frozen=True)
class Conditions:
    """Under which a case is measured: where, how long, and what the device can do at best."""

    device: str
    toy: bool
    """Sizes for a test of the command: nothing is compiled, and the times mean nothing."""
    seconds: float
    """Time that the turns may take, building and compiling excluded."""
    peak_rates: dict[str, float]

    def compiled(self, function: Callable) -> Callable:
        """torch.compile for these very shapes; at toy sizes the function as it is, since compiling takes seconds."""
        return function if self.toy else torch.compile(function, dynamic=False)


def examined(device: str, toy: bool) -> dict[str, Any]:
    """In a process of its own: the device, the environment and the peak rates of this run."""
    chosen, _ = select_device(device)
    roofs = peak_rates(chosen, "fp32" if toy else "bf16")
    copy, matmul = roofs["peak_bytes_per_second"], roofs["peak_flops_per_second"]
    found = {"copy_bytes_per_second": copy, "bf16_flops_per_second": matmul}
    return {"device": str(chosen), "environment": environment(), "peak_rates": found}


def perform(case: BenchmarkCase, conditions: Conditions) -> Rows:
    """In the case's process: its measurement."""
    module, _, function = case.measure.partition(":")
    return getattr(importlib.import_module(module), function)(case, conditions)


class Absent(UserError):
    """A contestant that this machine or its software does not have; the message says why."""


@dataclass
class Contestant:
    """Someone who is ready to do the work: inputs are made, code is compiled."""

    run: Callable[[], Any]
    reset: Callable[[], Any] | None = None
    """Called, untimed, before every call of a contestant that continues from somewhere."""
    results: Sequence[Tensor] | None = None
    """What is held against the reference; None: what the first call returns."""
    notes: dict[str, Any] = field(default_factory=dict)

    def call(self) -> Any:
        """One call, on fresh inputs where it matters."""
        if self.reset is not None:
            self.reset()
        return self.run()


def timed_rows(
    case: BenchmarkCase,
    conditions: Conditions,
    builders: Mapping[str, Callable[[], Contestant]],
    amount: float,
    rate_unit: str,
    ideal: float | None,
    share_of: str,
    alone: bool = True,
    reference: Sequence[Tensor] | None = None,
    part: Callable[[Tensor], Tensor] = lambda x: x,
) -> Rows:
    """Builds every contestant, holds `part` of its results against `reference`, and times all in turns; a row for each.

    A contestant that cannot be built is a row that says why; for `alone` see `in_turns`. A call does `amount`, of
    `rate_unit` times seconds (TFLOP, GB or tokens), in `ideal` seconds at the whole of `share_of`. Times are in ms: the
    median, first and last decile; shares from 0 to 1; `peak_bytes` beyond what was there before (None off CUDA).
    """
    timer, rows, ready = Timer(torch.device(conditions.device)), {}, {}
    for name, build in builders.items():
        try:
            before, one = allocated(timer.device), build()
            found = one.call()
            timer.synchronize()
            peak = torch.cuda.max_memory_allocated(timer.device) - before if timer.cuda else None
            if reference is not None:
                pairs = zip(one.results or map(part, found), reference, strict=True)
                one.notes["relative_error"] = max(relative_error(*pair) for pair in pairs)
            one.results = None
        except (ImportError, UserError) as error:
            rows[name] = blank_row(case, name, "absent", str(error))
        except Exception as error:
            rows[name] = blank_row(case, name, *ending(error))
        else:
            ready[name] = one.run, one.reset
            rows[name] = blank_row(case, name, "complete", None) | {"peak_bytes": peak, "notes": one.notes}
    for name, seconds in in_turns(timer, ready, conditions.seconds, least=7, alone=alone).items():
        median, deciles = statistics.median(seconds), statistics.quantiles(seconds, n=10, method="inclusive")
        rows[name] |= {"median": median * 1e3, "low": deciles[0] * 1e3, "high": deciles[-1] * 1e3}
        rows[name] |= {"repeats": len(seconds), "rate": amount / median, "rate_unit": rate_unit}
        rows[name] |= {"share": None if ideal is None else ideal / median, "share_of": share_of}
    return [*rows.values()]


def in_turns(
    timer: Timer, calls: Mapping[str, tuple[Callable[[], Any], Callable[[], Any] | None]], seconds: float, least: int,
    alone: bool = True,
) -> dict[str, list[float]]:  # fmt: skip
    """Seconds of calls of each (function, reset), for about so many `seconds` in all.

    They take turns, so that what else the machine does falls on all of them, and every round has the opposite order.
    `alone` times each call by itself; otherwise what has no reset runs back to back, as the steps of a training run do,
    launches included, with nothing queued before.
    """
    flushes, times = {}, {}
    for name, (function, reset) in calls.items():
        timer.once(function, 0, reset)
        took, issue = timer.once(function, int(alone and timer.cuda), reset)
        flushes[name] = timer.flushes_for(issue) if alone else 0
        times[name] = 1 if alone or reset else max(1, math.ceil(seconds / MOST / took))
    taken, began, rounds = {name: [] for name in calls}, default_timer(), 0
    while rounds < least or (rounds < MOST and default_timer() - began < seconds):
        for name in list(calls)[:: -1 if rounds % 2 else 1]:
            function, reset = calls[name]
            run = partial(repeat, function, times[name])
            took, _, flushes[name] = timer.covered(run, flushes[name], reset)
            taken[name].append(took / times[name])
        rounds += 1
    return taken


def repeat(function: Callable[[], Any], times: int) -> None:
    """Calls back to back."""
    for _ in range(times):
        function()


def blank_row(case: BenchmarkCase, contestant: str, outcome: str, reason: str | None) -> dict[str, Any]:
    """The row of a contestant without a time."""
    head = {name: getattr(case, name) for name in ("row", "group", "work", "settings")}
    head |= {"contestant": contestant, "ours": contestant in FAST_PATH, "unit": "ms"}
    empty = dict.fromkeys(("median", "low", "high")) | {"repeats": 0}
    empty |= dict.fromkeys(("peak_bytes", "rate", "rate_unit", "share", "share_of"))
    return head | empty | {"outcome": outcome, "reason": reason, "notes": {}}


def all_cases() -> list[BenchmarkCase]:
    """The cases that an H200 is measured with."""
    adamw = {"d_model": 2560, "d_ff": 10496, "blocks": 10, "parameters": 1_068_288_000}
    muon = {"d_model": 768, "d_ff": 2048, "blocks": 12, "parameters": 84_934_656}
    return [
        *(attention_case(size, n, mode) for size in (64, 128) for mode in ("forward", "both") for n in LENGTHS),
        *(BenchmarkCase(f"host-{kernel}-{mode}", "host", f"host time of an eager call: {kernel}, {passes}",
                        "kernel_peers:host", {"mode": mode, "contestants": names})
          for kernel, names in (("attention", [CUDNN, FLASH, FA4, OUR_FLASH]), ("loss", []))
          for mode, passes in (("forward", "forward"), ("both", "forward + backward"))),
        BenchmarkCase("adamw", "optimizer", "AdamW, 1.07 B fp32 parameters", "kernel_peers:adamw", adamw),
        BenchmarkCase("muon", "optimizer", "Muon, 84.9 M fp32 parameters of 12 blocks", "kernel_peers:muon", muon),
        *(BenchmarkCase(row, "loss", f"linear + cross-entropy, 16,384 × {size:,}, d {d_model:,}, forward + backward",
                        "kernel_peers:loss",
                        {"rows": 16384, "d_model": d_model, "vocab_size": size, "precision": "bf16"})
          for row, d_model, size in (("loss", 768, 50_257), ("loss-8b", 4096, 131_072))),
        *(BenchmarkCase(f"recipe-{name}", "recipe", f"recipe {name}, full step", "steps:measure",
                        {"recipe": name, "vocab_size": 50_257, "contestants": ["lmcore plain", OURS]})
          for name in ("best-at-budget", "ten-minutes")),
        step_case("tinystories", 32, 256, ("HF eager", HF_BEST, PACKED, OURS)),
        step_case("tinystories", 256, 256),
        step_case("small", 4, 1024),
        step_case("small", 4, 256),
        step_case("large", 4, 1024, (HF_BEST, PACKED, FLOAT8, OURS)),
        step_case("2.7b", 4, 256, (PACKED, OURS)),  # a third would not fit
        replace(step_case("2.7b", 4, 256, (FLOAT8, OURS)), row="step-2.7b-4x256-float8",
                work="2.7b model, 4 × 256, full step, beside float8"),
        BenchmarkCase("train-handout", "train", "`lmcore train --preset handout`, embedded stories, 5,000 steps",
                      "processes:measure", {"steps": 5000, "until": "end"}),
        BenchmarkCase("train-handout-first", "train",
                      "`lmcore train --preset handout`, embedded stories, to its first metrics",
                      "processes:measure", {"steps": 5000, "until": "first line"}),
        *(decode_case(size, batch) for size, batch in (("small", 1), ("2.7b", 1), ("small", 64), ("small", 8))),
        # Hugging Face's own loop, with nobody beside it: where it has run, CUDA graphs of others take twice as long
        replace(decode_case("small", 1, (GENERATE,)), row="decode-small-1-generate",
                work="decode, batch 1, small, Hugging Face's own loop"),
        *(replace(attention_case(64, n, "both", 1, ("plain", "SDPA", OUR_FLASH), unchecked=True), group="memory",
                  row=f"memory-attention-{n}", work=f"memory of attention forward + backward by length: {n:,}")
          for n in (1024, 2048, 4096, 8192, 16384, 32768)),
        *(replace(step_case("small", 4, n, ("lmcore plain", OURS)), group="memory",
                  row=f"memory-step-{n}", work=f"memory of a full step by length: {n:,}")
          for n in (512, 1024, 2048, 4096, 8192)),
    ]  # fmt: skip


def attention_case(
    head_size: int, length: int, mode: str, batch_size: int = 0, contestants: tuple[str, ...] = (), **more: Any
) -> BenchmarkCase:
    """Causal attention, of `TOKENS` unless a batch size is given."""
    settings = {"batch_size": batch_size or TOKENS // length, "heads": 16, "context_length": length,
                "head_size": head_size, "causal": True, "mode": mode, "precision": "bf16",
                "contestants": list(contestants or (CUDNN, FLASH, FA4, OUR_FLASH))} | more  # fmt: skip
    words = "forward + backward" if mode == "both" else "forward"
    work = f"attention {words}, causal, head size {head_size}, {length:,} positions"
    name = f"attention-{head_size}-{length}-{mode}"
    return BenchmarkCase(name, "attention", work, "kernel_peers:attention", settings)


def step_case(
    size: str, batch_size: int, length: int, contestants: tuple[str, ...] = (HF_BEST, PACKED, OURS)
) -> BenchmarkCase:
    """A full training step; the vocabulary is that of CS336 A2 (section 1.1.2)."""
    settings = {"size": size, "batch_size": batch_size, "context_length": length, "vocab_size": 10_000,
                "precision": "bf16", "contestants": list(contestants)}  # fmt: skip
    work = f"{'TinyStories' if size == 'tinystories' else size} model, {batch_size} × {length:,}, full step"
    return BenchmarkCase(f"step-{size}-{batch_size}x{length}", "step", work, "steps:measure", settings)


def decode_case(size: str, batch_size: int, contestants: tuple[str, ...] = (GRAPH, OURS)) -> BenchmarkCase:
    """Decoding of 256 tokens after a prompt of 16."""
    settings = {"size": size, "batch_size": batch_size, "prompt_tokens": 16, "new_tokens": 256, "context_length": 512,
                "vocab_size": 10_000, "precision": "bf16", "contestants": list(contestants)}  # fmt: skip
    work = f"decode, batch {batch_size}, {size}"
    return BenchmarkCase(f"decode-{size}-{batch_size}", "decode", work, "decode:measure", settings)


TOY = {
    "size": "smoke", "batch_size": 2, "context_length": 16, "vocab_size": 512, "prompt_tokens": 4, "new_tokens": 4,
    "heads": 2, "head_size": 16, "rows": 32, "d_model": 32, "d_ff": 64, "blocks": 2,
}  # fmt: skip


def toy_cases() -> list[BenchmarkCase]:
    """One case of every kind at sizes that take seconds on a CPU."""

    kinds: dict[Any, BenchmarkCase] = {}
    for case in all_cases():
        small = replace(case, settings={name: TOY.get(name, value) for name, value in case.settings.items()})
        kinds.setdefault((case.group, case.measure, str(case.settings.get("contestants"))), small)
    return [*kinds.values()]


def targets() -> list[dict[str, Any]]:
    """What has to be reached, on one H200 in bf16.

    `measure` is a field of our row, or `rate over NAME`, our rate divided by that contestant's in the same row, or by
    the best of all peers.
    """
    attention = [
        (f"attention-{size}-{length}-{mode}", "rate over best peer", 1.0, "≥ best peer")
        for size in (128, 64)
        for mode in ("forward", "both")
        for length in (512, 1024, 4096, 16384)
    ]
    steps = {"tinystories-32x256": 1.4, "tinystories-256x256": 1.4, "small-4x1024": 1.4, "small-4x256": 1.4,
             "large-4x1024": 1.35, "2.7b-4x256": 1.4}  # fmt: skip
    rows = [
        *((f"step-{name}", "rate over best peer", least, f"≥ {least} × best peer") for name, least in steps.items()),
        ("step-tinystories-256x256", "share", 0.49, "≥ 49 % MFU"),
        ("train-handout", "median", 36e3, "≤ 36 s"),
        ("train-handout-first", "median", 6e3, "≤ 6 s"),
        ("recipe-best-at-budget", "rate", 1.8e6, "≥ 1.8 million tok/s"),
        ("recipe-ten-minutes", "rate", 2.2e6, "≥ 2.2 million tok/s"),
        *attention,
        ("attention-128-16384-both", "rate", 690, "≥ 690 TFLOP/s"),
        ("attention-64-16384-both", "rate", 590, "≥ 590 TFLOP/s"),
        *((f"host-{kernel}-forward", "median", 0.06, "≤ 60 µs") for kernel in ("attention", "loss")),
        ("adamw", "share", 0.93, "≥ 93 % of copy"),
        ("muon", "rate over best peer", 1.0, "≥ best peer"),
        *((row, "rate over best peer", 1.0, "≥ best peer") for row in ("loss", "loss-8b")),
        *((row, "rate", 650, "≥ 650 TFLOP/s") for row in ("loss", "loss-8b")),
        ("decode-small-1", "share", 0.45, "≥ 45 % of copy"),
        ("decode-2.7b-1", "share", 0.79, "≥ 79 % of copy"),
        ("decode-small-64", "rate over best peer", 1.5, "≥ 1.5 × best peer"),
    ]
    bounds = {"≤": "at_most", "≥": "at_least"}
    return [
        {"row": row, "measure": measure, bounds[text[0]]: number, "text": text} for row, measure, number, text in rows
    ]
