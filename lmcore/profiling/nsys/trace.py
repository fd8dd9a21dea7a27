"""What a profiler recorded, whichever it was: ranges, kernels and copies, and what ran on behalf of which range."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from lmcore.errors import UserError
from lmcore.profiling.nsys.categories import CATEGORIES, OPTIMIZER_RANGE, kernel_category, short_name

NEVER = -1
"""`launched_at` of work whose launch the record lacks: it belongs to no range."""

NO_COPY = -1
"""`bytes` of a kernel. A copy has no `stream` that is told: -1 as well."""

NUMBERS = ["start", "end", "duration", "device", "stream", "process", "thread", "launched_at", "bytes"]
RANGE_COLUMNS = ["id", "name", "path", "start", "end", "process", "thread", "depth", "parent"]

NAMES_SHOWN = 20
"""Names of ranges that a sentence lists."""


@dataclass(frozen=True)
class Trace:
    """A record of one program. Times are in nanoseconds from a beginning that is the profiler's.

    `work`: name, short_name, category and `NUMBERS` of each kernel (or CPU operator) and each copy; `duration` is end -
    start, or an operator's own time without that of the operators it calls, so that durations may be summed;
    `launched_at` is when the CPU asked for it; `device` is the GPU that did it. What was launched in the range
    "optimizer" is of that category.
    `ranges`: nested; `path` holds the names from the outermost in, joined by "/"; `parent` is an `id`, or -1.
    A range that nothing on its own thread encloses lies in the one that is open on another thread of its process:
    with gradient checkpointing the autograd thread enters blocks while the main thread is in "backward".
    `notes`: sentences on what of the record was left out or completed.
    """

    tool: str
    work: pd.DataFrame
    ranges: pd.DataFrame
    notes: tuple[str, ...] = ()

    @property
    def kernels(self) -> pd.DataFrame:
        """Work without cudaMemcpy and cudaMemset, which are no kernels."""
        return self.work[self.work["bytes"] < 0]

    @property
    def copies(self) -> pd.DataFrame:
        """cudaMemcpy, by direction, and cudaMemset."""
        return self.work[self.work["bytes"] >= 0]


def build_trace(tool: str, work: pd.DataFrame, ranges: pd.DataFrame, notes: Iterable[str] = ()) -> Trace:
    """A trace from what a profiler knows: `name` and `NUMBERS` of all work, ranges without their nesting.

    Without a column `device` all work is of one. What ends before it begins is left out, and a note says so, as one
    does of work that belongs to no range because the record lacks its launch.
    """
    impossible = {"kernels and copies": work["end"] < work["start"], "ranges": ranges["end"] < ranges["start"]}
    parts = [f"{wrong.sum():,} of {len(wrong):,} {name}" for name, wrong in impossible.items() if wrong.any()]
    if parts:
        notes = [*notes, f"{' and '.join(parts)} end before they begin and are left out: the record is damaged."]
    work, ranges = (table[~wrong] for table, wrong in zip((work, ranges), impossible.values(), strict=True))
    work = work.assign(device=work.get("device", 0))[["name", *NUMBERS]].astype(dict.fromkeys(NUMBERS, "int64"))
    work = work.sort_values(["start", "end"], ignore_index=True)
    work["name"] = work["name"].astype("category")  # a few hundred names, each thousands of times
    work["short_name"] = work["name"].map(short_name).astype("category")
    work["category"] = work["name"].map(kernel_category).astype(pd.CategoricalDtype(CATEGORIES))
    work.loc[work["bytes"] >= 0, "category"] = "copy"
    ranges = nested(ranges)
    work.loc[owners(work, ranges[ranges["name"] == OPTIMIZER_RANGE]) >= 0, "category"] = OPTIMIZER_RANGE
    if lost := (work["launched_at"] == NEVER).sum():
        many = f"{lost:,} of {len(work):,} kernels and copies have no launch in the record"
        notes = [*notes, f"{many}: they count in no range, whose GPU times lack them."]
    return Trace(tool, work, ranges, tuple(notes))


def nested(ranges: pd.DataFrame) -> pd.DataFrame:
    """Ranges (name, start, end, process, thread) in order of their start, with id, parent, depth and path."""
    ranges = ranges.astype(dict.fromkeys(("start", "end", "process", "thread"), "int64"))
    ranges = ranges.sort_values(["start", "end"], ascending=[True, False], ignore_index=True)
    paths, depths, parents, still_open = [], [], [], {}
    for row in ranges.itertuples():
        begun = [one for one in still_open.get(row.process, ()) if one.end > row.start]
        around = [one for one in begun if one.end >= row.end]
        own = [one for one in around if one.thread == row.thread]
        parent = (own or around)[-1].Index if around else -1
        parents.append(parent)
        depths.append(depths[parent] + 1 if around else 0)
        paths.append(f"{paths[parent]}/{row.name}" if around else row.name)
        still_open[row.process] = [*begun, row]
    ranges = ranges.assign(id=range(len(ranges)), path=paths, depth=depths, parent=parents)[RANGE_COLUMNS]
    return ranges.astype({"path": str, "depth": "int64", "parent": "int64"})


def outermost(chosen: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """The chosen ranges, in order of their start, without those inside another one of the same process or thread."""
    reached = chosen.groupby(keys)["end"].cummax()
    before = reached.groupby([chosen[key] for key in keys]).shift(fill_value=NEVER)
    return chosen[chosen["end"] > before]


def owners(work: pd.DataFrame, chosen: pd.DataFrame) -> np.ndarray:
    """For each kernel or copy, the id of the chosen range it was launched in, or -1.

    Launches of all threads of a range's process count while it is open: PyTorch launches the kernels of a backward pass
    from a thread of the autograd engine. Each belongs to one range at most: to one of its own thread before one of
    another thread, to one that encloses others before those, to a later one before an earlier one.
    """
    found, launched = np.full(len(work), -1), work["launched_at"].to_numpy()
    for keys in (["process"], ["process", "thread"]):
        for values, ranges in outermost(chosen, keys).groupby(keys):
            members = np.flatnonzero((work[keys].to_numpy() == values).all(axis=1))
            last = np.searchsorted(ranges["start"], launched[members], side="right") - 1  # and its end is the last, too
            inside = (last >= 0) & (launched[members] <= ranges["end"].to_numpy()[last])
            found[members[inside]] = ranges["id"].to_numpy()[last[inside]]
    return found


def alike(names: pd.Series) -> pd.Series:
    """Names that differ only in numbers as one name: "block 0" and "block 1" as `block *`."""
    unique = pd.Series(names.unique(), dtype=str)
    starred = unique.str.replace(r"\d+", "*", regex=True)
    return names.map(dict(zip(unique, starred.where(starred.duplicated(keep=False), unique), strict=True)))


def listed(names: pd.Series) -> str:
    """The first of these names, `alike` ones as one, and how many more there are."""
    shown = list(alike(names).unique())
    more = f" and {len(shown) - NAMES_SHOWN} more" if len(shown) > NAMES_SHOWN else ""
    return ", ".join(shown[:NAMES_SHOWN]) + more


def instances(trace: Trace, name: str) -> pd.DataFrame:
    """Ranges by name ("forward"), by the end of their path ("training step/forward") or with `*` for any characters
    but "/" (`block */attention`), in order of their start.

    A range inside another one of its thread that is meant as well is left out: nothing is counted twice. Raises
    `UserError` with the names that exist when there is none.
    """
    pattern = "(?:.*/)?" + "[^/]*".join(map(re.escape, name.split("*")))
    chosen = trace.ranges[trace.ranges["path"].str.fullmatch(pattern)]
    if chosen.empty:
        exist = "the trace has no ranges" if trace.ranges.empty else f"there are {listed(trace.ranges['name'])}"
        raise UserError(f"There is no range {name!r}; {exist}.")
    return outermost(chosen, ["process", "thread"])


def work_in(trace: Trace, name: str | None) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The ranges of this name (see `instances`), and the work launched in them, with the range's id as `instance`; of
    None the record as one range."""
    if name is not None:
        chosen = instances(trace, name)
        found = owners(trace.work, chosen)
        return chosen, trace.work[found >= 0].assign(instance=found[found >= 0])
    times = pd.concat([table[["start", "end"]] for table in (trace.work, trace.ranges)])
    whole = {"id": 0, "path": "whole record", "start": times["start"].min(), "end": times["end"].max()}
    return pd.DataFrame([whole]), trace.work.assign(instance=0)


