"""What a profiler recorded, whichever it was: ranges, kernels and copies, and what ran on behalf of which range."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd

from lmcore.errors import UserError, require
from lmcore.profiling.nsys.kinds import KINDS, OPTIMIZER_RANGE, kernel_kind, short_name

Scope = Literal["process", "thread"]
"""Whose launches count as inside a range: those of every thread of its process while it is open, or its thread's own.

PyTorch launches the kernels of a backward pass from a thread of the autograd engine, so that the thread which opened
the range "backward" launches hardly any: "process" is right for one training program, "thread" for several in one.
"""

KERNEL_COLUMNS = (
    "name", "short_name", "kind", "start", "end", "duration", "device", "stream",
    "process", "thread", "launched_at", "graph",
)  # fmt: skip
RANGE_COLUMNS = ("id", "name", "path", "start", "end", "process", "thread", "depth", "parent")
COPY_COLUMNS = ("start", "end", "operation", "kind", "bytes", "process", "thread", "launched_at")

NEVER = -1
"""`launched_at` of what has no launch in the record: it belongs to no range."""

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
    kernels, ranges, copies = (whole_numbers(table) for table in (kernels, ranges, copies))
    kernels = kernels.sort_values(["start", "end"], ignore_index=True)
    if "duration" not in kernels:
        kernels["duration"] = kernels["end"] - kernels["start"]
    names = {name: (kernel_kind(name), short_name(name)) for name in kernels["name"].unique()}
    kernels["kind"] = [names[name][0] for name in kernels["name"]]
    kernels["short_name"] = [names[name][1] for name in kernels["name"]]
    copies = copies.sort_values(["start", "end"], ignore_index=True).assign(kind="copy")
    ranges = nested(ranges)
    optimizer = outermost(ranges, ranges[ranges["name"] == OPTIMIZER_RANGE])
    for work in (kernels, copies):
        work.loc[owners(work, optimizer, "process") >= 0, "kind"] = OPTIMIZER_RANGE
    return Trace(tool, kernels[list(KERNEL_COLUMNS)], ranges, copies[list(COPY_COLUMNS)])


def whole_numbers(table: pd.DataFrame) -> pd.DataFrame:
    """The table with numbers in its columns of numbers, which tables put together from empty ones may not have."""
    numbers = ("start", "end", "duration", "device", "stream", "process", "thread", "launched_at", "bytes")
    return table.astype({name: "int64" for name in numbers if name in table})


def nested(ranges: pd.DataFrame) -> pd.DataFrame:
    """Ranges (name, start, end, process, thread) in order of their start, with id, parent, depth and path."""
    ranges = ranges.sort_values(["start", "end"], ascending=[True, False], ignore_index=True)
    rows = list(ranges[["name", "start", "end", "process", "thread"]].itertuples(index=False))
    paths: list[str] = []
    depths: list[int] = []
    parents: list[int] = []
    still_open: dict[Any, list[int]] = {}
    for index, row in enumerate(rows):
        begun = [i for i in still_open.get(row.process, []) if rows[i].end > row.start]
        around = [i for i in begun if rows[i].end >= row.end]
        own = [i for i in around if rows[i].thread == row.thread]
        parent = max(own or around, default=-1)
        parents.append(parent)
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
        paths.append(f"{paths[parent]}/{row.name}" if parent >= 0 else row.name)
        still_open[row.process] = [*begun, index]
    ranges = ranges.assign(id=range(len(rows)), path=paths, depth=depths, parent=parents)
    return ranges.astype({"depth": "int64", "parent": "int64"})[list(RANGE_COLUMNS)]


def outermost(ranges: pd.DataFrame, chosen: pd.DataFrame) -> pd.DataFrame:
    """Those of the chosen ranges that lie in no other chosen one of their thread: what ran inside is counted once."""
    parents, threads, wanted = ranges["parent"].tolist(), ranges["thread"].tolist(), set(chosen["id"])

    def inside_another(index: int) -> bool:
        thread = threads[index]
        while (index := parents[index]) >= 0:
            if index in wanted and threads[index] == thread:
                return True
        return False

    return chosen[~np.fromiter(map(inside_another, chosen["id"]), dtype=bool, count=len(chosen))]


def owners(work: pd.DataFrame, chosen: pd.DataFrame, scope: Scope) -> np.ndarray:
    """For each kernel or copy, the id of the chosen range it was launched in, or -1.

    Each belongs to one at most. Where ranges of several threads are open at once, the launching thread's own goes
    before the others, and a later one before an earlier one.
    """
    require(scope in ("process", "thread"), f"The scope is process or thread, not {scope!r}.")
    found = np.full(len(work), -1, dtype=np.int64)
    order = np.argsort(work["launched_at"].to_numpy(), kind="stable")
    in_order = work.iloc[order]
    for keys in (["process"], ["process", "thread"]) if scope == "process" else (["process", "thread"],):
        for _, ranges in chosen.sort_values("start").groupby(keys):
            same = (in_order[keys] == ranges[keys].iloc[0]).all(axis=1).to_numpy()
            members, times = order[same], in_order["launched_at"].to_numpy()[same]
            first = np.searchsorted(times, ranges["start"].to_numpy(), side="left")
            last = np.searchsorted(times, ranges["end"].to_numpy(), side="right")
            for index, low, high in zip(ranges["id"], first, last, strict=True):
                found[members[low:high]] = index
    return found


def instances(trace: Trace, name: str) -> pd.DataFrame:
    """Ranges by name ("forward"), by the end of their path ("training step/forward") or with `*` for any characters
    but "/" ("block */attention"), in order of their start.

    A range inside another one that is meant as well is left out: nothing is counted twice. Raises `UserError` with
    the names that exist when there is none.
    """
    pattern = "(^|.*/)" + "[^/]*".join(map(re.escape, name.split("*")))
    paths = {path for path in trace.ranges["path"].unique() if re.fullmatch(pattern, path)}
    if not paths:
        names = numbered_together(trace.ranges["name"].unique())
        more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
        exist = f"there are {', '.join(names[:NAMES_SHOWN])}{more}" if names else "the trace has no ranges"
        raise UserError(f"There is no range {name!r}; {exist}.")
    return outermost(trace.ranges, trace.ranges[trace.ranges["path"].isin(paths)])


def numbered_together(names: Iterable[str]) -> list[str]:
    """The names, those that differ in numbers alone ("block 0", "block 1") as one with `*` in their place."""
    alike: dict[str, list[str]] = {}
    for name in names:
        alike.setdefault(re.sub(r"\d+", "*", name), []).append(name)
    return [pattern if len(same) > 1 else same[0] for pattern, same in alike.items()]


def inside(work: pd.DataFrame, chosen: pd.DataFrame, scope: Scope = "process") -> pd.DataFrame:
    """The kernels or copies launched inside the chosen ranges, with the range's id as `instance`."""
    found = owners(work, chosen, scope)
    return work[found >= 0].assign(instance=found[found >= 0])


