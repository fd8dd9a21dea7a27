"""`lmcore nsys`: kernels, kinds and idle time by range, of a model or of a report that is there (CS336 A2 1.1.4)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from lmcore.config import ModelConfig, require_choices
from lmcore.errors import EXIT_FAILURE, EXIT_OUT_OF_MEMORY, require
from lmcore.profiling.options import BenchmarkConfig, benchmark_cases
from lmcore.stopping import stoppable

if TYPE_CHECKING:  # pandas and PyTorch are imported when the command runs
    import pandas as pd

    from lmcore.profiling.nsys.trace import Trace


@dataclass(frozen=True)
class NsysConfig:
    """What is profiled: every combination of the options that take several values."""

    size: tuple[str, ...] = ()
    """Named sizes; none: the model whose numbers the --model options give."""
    context_length: tuple[int, ...] = ()
    """None: that of --model.context-length."""
    precision: tuple[Literal["fp32", "tf32", "bf16", "fp16"], ...] = ("fp32",)
    passes: Literal["forward", "forward_backward", "train_step"] = "train_step"
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
        require_choices(self)


DEFAULTS = NsysConfig()


def nsys(
    settings: Annotated[NsysConfig, tyro.conf.arg(name="")] = DEFAULTS,
    out: Path = Path("runs/nsys"),
    report: Path | None = None,
    range: str | None = None,
    scope: Literal["process", "thread"] = "process",
    trim: Path | None = None,
    top: int = 10,
) -> int:
    """Profile inference and training with Nsight Systems, or read one of its reports: kernels and idle time by range.

    Without Nsight Systems torch.profiler is used, and the tables say so. The records are reused by the same command.
    Exit codes: 0 profiled, 2 there is no such file or range, 4 out of memory, 130 or 143 stopped by SIGINT or SIGTERM,
    1 otherwise.

    Args:
        settings: What is profiled.
        out: Folder for the results, with the report and its SQLite export of each.
        report: Read this .nsys-rep, .sqlite or torch.profiler .json, of whatever program, instead of profiling.
        range: Range of the report to tabulate: a name, the end of a path, with * for anything; default: list them.
        scope: Launches that count as in a range: all of its process, as backward passes need, or its own thread's.
        trim: Write a small copy of the .sqlite report here, without environment, users and paths; no tables.
        top: How many kernels to print.
    """
    require(top > 0, f"--top must be positive, not {top}.")
    require(report is not None or (range is None and trim is None), "--range and --trim need a --report.")
    if report is None:
        return record(settings, out, top)
    if trim is not None:
        from lmcore.profiling.nsys.trim import trim_export

        written = trim_export(report, trim, () if range is None else (range,))
        print(f"{written}: {written.stat().st_size:,} bytes.")
        return 0
    print(tables(load(report), range, scope, top))
    return 0


def load(report: Path) -> "Trace":
    """The trace of a report by its ending."""
    from lmcore.profiling.nsys.tool import load_trace
    from lmcore.profiling.nsys.torch_trace import read_torch_trace

    return read_torch_trace(report) if report.name.endswith((".json", ".json.gz")) else load_trace(report)


def tables(trace: "Trace", range: str | None, scope: str, top: int) -> str:
    """What a trace says of a range, or which ranges it has."""
    from lmcore.profiling.nsys.trace import busy_table, copy_table, kernel_table, kind_table

    if range is None:
        known = trace.ranges.groupby("path", sort=False).agg(instances=("id", "size"), depth=("depth", "first"))
        listed = known.reset_index().drop(columns="depth")
        found = f"{trace.tool}: {len(trace.kernels):,} kernels, {len(trace.ranges):,} ranges."
        return "\n".join([found, *text(listed)])
    kernels = kernel_table(trace, range, scope).head(top).drop(columns="name")
    parts = [kernels, kind_table(trace, range, scope), busy_table(trace, range, scope).drop(columns="instance")]
    lines = [f"{trace.tool}, range {range}, launches of the {scope}."]
    for part in (*parts, copy_table(trace, range, scope)):
        lines += text(part)
    return "\n".join(lines)


def record(settings: NsysConfig, out: Path, top: int) -> int:
    """Profiles all cells and prints each; returns the exit code."""
    from lmcore.profiling.nsys.profile import profile_workload
    from lmcore.profiling.runner import run_cases

    s = settings
    cases = benchmark_cases(
        BenchmarkConfig(
            size=s.size, context_length=s.context_length, precision=s.precision, passes=(s.passes,),
            batch_size=s.batch_size, warmup_steps=s.warmup_steps, steps=s.steps, compile=s.compile,
            device=s.device, model=s.model,
        )
    )  # fmt: skip
    with stoppable():
        records = run_cases(profile_workload, cases, out / "cells", title="nsys")
    for name, found in records.items():
        words = described(found["result"], top) if found["outcome"] == "complete" else unfinished(found)
        print(f"\n{name}\n{words}")
    outcomes = {found["outcome"] for found in records.values()}
    if "failed" in outcomes:
        return EXIT_FAILURE
    return EXIT_OUT_OF_MEMORY if "out of memory" in outcomes else 0


def unfinished(found: Mapping[str, Any]) -> str:
    """Why a cell has no result, in one sentence."""
    if found["outcome"] == "out of memory":
        return f"It does not fit into the memory; take a smaller size, context or batch: {found['reason']}"
    return f"It failed: {found['reason']}"


def described(result: Mapping[str, Any], top: int) -> str:
    """Ranges and kernels of a profile, for the terminal; times of one pass in milliseconds, blocks together."""
    import pandas as pd

    lines = [result["tool"], *result["notes"]]
    if result["training_outcome"] == "out of memory":
        lines.append(f"A training step does not fit into the memory: {result['training_reason']}")
    for part in ("inference", "training"):
        if result[part] is None:
            continue
        ranges = result[part]["ranges"]
        lines += text(pd.DataFrame([range_row(path, found, result[part]["passes"]) for path, found in ranges.items()]))
        first = next(iter(ranges))
        lines += text(pd.DataFrame(ranges[first]["kernels"][:top]).drop(columns="name", errors="ignore"))
    return "\n".join(lines)


def range_row(path: str, found: Mapping[str, Any], passes: int) -> dict[str, Any]:
    """One line of the table of ranges."""
    share = {row["kind"]: row["share"] for row in found["kinds"]}
    times = {f"{key} (ms)": found[f"{key}_seconds"] * 1e3 for key in ("gpu", "busy", "idle")}
    times = {"open (ms)": found["seconds"] * 1e3} | times
    return {"range": path, "per pass": found["instances"] / passes} | times | {"matmul": share.get("matmul", 0.0)}


def text(table: "pd.DataFrame") -> list[str]:
    """A table under an empty line, seconds with the digits that matter; none without rows."""
    if table.empty:
        return []
    formats = {column: (lambda number: f"{number:.4g}") for column in table.select_dtypes("float").columns}
    return ["", table.to_string(index=False, formatters=formats, max_colwidth=90)]
