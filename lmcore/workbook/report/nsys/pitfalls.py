"""What a hasty reading of a trace would get wrong, computed from the trace at hand."""

import os
from pathlib import Path

import pandas as pd

from lmcore.profiling.nsys.tool import load_trace
from lmcore.profiling.nsys.trace import Trace, busy_table, instances, kernels_in
from lmcore.workbook.report.answers import format_seconds, format_significant
from lmcore.workbook.report.nsys.profiles import on_gpu
from lmcore.workbook.report.nsys.wording import kernel_word, markdown, percent


def trace_in(folder: str | os.PathLike) -> Trace:
    """The trace that `profile_workload` left in a cell's folder. Raises `UserError` if there is none."""
    export = Path(folder) / "profile.sqlite"
    return load_trace(export if export.exists() else export.with_name("profile.json.gz"))


def pitfalls(trace: Trace, top: str = "training step") -> pd.DataFrame:
    """Right and hasty readings of a trace that has ranges `top`: rows of question, right, hasty, unit.

    Raises `UserError` if there is no such range.
    """
    rows = [{"question": f"work inside {top}", "unit": "seconds"} | _nesting(trace, top)]
    rows.append({"question": f"time of the device's work in {top}", "unit": "seconds"} | _overlap(trace, top))
    backward = f"{top}/backward"
    if (trace.ranges["path"] == backward).any():
        right = kernels_in(trace, backward, "process")
        by_thread = kernels_in(trace, backward, "thread")
        rows.append({"question": "launched in backward", "unit": "calls", "right": len(right), "hasty": len(by_thread)})
        chosen = instances(trace, backward)
        running = sum(
            ((trace.kernels["start"] >= row.start) & (trace.kernels["start"] < row.end)).sum()
            for row in chosen.itertuples()
        )
        rows.append({"question": "belonging to backward", "unit": "calls", "right": len(right), "hasty": int(running)})
    return pd.DataFrame(rows)[["question", "right", "hasty", "unit"]]


def _nesting(trace: Trace, top: str) -> dict[str, float]:
    """The passes' time on the CPU, and the sum over all ranges in them."""
    own = trace.ranges[[path == top or path.startswith(f"{top}/") for path in trace.ranges["path"]]]
    whole = own[own["path"] == top]
    return {
        "right": float((whole["end"] - whole["start"]).sum() / 1e9),
        "hasty": float((own["end"] - own["start"]).sum() / 1e9),
    }


def _overlap(trace: Trace, top: str) -> dict[str, float]:
    """Time in which anything ran, and the time from each pass's first kernel to its last."""
    busy = busy_table(trace, top)
    return {"right": float(busy["busy_seconds"].sum()), "hasty": float(busy["gpu_seconds"].sum())}


def pitfalls_text(table: pd.DataFrame, tool: str, steps: int) -> str:
    """The table of `pitfalls` in words, with a rule for each; its numbers are sums over `steps` recorded steps."""
    word = kernel_word(on_gpu(tool), plural=True)
    rules = {
        "work inside": "ranges nest: a sum over all of them counts the same time once for every level",
        "time of the device": "from the first to the last is not busy: gaps count as well",
        "launched in": "only what the thread that opened the range has launched",
        "belonging to": "whatever runs while the range is open, which on a GPU was launched before",
    }
    rows = []
    for row in table.to_dict("records"):
        rule = next(text for start, text in rules.items() if row["question"].startswith(start))
        rows.append(
            {
                "question": row["question"] if row["unit"] == "seconds" else f"{word} {row['question']}",
                "right": _value(row["right"], row["unit"]),
                "hasty": _value(row["hasty"], row["unit"]),
                "hasty / right": format_significant(row["hasty"] / row["right"]) if row["right"] else "–",
                "how the hasty one counts": rule,
            }
        )
    whole = "the one recorded step" if steps == 1 else f"the {steps} recorded steps together"
    return f"In {whole}:\n\n{markdown(rows)}\n\n{_scope_sentence(table, word)}"


def _value(value: float, unit: str) -> str:
    return format_seconds(value) if unit == "seconds" else f"{value:,.0f}"


def _scope_sentence(table: pd.DataFrame, word: str) -> str:
    chosen = table[table["question"] == "launched in backward"]
    if not len(chosen):
        return "There is no backward pass in this profile."
    right, hasty = chosen.iloc[0]["right"], chosen.iloc[0]["hasty"]
    if hasty < right:
        return (
            f"A rule that takes only what a range's own thread launches finds {hasty:,.0f} of {right:,.0f} {word} of "
            f"the backward pass ({percent(hasty / right)}): all tables here count by process."
        )
    return (
        f"In this profile the backward pass's {word} come from the very thread that opened the range, so that counting "
        "by thread and by process agree; on a GPU the autograd engine has a thread of its own, and they do not."
    )