def kernels_in(trace: Trace, name: str, scope: Scope = "process") -> pd.DataFrame:
    """Kernels launched inside the ranges of this name, with the range's id as `instance` (see `instances`, `Scope`)."""
    return inside(trace.kernels, instances(trace, name), scope)


def kernel_table(trace: Trace, name: str, scope: Scope = "process") -> pd.DataFrame:
    """Kernels of a range by total time: name, short_name, kind, calls, calls_per_instance, total_seconds,
    mean_seconds, share (of the kernels' time)."""
    return tabulate_kernels(kernels_in(trace, name, scope), len(instances(trace, name)))


def tabulate_kernels(kernels: pd.DataFrame, count: int) -> pd.DataFrame:
    """The rows of `kernel_table` for these kernels of `count` ranges."""
    table = kernels.groupby(["name", "short_name", "kind"], sort=False)["duration"].agg(["size", "sum"]).reset_index()
    table = table.rename(columns={"size": "calls"}).sort_values(["sum", "name"], ascending=[False, True])
    table["calls_per_instance"] = table["calls"] / max(count, 1)
    table["total_seconds"] = table.pop("sum") / 1e9
    table["mean_seconds"] = table["total_seconds"] / table["calls"]
    table["share"] = table["total_seconds"] / table["total_seconds"].sum()
    return table.reset_index(drop=True)


