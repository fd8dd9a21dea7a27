"""What a profiler recorded, whichever it was: ranges, kernels and copies, and what ran on behalf of which range."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd

from lmcore.errors import UserError, require
from lmcore.profiling.nsys.kinds import KINDS, OPTIMIZER_RANGE, kernel_kind, short_name

Scope = Literal["process", "thread"]
"""Whose launches count as inside a range: those of every thread of its process while it is open, or its thread's own.

PyTorch launches the kernels of a backward pass from a thread of the autograd engine, so that the thread which opened
the range "backward" launches hardly any: "process" is right for one training program, "thread" for several in one.
"""

NUMBERS = ("start", "end", "duration", "device", "stream", "process", "thread", "launched_at", "bytes")
KERNEL_COLUMNS = ["name", "short_name", "kind", *NUMBERS[:-1], "graph"]
RANGE_COLUMNS = ["id", "name", "path", "start", "end", "process", "thread", "depth", "parent"]
COPY_COLUMNS = ["operation", "kind", "start", "end", "duration", "bytes", "process", "thread", "launched_at"]

NEVER = -1
"""`launched_at` of work whose launch the record lacks: it belongs to no range."""

NAMES_SHOWN = 20
"""Names of ranges that an error lists."""


@dataclass(frozen=True)
class Trace:
    """A record of one program. Times are in nanoseconds from a beginning that is the profiler's.

    `kernels`: one row each, or one per CPU operator; `duration` is end - start, or an operator's own time without that
    of the operators it calls, so that durations may be summed. `launched_at` is when the CPU asked for it.
    `ranges`: nested; `path` holds the names from the outermost in, joined by "/"; `parent` is an `id`, or -1.
    A range that nothing on its own thread encloses lies in the one that is open on another thread of its process:
    with gradient checkpointing the autograd thread enters blocks while the main thread is in "backward".
    `copies`: cudaMemcpy and cudaMemset, which are no kernels. Both kinds of work are "optimizer" inside its range.
    """

    tool: str
    kernels: pd.DataFrame
    ranges: pd.DataFrame
    copies: pd.DataFrame


def build_trace(tool: str, kernels: pd.DataFrame, ranges: pd.DataFrame, copies: pd.DataFrame) -> Trace:
    """A trace from what a profiler knows: kernels without kinds and short names, ranges without their nesting."""
    kernels, ranges, copies = (with_times(table) for table in (kernels, ranges, copies))
    kernels["name"] = kernels["name"].astype("category")  # a few hundred names, each thousands of times
    codes, names = kernels["name"].cat.codes, kernels["name"].cat.categories
    kernels["short_name"] = labels(codes, [short_name(name) for name in names])
    kernels["kind"] = pd.Categorical(labels(codes, [kernel_kind(name) for name in names]), list(KINDS))
    copies["kind"] = pd.Categorical(["copy"] * len(copies), list(KINDS))
    ranges = nested(ranges)
    optimizer = outermost(ranges, ranges[ranges["name"] == OPTIMIZER_RANGE])
    for work in (kernels, copies):
        work.loc[owners(work, optimizer, "process") >= 0, "kind"] = OPTIMIZER_RANGE
    return Trace(tool, kernels[KERNEL_COLUMNS], ranges, copies[COPY_COLUMNS])


def with_times(table: pd.DataFrame) -> pd.DataFrame:
    """The table by start, in whole numbers also without rows, with a `duration` where it has none of its own."""
    table = table.astype({name: "int64" for name in NUMBERS if name in table})
    table = table.sort_values(["start", "end"], ignore_index=True)
    return table if "duration" in table else table.assign(duration=table["end"] - table["start"])


def labels(codes: Sequence[int], names: Sequence[str]) -> pd.Categorical:
    """names[code] for each code; names may be equal."""
    number, distinct = pd.factorize(np.array(names, dtype=object))
    return pd.Categorical.from_codes(number[np.asarray(codes)], distinct)


def nested(ranges: pd.DataFrame) -> pd.DataFrame:
    """Ranges (name, start, end, process, thread) in order of their start, with id, parent, depth and path."""
    ranges = ranges.sort_values(["start", "end"], ascending=[True, False], ignore_index=True)
    rows = list(ranges[["name", "start", "end", "process", "thread"]].itertuples(index=False))
    paths: list[str] = []
    depths: list[int] = []
    parents: list[int] = []
    still_open: dict[int, list[int]] = {}
    for index, row in enumerate(rows):
        begun = [i for i in still_open.get(row.process, ()) if rows[i].end > row.start]
        around = [i for i in begun if rows[i].end >= row.end]
        parent = max([i for i in around if rows[i].thread == row.thread] or around, default=-1)
        parents.append(parent)
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
        paths.append(f"{paths[parent]}/{row.name}" if parent >= 0 else row.name)
        still_open[row.process] = [*begun, index]
    ranges = ranges.assign(id=range(len(rows)), path=paths, depth=depths, parent=parents)
    return ranges.astype({"depth": "int64", "parent": "int64"})[RANGE_COLUMNS]


def outermost(ranges: pd.DataFrame, chosen: pd.DataFrame) -> pd.DataFrame:
    """Those of the chosen ranges that lie in no other chosen one of their thread: what ran inside is counted once."""
    parents, threads, wanted = ranges["parent"].tolist(), ranges["thread"].tolist(), set(chosen["id"])

    def inside_another(index: int) -> bool:
        thread = threads[index]
        while (index := parents[index]) >= 0:
            if index in wanted and threads[index] == thread:
                return True
        return False

    return chosen[np.array([not inside_another(index) for index in chosen["id"]], dtype=bool)]


def owners(work: pd.DataFrame, chosen: pd.DataFrame, scope: Scope) -> np.ndarray:
    """For each kernel or copy, the id of the chosen range it was launched in, or -1.

    Each belongs to one at most. Where ranges of several threads are open at once, the launching thread's own goes
    before the others, and a later one before an earlier one.
    """
    require(scope in ("process", "thread"), f"The scope is process or thread, not {scope!r}.")
    order = np.argsort(work["launched_at"].to_numpy(), kind="stable")
    in_order = {key: work[key].to_numpy()[order] for key in ("launched_at", "process", "thread")}
    found = np.full(len(work), -1)
    for keys in (["process"], ["process", "thread"]) if scope == "process" else (["process", "thread"],):
        for values, ranges in chosen.sort_values("start").groupby(keys):
            same = np.logical_and.reduce([in_order[key] == value for key, value in zip(keys, values, strict=True)])
            members, times = order[same], in_order["launched_at"][same]
            first = np.searchsorted(times, ranges["start"].to_numpy(), side="left")
            last = np.searchsorted(times, ranges["end"].to_numpy(), side="right")
            for index, low, high in zip(ranges["id"], first, last, strict=True):
                found[members[low:high]] = index
    return found


def unattributed(trace: Trace) -> str | None:
    """How many kernels and copies belong to no range because the record lacks their launch, in a sentence, if any."""
    counts = {"kernels": trace.kernels, "copies": trace.copies}
    lacking = {name: int((work["launched_at"] == NEVER).sum()) for name, work in counts.items()}
    parts = [f"{lacking[name]:,} of {len(work):,} {name}" for name, work in counts.items() if lacking[name]]
    if not parts:
        return None
    return f"{' and '.join(parts)} have no launch in the record: they count in no range, whose GPU times lack them."


def instances(trace: Trace, name: str) -> pd.DataFrame:
    """Ranges by name ("forward"), by the end of their path ("training step/forward") or with `*` for any characters
    but "/" ("block */attention"), in order of their start.

    A range inside another one that is meant as well is left out: nothing is counted twice. Raises `UserError` with
    the names that exist when there is none.
    """
    pattern = "(^|.*/)" + "[^/]*".join(map(re.escape, name.split("*")))
    paths = {path for path in trace.ranges["path"].unique() if re.fullmatch(pattern, path)}
    if not paths:
        alike: dict[str, list[str]] = {}  # "block 0" and "block 1" are shown as "block *"
        for known in trace.ranges["name"].unique():
            alike.setdefault(re.sub(r"\d+", "*", known), []).append(known)
        names = [shown if len(same) > 1 else same[0] for shown, same in alike.items()]
        more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
        exist = f"there are {', '.join(names[:NAMES_SHOWN])}{more}" if names else "the trace has no ranges"
        raise UserError(f"There is no range {name!r}; {exist}.")
    return outermost(trace.ranges, trace.ranges[trace.ranges["path"].isin(paths)])


def inside(work: pd.DataFrame, chosen: pd.DataFrame, scope: Scope = "process") -> pd.DataFrame:
    """The kernels or copies launched inside the chosen ranges, with the range's id as `instance`."""
    found = owners(work, chosen, scope)
    return work[found >= 0].assign(instance=found[found >= 0])