def kernels_in(trace: Trace, name: str) -> pd.DataFrame:
    """The kernels of `work_in`."""
    _, work = work_in(trace, name)
    return work[work["bytes"] < 0]


def totals(work: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """Work by `keys`, most time first: calls, bytes (0 for kernels), total_seconds, share of all the work's time."""
    grouped = work.assign(bytes=work["bytes"].clip(lower=0)).groupby(keys, sort=False, observed=True)
    table = grouped.agg(calls=("duration", "size"), bytes=("bytes", "sum"), total_seconds=("duration", "sum"))
    table = table.reset_index().astype(dict.fromkeys(keys, str))
    table = table.sort_values(["total_seconds", keys[0]], ascending=[False, True], ignore_index=True)
    return table.assign(
        total_seconds=table["total_seconds"] / 1e9, share=table["total_seconds"] / table["total_seconds"].sum()
    )


def busy_table(trace: Trace, name: str | None) -> pd.DataFrame:
    """Of each instance of a range (None: the record): instance, path, seconds, gpu_seconds, busy_seconds, idle_seconds.

    `seconds` is how long the range was open on the CPU, which runs ahead of the GPU; `gpu_seconds` is from the
    beginning of its first kernel or copy to the end of its last; `busy_seconds` the time in which at least one ran,
    counted once where several did; `idle_seconds` the rest. Where the record has several devices, an instance has a
    row for each that worked for it, with a column `device` (NaN: none did).
    """
    chosen, work = work_in(trace, name)
    keys = ["instance", "device"] if trace.work["device"].nunique() > 1 else ["instance"]
    table = chosen.rename(columns={"id": "instance"}).merge(
        occupied(work, keys).reset_index(), how="left", on="instance"
    )
    table["seconds"] = (table["end"] - table["start"]) / 1e9
    table[["gpu_seconds", "busy_seconds"]] = table[["whole", "busy"]].fillna(0) / 1e9
    table["idle_seconds"] = (table["whole"] - table["busy"]).fillna(0) / 1e9
    return table[["instance", "path", *keys[1:], "seconds", "gpu_seconds", "busy_seconds", "idle_seconds"]]


def occupied(work: pd.DataFrame, keys: Sequence[str] = ("instance",)) -> pd.DataFrame:
    """Of the intervals (start, end) of each value of `keys`, in nanoseconds: whole, the length from the first start to
    the last end, and busy, the length of their union."""
    work = work[[*keys, "start", "end"]].sort_values([*keys, "start"])
    own = [work[key] for key in keys]
    reached = work["end"].groupby(own).cummax()
    before = reached.groupby(own).shift(fill_value=np.iinfo(np.int64).max)  # no gap before the first
    gaps = (work["start"] - before).clip(lower=0).groupby(own).sum()
    whole = reached.groupby(own).max() - work["start"].groupby(own).min()
    return pd.DataFrame({"whole": whole, "busy": whole - gaps})
