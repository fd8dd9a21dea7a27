"""Sentences of notebook 05 on the forward pass: its time, its kernels (nsys_profile (a) to (c))."""

from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd

from lmcore.errors import UserError
from lmcore.profiling.nsys.tool import find_nsys
from lmcore.workbook.report.answers import format_seconds, format_significant, join_words
from lmcore.workbook.report.nsys.profiles import PASS_RANGES
from lmcore.workbook.report.nsys.wording import (
    MISSING,
    between,
    cell_label,
    given,
    labels,
    markdown,
    percent,
    place,
)

AGREE = 0.05
"""Times that differ by less than this share are said to agree."""

IDLE = 0.1
"""Share of the time without any kernel from which on a GPU is said to wait for the CPU."""


AHEAD = 0.9
"""Share of the GPU's time up to which the CPU, having launched all, is said to be ahead."""


def profiled(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of `profile_table` whose forward pass was profiled."""
    return table[table["inference_seconds"].notna()] if len(table) else table


def missing_sentence(table: pd.DataFrame) -> str:
    """Which cells did not fit into the memory, or failed, and of which only inference did; empty where all did."""
    rows = table.to_dict("records")
    short = [cell_label(row) for row in rows if row["outcome"] == "out of memory"]
    failed = [f"{cell_label(row)} ({row['reason']})" for row in rows if row["outcome"] == "failed"]
    half = [
        cell_label(row) for row in rows if row["outcome"] == "complete" and row["training_outcome"] == "out of memory"
    ]
    sentences = []
    if short:
        sentences.append(f"**Out of memory** even in the forward pass: {join_words(short)}.")
    if half:
        sentences.append(f"Inference fits but the training step runs **out of memory**: {join_words(half)}.")
    if failed:
        sentences.append(f"Failed: {join_words(failed)}.")
    if rows and not sentences:
        sentences.append(
            "All cells fit into the memory."
            if all(row["training_outcome"] == "complete" for row in rows)
            else "No cell ran out of memory."
        )
    return " ".join(sentences)


def nothing_profiled(table: pd.DataFrame) -> str:
    """What every answer says where no cell could be profiled."""
    return f"No cell could be profiled, so there is nothing to answer from. {missing_sentence(table)}".strip()


def nsys_text(foreign: bool = False) -> str:
    """Which Nsight Systems is found here, or what to install; with `foreign`, that it was another machine's."""
    if foreign:
        return "The profiles below were made on another machine and brought here."
    try:
        found = find_nsys()
    except UserError as error:
        return f"{error} Until then, the same tables are made by torch.profiler."
    return f"Nsight Systems {found.version} is here: {found.path}."


def tools_text(table: pd.DataFrame, notes: Iterable[str]) -> str:
    """Which tool made the profiles, on which device, and what it noted."""
    done = profiled(table)
    if not len(done):
        return nothing_profiled(table)
    tools, devices = (join_words(sorted(set(done[name].dropna()))) for name in ("tool", "device"))
    text = f"{len(done)} of {len(table)} cells were profiled on {devices}, by {tools}."
    if done["tool"].str.startswith("Nsight").any():
        text += (
            " (A version is that which an export names as its writer; the last digit may differ from the program's.)"
        )
    return " ".join([text, *dict.fromkeys(notes)])


def phases_text(table: pd.DataFrame) -> str:
    """Time of each phase of a training step as a table: on the GPU from first kernel to last, on a CPU of the range."""
    rows = []
    for row in table[table["training_seconds"].notna()].to_dict("records"):
        clock = "gpu_seconds" if row["gpu"] else "seconds"
        times = {name: row[f"{name}_{clock}"] for name in (*PASS_RANGES, "training")}
        shown = {name: format_seconds(value) if given(value) else MISSING for name, value in times.items()}
        shown["whole step"] = shown.pop("training")
        both = given(times["backward"]) and times["forward"]
        rows.append(
            place(row)
            | shown
            | {"backward / forward": _ratio(times["backward"], times["forward"]) if both else MISSING}
        )
    if not rows:
        return f"No training step was profiled. {missing_sentence(table)}"
    return f"{markdown(rows)}\n\n{_phases_sentence(table)}".rstrip()


def _phases_sentence(table: pd.DataFrame) -> str:
    """Why a backward pass, with twice the products, is here and there no longer than the forward pass."""
    rows = [
        row | {"ratio": row["backward_gpu_seconds"] / row["forward_gpu_seconds"]}
        for row in table[table["training_seconds"].notna()].to_dict("records")
        if row["gpu"] and given(row["backward_gpu_seconds"]) and row["forward_gpu_seconds"]
    ]
    waiting = [
        row for row in rows if row["ratio"] < 1 and row["forward_idle_seconds"] > IDLE * row["forward_gpu_seconds"]
    ]
    if not waiting:
        return ""
    idle = between((row["forward_idle_seconds"] / row["forward_gpu_seconds"] for row in waiting), percent)
    busy = between(row["backward_busy_seconds"] / row["forward_busy_seconds"] for row in waiting)
    return (
        f"With twice the matrix products, the backward pass takes less time than the forward pass in {len(waiting)} of "
        f"{len(rows)} cells ({labels(waiting)}): there the GPU is idle for {idle} of the forward pass, whose time is "
        f"that of launching. Of the time in which the GPU is busy, the backward pass takes {busy} times as much."
    )


def launching_text(row: Mapping[str, Any]) -> str:
    """Who is ahead in a cell's inference, the CPU that launches or the GPU that computes; to read a timeline by."""
    if not row["gpu"]:
        return "Here operators on the CPU were timed: each stands below the range that it was called in."
    launch, whole = row["launch_seconds"], row["inference_gpu_seconds"]
    if not given(launch) or not given(whole) or not whole:
        return ""
    times = f"launching takes {format_seconds(launch)}, the GPU {format_seconds(whole)} from first kernel to last"
    if launch < AHEAD * whole or (idle_share(row) or 0) <= IDLE:
        return (
            f"In {cell_label(row)} the **CPU runs ahead**: {times}. What stands below a range was often launched by an "
            "earlier one."
        )
    idle = f" and is idle for {percent(idle_share(row))} of that" if given(idle_share(row)) else ""
    return (
        f"In {cell_label(row)} the **CPU does not run ahead**: {times}{idle}. The GPU waits for the next launch, and "
        "what stands below a range was mostly launched by it."
    )


def forward_time_answer(table: pd.DataFrame) -> str:
    """(a): time of a forward pass in the profile, against the benchmark's; `table` is that of `with_timings`."""
    done = profiled(table)
    if not len(done):
        return nothing_profiled(table)
    rows = [_forward_row(row) for row in table.to_dict("records")]
    first, *why = _against_benchmark(done)
    text = " ".join(filter(None, [*why, _idle_sentence(done), _launch_sentence(done), missing_sentence(table)]))
    return f"{first}\n\n{markdown(rows)}\n\n{text}"


def _forward_row(row: Mapping[str, Any]) -> dict[str, str]:
    def seconds(name: str) -> str:
        return format_seconds(row[name]) if given(row[name]) else MISSING

    gpu = row["gpu"]
    return place(row) | {
        "forward pass, with waiting": seconds("inference_seconds") if row["outcome"] == "complete" else row["outcome"],
        "first kernel to last": seconds("inference_gpu_seconds") if gpu else MISSING,
        "GPU idle": percent(idle_share(row)) if gpu else MISSING,
        "launched by the CPU in": seconds("launch_seconds") if gpu else MISSING,
        "benchmark": seconds("benchmark_seconds"),
        "profile / benchmark": _ratio(row["inference_seconds"], row["benchmark_seconds"]),
    }


def _ratio(first: Any, second: Any) -> str:
    return format_significant(first / second, 3) if given(first) and given(second) and second else MISSING


def idle_share(row: Mapping[str, Any], label: str = "inference") -> float | None:
    """Share of the time from the first kernel to the last in which none ran."""
    whole = row[f"{label}_gpu_seconds"]
    return row[f"{label}_idle_seconds"] / whole if given(whole) and whole else None


def _against_benchmark(done: pd.DataFrame) -> list[str]:
    both = done[done["benchmark_seconds"].notna()]
    if not len(both):
        return [
            f"The forward pass takes {between(done['inference_seconds'], format_seconds)} in the profile; there is no "
            "benchmark of the same cells to hold it against."
        ]
    ratios = (both["inference_seconds"] / both["benchmark_seconds"]).astype(float)
    apart = (ratios - 1).abs() > AGREE
    text = (
        f"A forward pass takes {between(done['inference_seconds'], format_seconds)} in the profile. Against the "
        f"benchmark's median by the host's clock that is {_times(ratios)}, in {len(both)} "
        f"{'cell' if len(both) == 1 else 'cells'} measured both ways"
    )
    if not apart.any():
        return [f"{text}: they **match** within {AGREE:.0%}."]
    if apart.all():
        sentences = [f"{text}: they do **not match** within {AGREE:.0%} anywhere."]
    else:
        sentences = [f"{text}: they **match** within {AGREE:.0%} in {len(both) - apart.sum()} of them."]
    return sentences + _why_apart(both[apart], ratios[apart])


def _times(ratios: pd.Series) -> str:
    span = between(ratios)
    return f"{span} times (median {format_significant(ratios.median())})" if len(ratios) > 2 else f"{span} times"


def _why_apart(rows: pd.DataFrame, ratios: pd.Series) -> list[str]:
    records = [row | {"ratio": ratio} for row, ratio in zip(rows.to_dict("records"), ratios, strict=True)]
    slower = [row for row in records if row["ratio"] > 1]
    faster = [row for row in records if row["ratio"] < 1]
    waiting = [row for row in slower if row["gpu"] and (idle_share(row) or 0) > IDLE]
    operators = [row for row in slower if not row["gpu"]]
    other = [row for row in slower if row["gpu"] and (idle_share(row) or 0) <= IDLE]
    sentences = []
    if waiting:
        sentences.append(
            f"Slower in the profile {_are(waiting)} {labels(waiting)}, where the GPU is idle for "
            f"{between((idle_share(row) for row in waiting), percent)} of the pass: the CPU cannot launch kernels fast "
            "enough, and the profiler, which notes down every launch, makes it slower still. Where the CPU sets the "
            "pace, times also vary from one process to the next."
        )
    if operators:
        sentences.append(
            f"Slower in the profile {_are(operators)} {labels(operators)}: on a CPU the profiler's note of every "
            "operator is made by the same cores that compute, and it costs the more the shorter the operators are."
        )
    if other:
        sentences.append(
            f"Slower in the profile {_are(other)} also {labels(other)}, though the GPU is busy nearly throughout: "
            "there the profiler's load on the CPU does not explain it; clocks that differ between the two runs may."
        )
    if faster:
        sentences.append(
            f"Faster in the profile than in the benchmark {_are(faster)} {labels(faster)}: no effect of a profiler, "
            "but of the scatter between two runs."
        )
    return sentences


def _are(rows: list) -> str:
    return "is" if len(rows) == 1 else "are"


def _idle_sentence(done: pd.DataFrame) -> str:
    timed = [row for row in done.to_dict("records") if row["gpu"] and given(idle_share(row))]
    if not timed:
        return (
            ""
            if done["gpu"].any()
            else "Only operators on the CPU were timed: there is no GPU whose time could be told."
        )
    waiting = [row for row in timed if idle_share(row) > IDLE]
    if not waiting:
        idle = between((idle_share(row) for row in timed), percent)
        return f"The GPU is busy all but {idle} of the pass: it sets the pace."
    busy = [row for row in timed if row not in waiting]
    text = (
        f"The CPU sets the pace, and the GPU is idle for more than {IDLE:.0%} of the pass, in {len(waiting)} of "
        f"{len(timed)} cells ({labels(waiting)})"
    )
    return f"{text}; elsewhere the GPU does." if busy else f"{text}."


def _launch_sentence(done: pd.DataFrame) -> str:
    """Launching ahead: how the range on the CPU and the time on the GPU differ."""
    rows = [row for row in done.to_dict("records") if row["gpu"] and given(row["launch_seconds"])]
    ahead = [row for row in rows if row["launch_seconds"] < AHEAD * row["inference_gpu_seconds"]]
    if not ahead:
        return ""
    most = min(ahead, key=lambda row: row["launch_seconds"] / row["inference_gpu_seconds"])
    return (
        f"Launches are asynchronous: {cell_label(most)} has left its range `forward` on the CPU after "
        f"{format_seconds(most['launch_seconds'])} while the GPU works for "
        f"{format_seconds(most['inference_gpu_seconds'])}, which is why a clock must wait for the GPU "
        "before it is read."
    )