def kernels_in(trace: Trace, name: str, scope: Scope = "process") -> pd.DataFrame:
    """Kernels launched inside the ranges of this name, with the range's id as `instance` (see `instances`, `Scope`)."""
    return inside(trace.kernels, instances(trace, name), scope)


def work_in(trace: Trace, name: str | None, scope: Scope) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """The ranges of this name, and the kernels and copies launched in them; of None the record as one range."""
    if name is not None:
        chosen = instances(trace, name)
        return chosen, inside(trace.kernels, chosen, scope), inside(trace.copies, chosen, scope)
    times = pd.concat([table[["start", "end"]] for table in (trace.kernels, trace.copies, trace.ranges)])
    whole = {"id": 0, "path": "whole record", "start": times["start"].min(), "end": times["end"].max()}
    return pd.DataFrame([whole]), trace.kernels.assign(instance=0), trace.copies.assign(instance=0)


def kernel_table(trace: Trace, name: str | None, scope: Scope = "process") -> pd.DataFrame:
    """Kernels of a range, or of None the whole record, by total time: name, short_name, kind, calls,
    calls_per_instance, total_seconds, mean_seconds, share (of the kernels' time)."""
    chosen, kernels, _ = work_in(trace, name, scope)
    keys = ["name", "short_name", "kind"]
    table = kernels.groupby(keys, sort=False, observed=True)["duration"].agg(["size", "sum"]).reset_index()
    table = table.astype(dict.fromkeys(keys, str)).rename(columns={"size": "calls"})
    table = table.sort_values(["sum", "name"], ascending=[False, True], ignore_index=True)
    table["calls_per_instance"] = table["calls"] / len(chosen)
    table["total_seconds"] = table.pop("sum") / 1e9
    table["mean_seconds"] = table["total_seconds"] / table["calls"]
    table["share"] = table["total_seconds"] / table["total_seconds"].sum()
    return table


