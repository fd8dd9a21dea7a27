"""`lmcore nsys`: kernels, categories and idle time by range, of a model or of an existing report (CS336 A2 1.1.4)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import tyro

from lmcore.cli.output import printable
from lmcore.errors import EXIT_FAILURE, EXIT_OUT_OF_MEMORY, require
from lmcore.profiling.cases import GridConfig, grid_cases

DEFAULTS = GridConfig(mode=("train_step",), steps=3)

HEADERS = {
    "seconds": ("open (ms)", 1e3), "gpu_seconds": ("gpu (ms)", 1e3), "busy_seconds": ("busy (ms)", 1e3),
    "idle_seconds": ("idle (ms)", 1e3), "total_seconds": ("total (ms)", 1e3), "mean_seconds": ("mean (ms)", 1e3),
    "share": ("share (%)", 100.0), "matmul share": ("matmul (%)", 100.0), "bytes": ("MB", 1e-6),
    "short_name": ("kernel", 1),
}  # fmt: skip
"""What columns of tables are called here, and the factor to their unit."""

ROWS_SHOWN = 100
"""Rows of a table of ranges that are printed."""


def nsys(
    settings: Annotated[GridConfig, tyro.conf.arg(name="")] = DEFAULTS,
    out: Path = Path("runs/nsys"),
    report: Path | None = None,
    range: str | None = None,
    top: int = 10,
) -> int:
    """Profile inference and training with Nsight Systems, or read one of its reports: kernels and idle time by range.

    Without Nsight Systems torch.profiler is used, and the tables say so. The records are reused by the same command.
    Exit codes: 0 profiled, 2 there is no such file or range, 4 out of memory, 1 a case failed; 129, 130 or 143 stopped
    by SIGHUP, SIGINT or SIGTERM.

    Args:
        settings: What is profiled: inference, and as many steps as far as the mode says.
        out: Folder for the results, with the report and its SQLite export of each.
        report: Read this .nsys-rep, .sqlite or torch.profiler .json, of whatever program, instead of profiling.
        range: Range of the report to tabulate: a name, the end of a path, with * for anything; default: all, and a
            list of the ranges.
        top: How many kernels to print.
    """
    require(report is not None or range is None, "--range needs a --report.")
    if report is not None:
        from lmcore.profiling.nsys.tool import load_trace

        print("\n".join(report_lines(load_trace(report), range, top)))
        return 0
    from lmcore.profiling.nsys.profile import profile_workload
    from lmcore.profiling.runner import run_cases

    records = run_cases(profile_workload, grid_cases(settings), out / "cases", "nsys")
    for name, record in records.items():
        print("", name, *profile_lines(record, top), sep="\n")
    outcomes = {record["outcome"] for record in records.values()}
    return EXIT_FAILURE if "failed" in outcomes else EXIT_OUT_OF_MEMORY if "out of memory" in outcomes else 0


def report_lines(trace: Any, range: str | None, top: int) -> list[str]:
    """What a `Trace` says of a range, or of the whole record and which ranges it has."""
    from lmcore.profiling.nsys.trace import alike, busy_table, owners, totals, work_in

    (_, work), busy = work_in(trace, range), busy_table(trace, range)
    kernels = totals(work[work["bytes"] < 0], ["name", "short_name", "category"]).head(top)
    kernels = kernels.assign(mean_seconds=kernels["total_seconds"] / kernels["calls"])
    copies = totals(work[work["bytes"] >= 0], ["name"])
    no_work = busy["gpu_seconds"] == 0  # which is not the same as an idle GPU
    busy.loc[no_work, ["gpu_seconds", "busy_seconds", "idle_seconds"]] = float("nan")
    sizes = [f"{len(getattr(trace, part)):,} {part}" for part in ("kernels", "copies", "ranges")]
    lines = [f"{trace.tool}: {', '.join(sizes)}."]
    lines += [f"Range {range}, launches of its process." if range is not None else "All work of the record."]
    lines += trace.notes
    if (devices := trace.work["device"].nunique()) > 1:
        lines.append(f"{devices} devices: busy and idle times are of each, times of kernels and copies are summed.")
    lines += text(kernels.drop(columns=["name", "bytes"])) + text(totals(work, ["category"]).drop(columns="bytes"))
    lines += text(busy.drop(columns="instance")) + text(copies)
    if range is None:
        ranges, path = trace.ranges, alike(trace.ranges["path"])
        ranges = ranges.assign(path=path, seconds=(ranges["end"] - ranges["start"]) / 1e9)
        known = ranges.groupby("path", sort=False).agg(instances=("id", "size"), mean_seconds=("seconds", "mean"))
        launched = (owners(trace.kernels, ranges) >= 0).sum()
        lines += text(known.reset_index())
        lines.append(f"{launched:,} of {len(trace.kernels):,} kernels were launched inside of ranges.")
    return lines


def profile_lines(record: Mapping[str, Any], top: int) -> list[str]:
    """`pass_lines` of a case's record, or why it has no result."""
    if record["outcome"] != "complete":
        return [f"{record['outcome']}: {record['reason']}"]
    result = record["result"]
    lines = [result["tool"], *result["notes"]]
    for part in filter(None, (result["inference"], result["training"])):
        lines += pass_lines(part, top)
    return lines


def pass_lines(part: Mapping[str, Any], top: int) -> list[str]:
    """Ranges, and kernels of the outermost one, of a `summary`: blocks together, times of one pass."""
    import pandas as pd

    ranges, categories, kernels = (pd.DataFrame(part[what]) for what in ("ranges", "categories", "kernels"))
    total = categories.groupby("path")["seconds"].sum()
    matmul = categories[categories["category"] == "matmul"].set_index("path")["seconds"]
    ranges["matmul share"] = ranges["path"].map(matmul.reindex(total.index, fill_value=0) / total)
    first = kernels[kernels["path"] == ranges["path"].iloc[0]].head(top)
    first = first.assign(share=first["seconds"] / total[ranges["path"].iloc[0]]).drop(columns=["path", "name"])
    lines = text(ranges.rename(columns={"path": "range", "instances": "per pass"}))
    return lines + text(first.rename(columns={"seconds": "total_seconds"}))


def text(table: Any) -> list[str]:
    """Lines of a DataFrame's first rows under an empty one, in milliseconds, percent and megabytes; – is unknown."""
    from tabulate import tabulate

    shown, align = {}, []
    for name, column in table.head(ROWS_SHOWN).items():
        header, factor = HEADERS.get(name, (name, 1))
        align.append("left" if any(isinstance(value, str) for value in column) else "right")
        shown[header] = [
            printable(value, kept="") if isinstance(value, str) else digits(value * factor) for value in column
        ]
    more = len(table) - ROWS_SHOWN
    lines = tabulate(shown, "keys", "plain", disable_numparse=True, colalign=align).splitlines()
    return ["", *lines, *[f"… and {more:,} more"] * (more > 0)] if len(table) else []


def digits(number: float) -> str:
    """A number with the digits that matter."""
    if number != number:
        return "–"
    return f"{number:,}" if isinstance(number, int) else f"{number:,.1f}" if number >= 1000 else f"{number:.4g}"