def kind_table(trace: Trace, name: str, scope: Scope = "process") -> pd.DataFrame:
    """Kinds of work of a range, in the order of `KINDS`: kind, calls, total_seconds, share.

    Memory copies count as "copy" beside the kernels that copy, so that the shares are of all the device's work.
    """
    chosen = instances(trace, name)
    work = pd.concat([inside(trace.kernels, chosen, scope), device_copies(inside(trace.copies, chosen, scope))])
    grouped = work.groupby("kind")["duration"].agg(["size", "sum"])
    grouped = grouped.reindex([kind for kind in KINDS if kind in grouped.index])
    seconds = grouped["sum"] / 1e9
    table = {
        "kind": grouped.index,
        "calls": grouped["size"],
        "total_seconds": seconds,
        "share": seconds / seconds.sum(),
    }
    return pd.DataFrame(table).reset_index(drop=True)


def device_copies(copies: pd.DataFrame) -> pd.DataFrame:
    """Copies with their `duration`, to be put beside kernels."""
    return copies.assign(duration=copies["end"] - copies["start"])


def busy_table(trace: Trace, name: str, scope: Scope = "process") -> pd.DataFrame:
    """For each instance of a range: instance, path, seconds, gpu_seconds, busy_seconds, idle_seconds.

    `seconds` is how long the range was open on the CPU, which runs ahead of the GPU; `gpu_seconds` is from the
    beginning of its first kernel or copy to the end of its last; `busy_seconds` the time in which at least one ran,
    counted once where several did; `idle_seconds` the rest.
    """
    chosen = instances(trace, name)
    columns = ["instance", "start", "end"]
    work = pd.concat([inside(part, chosen, scope)[columns] for part in (trace.kernels, trace.copies)])
    spans = {index: occupied(rows["start"], rows["end"]) for index, rows in work.groupby("instance")}
    rows: list[Mapping[str, Any]] = []
    for row in chosen.itertuples():
        whole, busy = spans.get(row.id, (0, 0))
        times = {"seconds": row.end - row.start, "gpu_seconds": whole, "busy_seconds": busy}
        times |= {"idle_seconds": whole - busy}
        rows.append({"instance": row.id, "path": row.path} | {key: value / 1e9 for key, value in times.items()})
    return pd.DataFrame(rows)


def occupied(start: pd.Series, end: pd.Series) -> tuple[int, int]:
    """Length from the first start to the last end, and length of the union, of intervals in nanoseconds."""
    order = np.argsort(start.to_numpy(), kind="stable")
    start, end = start.to_numpy()[order], end.to_numpy()[order]
    reached = np.maximum.accumulate(end)
    gaps = np.maximum(start[1:] - reached[:-1], 0).sum()
    whole = reached[-1] - start[0]
    return int(whole), int(whole - gaps)


def copy_table(trace: Trace, name: str, scope: Scope = "process") -> pd.DataFrame:
    """Memory copies and fills of a range by total time: operation, calls, bytes, total_seconds."""
    copies = device_copies(inside(trace.copies, instances(trace, name), scope))
    table = copies.groupby("operation").agg(
        calls=("bytes", "size"), bytes=("bytes", "sum"), total_seconds=("duration", "sum")
    )
    table["total_seconds"] = table["total_seconds"] / 1e9
    return table.sort_values("total_seconds", ascending=False).reset_index()