def kind_table(trace: Trace, name: str | None, scope: Scope = "process") -> pd.DataFrame:
    """Kinds of work of a range (None: the record), in the order of `KINDS`: kind, calls, total_seconds, share.

    Memory copies count as "copy" beside the kernels that copy, so that the shares are of all the device's work.
    """
    _, *work = work_in(trace, name, scope)
    grouped = pd.concat(part[["kind", "duration"]] for part in work).groupby("kind", observed=True)["duration"]
    table = grouped.agg(calls="size", total_seconds="sum").reset_index().astype({"kind": str})
    table["total_seconds"] = table["total_seconds"] / 1e9
    return table.assign(share=table["total_seconds"] / table["total_seconds"].sum())


def busy_table(trace: Trace, name: str | None, scope: Scope = "process") -> pd.DataFrame:
    """Of each instance of a range (None: the record): instance, path, seconds, gpu_seconds, busy_seconds, idle_seconds.

    `seconds` is how long the range was open on the CPU, which runs ahead of the GPU; `gpu_seconds` is from the
    beginning of its first kernel or copy to the end of its last; `busy_seconds` the time in which at least one ran,
    counted once where several did; `idle_seconds` the rest.
    """
    chosen, *work = work_in(trace, name, scope)
    spans = occupied(pd.concat(part[["instance", "start", "end"]] for part in work)).reindex(chosen["id"], fill_value=0)
    table = chosen[["id", "path"]].rename(columns={"id": "instance"}).reset_index(drop=True)
    table["seconds"] = (chosen["end"] - chosen["start"]).to_numpy() / 1e9
    table["gpu_seconds"], table["busy_seconds"] = spans["whole"].to_numpy() / 1e9, spans["busy"].to_numpy() / 1e9
    return table.assign(idle_seconds=(spans["whole"] - spans["busy"]).to_numpy() / 1e9)


def occupied(work: pd.DataFrame) -> pd.DataFrame:
    """Of the intervals of each instance (instance, start, end), in nanoseconds: whole, the length from the first start
    to the last end, and busy, the length of their union."""
    work = work.sort_values(["instance", "start"])
    instance = work["instance"]
    reached = work["end"].groupby(instance).cummax()
    before = reached.groupby(instance).shift(fill_value=np.iinfo(np.int64).max)  # no gap before the first
    gaps = (work["start"] - before).clip(lower=0).groupby(instance).sum()
    whole = reached.groupby(instance).max() - work["start"].groupby(instance).min()
    return pd.DataFrame({"whole": whole, "busy": whole - gaps})


def copy_table(trace: Trace, name: str | None, scope: Scope = "process") -> pd.DataFrame:
    """Memory copies and fills of a range (None: the record) by total time: operation, calls, bytes, total_seconds."""
    *_, copies = work_in(trace, name, scope)
    grouped = copies.groupby("operation", observed=True)
    table = grouped.agg(calls=("bytes", "size"), bytes=("bytes", "sum"), total_seconds=("duration", "sum"))
    table["total_seconds"] = table["total_seconds"] / 1e9
    return table.sort_values("total_seconds", ascending=False).reset_index()
