"""`lmcore nsys`: kernels, categories and idle time by range, of a model or of an existing report (CS336 A2 1.1.4)."""

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from lmcore.config import ModelConfig, check_fields
from lmcore.errors import EXIT_FAILURE, EXIT_OUT_OF_MEMORY, require
from lmcore.profiling.cases import BenchmarkConfig, benchmark_cases
from lmcore.text import printable

if TYPE_CHECKING:  # pandas and PyTorch are imported when the command runs
    import pandas as pd

    from lmcore.profiling.nsys.trace import Scope, Trace


@dataclass(frozen=True)
class NsysConfig:
    """What is profiled: every combination of the options that take several values."""

    size: tuple[str, ...] = ()
    """Named sizes; none: the model whose numbers the --model options give."""
    context_length: tuple[int, ...] = ()
    """None: that of --model.context-length."""
    precision: tuple[Literal["fp32", "tf32", "bf16", "fp16"], ...] = ("fp32",)
    mode: Literal["forward", "forward_backward", "train_step"] = "train_step"
    """forward: inference alone; the others: inference, and steps without or with AdamW's update."""
    batch_size: int = 4
    warmup_steps: int = 5
    """Passes, and as many steps, before the record begins."""
    steps: int = 3
    """Passes, and as many steps, that are recorded."""
    compile: bool = False
    device: str = "auto"
    """auto, cpu, mps, cuda or cuda:N."""
    model: ModelConfig = field(default_factory=ModelConfig)

    def __post_init__(self):
        check_fields(self)


DEFAULTS = NsysConfig()

HEADERS = {
    "seconds": ("open (ms)", 1e3), "gpu_seconds": ("gpu (ms)", 1e3), "busy_seconds": ("busy (ms)", 1e3),
    "idle_seconds": ("idle (ms)", 1e3), "total_seconds": ("total (ms)", 1e3), "mean_seconds": ("mean (ms)", 1e3),
    "share": ("share (%)", 100.0), "matmul share": ("matmul (%)", 100.0), "bytes": ("MB", 1e-6),
    "short_name": ("kernel", 1), "calls_per_instance": ("per range", 1),
}  # fmt: skip
"""What columns of tables are called here, and the factor to their unit."""

ROWS_SHOWN = 100
"""Rows of a table of ranges that are printed."""

GPU_TIMES = ["gpu_seconds", "busy_seconds", "idle_seconds"]


def nsys(
    settings: Annotated[NsysConfig, tyro.conf.arg(name="")] = DEFAULTS,
    out: Path = Path("runs/nsys"),
    report: Path | None = None,
    range: str | None = None,
    scope: Literal["process", "thread"] = "process",
    top: int = 10,
) -> int:
    """Profile inference and training with Nsight Systems, or read one of its reports: kernels and idle time by range.

    Without Nsight Systems torch.profiler is used, and the tables say so. The records are reused by the same command.
    Exit codes: 0 profiled, 2 there is no such file or range, 4 out of memory, 1 a case failed; 129, 130 or 143 stopped
    by SIGHUP, SIGINT or SIGTERM.

    Args:
        settings: What is profiled.
        out: Folder for the results, with the report and its SQLite export of each.
        report: Read this .nsys-rep, .sqlite or torch.profiler .json, of whatever program, instead of profiling.
        range: Range of the report to tabulate: a name, the end of a path, with * for anything; default: all, and a
            list of the ranges.
        scope: Launches that count as in a range: all of its process, as backward passes need, or its own thread's.
        top: How many kernels to print.
    """
    require(top > 0, f"--top must be positive, not {top}.")
    require(report is not None or range is None, "--range needs a --report.")
    if report is not None:
        from lmcore.profiling.nsys.tool import load_trace

        print("\n".join(report_lines(load_trace(report), range, scope, top)))
        return 0
    from lmcore.profiling.nsys.profile import profile_workload
    from lmcore.profiling.runner import run_cases

    cases = benchmark_cases(BenchmarkConfig(**(vars(settings) | {"mode": (settings.mode,)})))
    records = run_cases(profile_workload, cases, out / "cases", title="nsys")
    for name, found in records.items():
        print("", name, *profile_lines(found, top), sep="\n")
    outcomes = {found["outcome"] for found in records.values()}
    return EXIT_FAILURE if "failed" in outcomes else EXIT_OUT_OF_MEMORY if "out of memory" in outcomes else 0


def report_lines(trace: "Trace", range: str | None, scope: "Scope", top: int) -> list[str]:
    """What a trace says of a range, or of the whole record and which ranges it has."""
    from lmcore.profiling.nsys.trace import (
        alike,
        busy_table,
        category_table,
        copy_table,
        kernel_table,
        owners,
        unattributed,
    )

    kernels, busy = kernel_table(trace, range, scope).head(top), busy_table(trace, range, scope)
    kernels = kernels if range is not None else kernels.drop(columns="calls_per_instance")
    busy.loc[busy["gpu_seconds"] == 0, GPU_TIMES] = float("nan")  # no work, which is not the same as an idle GPU
    sizes = [f"{len(getattr(trace, part)):,} {part}" for part in ("kernels", "copies", "ranges")]
    lines = [f"{trace.tool}: {', '.join(sizes)}."]
    lines += [f"Range {range}, launches of the {scope}."] if range is not None else ["All work of the record."]
    lines += filter(None, [*trace.notes, unattributed(trace)])
    if (devices := trace.work["device"].nunique()) > 1:
        lines.append(f"{devices} devices: busy and idle times are of each, times of kernels and copies are summed.")
    lines += kernel_lines(kernels) + text(category_table(trace, range, scope))
    lines += first_rows(busy.drop(columns="instance")) + text(copy_table(trace, range, scope))
    if range is None and trace.ranges.empty:
        lines += ["", "The record has no ranges."]
    elif range is None:
        ranges, path = trace.ranges, alike(trace.ranges["path"])
        ranges = ranges.assign(path=path, seconds=(ranges["end"] - ranges["start"]) / 1e9)
        known = ranges.groupby("path", sort=False).agg(instances=("id", "size"), mean_seconds=("seconds", "mean"))
        launched = (owners(trace.kernels, ranges, "process") >= 0).sum()
        lines += first_rows(known.reset_index())
        lines.append(f"{launched:,} of {len(trace.kernels):,} kernels were launched inside of ranges.")
    return lines


def profile_lines(found: Mapping[str, Any], top: int) -> list[str]:
    """Ranges and kernels of a cell's record, blocks together, times of one pass; or why it has no result."""
    import pandas as pd

    if found["outcome"] == "out of memory":
        return [f"It does not fit into the memory; take a smaller size, context or batch: {found['reason']}"]
    if found["outcome"] != "complete":
        return [f"It failed: {found['reason']}"]
    result = found["result"]
    lines = [result["tool"], *result["notes"]]
    if result["training_outcome"] == "out of memory":
        lines.append(f"A training step does not fit into the memory: {result['training_reason']}")
    for part in filter(None, (result["inference"], result["training"])):
        ranges, categories, kernels = (pd.DataFrame(part[what]) for what in ("ranges", "categories", "kernels"))
        total = categories.groupby("path")["seconds"].sum()
        matmul = categories[categories["category"] == "matmul"].set_index("path")["seconds"]
        ranges["matmul share"] = ranges["path"].map(matmul.reindex(total.index, fill_value=0) / total)
        first = kernels[kernels["path"] == ranges["path"].iloc[0]].head(top)
        first = first.assign(share=first["seconds"] / total[ranges["path"].iloc[0]]).drop(columns="path")
        lines += text(ranges.rename(columns={"path": "range", "instances": "per pass"}))
        lines += kernel_lines(first.rename(columns={"seconds": "total_seconds"}))
    return lines


def kernel_lines(kernels: "pd.DataFrame") -> list[str]:
    """A table of kernels by their short names, and their full names under it."""
    kernels = kernels.reset_index(drop=True)
    full = [
        textwrap.fill(row.name, 118, initial_indent=f"{row.Index + 1:3}. ", subsequent_indent=" " * 5)
        for row in kernels.itertuples()
        if row.name != row.short_name
    ]
    kernels.insert(0, "no.", kernels.index + 1)
    numbers = [name for name in kernels if name not in ("category", "short_name", "name")]
    return text(kernels[[*numbers, "category", "short_name"]]) + (["", "Full names:", *full] if full else [])


def first_rows(table: "pd.DataFrame") -> list[str]:
    """Lines of the table's first rows, and how many more there are."""
    more = len(table) - ROWS_SHOWN
    return text(table.head(ROWS_SHOWN)) + [f"… and {more:,} more"] * (more > 0)


def text(table: "pd.DataFrame") -> list[str]:
    """Lines of a table under an empty one, in milliseconds, percent and megabytes; – is unknown. None without rows."""
    columns = []
    for name, column in table.items():
        header, factor = HEADERS.get(name, (name, 1))
        cells = [
            header,
            *(printable(value, kept="") if isinstance(value, str) else digits(value * factor) for value in column),
        ]
        width = max(map(len, cells))
        left = any(isinstance(value, str) for value in column)
        columns.append([cell.ljust(width) if left else cell.rjust(width) for cell in cells])
    return ["", *("  ".join(line).rstrip() for line in zip(*columns, strict=True))] if len(table) else []


def digits(number: float) -> str:
    """A number with the digits that matter."""
    if number != number:
        return "–"
    return f"{number:,}" if isinstance(number, int) else f"{number:,.1f}" if number >= 1000 else f"{number:.4g}"
