"""What an allocation history says: what memory was for, its peaks, its course over time, the largest allocations."""

import dataclasses
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from lmcore.profiling.memory.snapshot import NO_FRAME, UNKNOWN, Allocation, Event, History

CATEGORIES = ("parameters", "optimizer state", "other", "gradients", "activations", "temporary")
"""What memory is for, from what always stands to what comes and goes (see `lmcore.profiling.memory.profile`)."""

TIMELINE_POINTS = 2_000
RECTANGLES = 600
LARGEST = 25


def explained(
    history: History, standing: Mapping[int, Event], gradients: Mapping[int, str], copies: Mapping[int, str]
) -> History:
    """The history with category, stage and source of every allocation (see `profile_memory`).

    By address, `standing` holds the storages known to be there before, `gradients` names those that hold gradients
    when the backward pass ends, and `copies` the half-precision copies of parameters when it begins.
    """
    backward = next((stage for stage in history.stages if stage.name == "backward"), None)

    def explain(a: Allocation) -> Allocation:
        if a.first == 0:
            known = standing.get(a.address)
            unnamed = "there before, without a name" if a.source == NO_FRAME else a.source  # such as workspaces
            found = (known.category, known.source) if known else ("other", unnamed)
            return dataclasses.replace(a, category=found[0], source=found[1])
        stage = stage_at(history, a.first)
        source = f"{stage or 'between stages'}, {NO_FRAME}" if a.source == NO_FRAME else a.source
        category = "temporary"
        if backward and a.first <= backward.last < a.last and a.address in gradients:
            category, source = "gradients", f"gradient of {gradients[a.address]}"
        elif backward and stage in ("forward", "loss") and a.last > backward.first:
            category = "activations"
            source = f"{copies[a.address]}, {source}" if a.address in copies else source
        elif stage == "backward" and a.source.startswith("lmcore/") and "workload.py" not in a.source:
            source = f"{source}, computed again"
        return dataclasses.replace(a, category=category, stage=stage, source=source)

    return dataclasses.replace(history, allocations=tuple(explain(a) for a in history.allocations))


def stage_at(history: History, state: int) -> str | None:
    """The stage whose event led to this state."""
    return next((stage.name for stage in history.stages if stage.first < state <= stage.last), None)


def any_layer(source: str) -> str:
    """A parameter's name for every layer alike: layers.3.ffn.w1.weight as layers.*.ffn.w1.weight."""
    return re.sub(r"\blayers\.\d+\.", "layers.*.", source)


def bytes_by_state(history: History, categories: Sequence[str]) -> np.ndarray:
    """Bytes alive, as integers of shape (categories, states)."""
    changes = np.zeros((len(categories), history.states + 1), dtype=np.int64)
    row = {name: index for index, name in enumerate(categories)}
    for a in history.allocations:
        changes[row[a.category], a.first] += a.bytes
        changes[row[a.category], a.last] -= a.bytes
    return changes.cumsum(axis=1)[:, :-1]


def summary(history: History) -> dict[str, Any]:
    """The part of `lmcore.profiling.memory.profile.profile_memory`'s result that follows from the allocations alone."""
    found = {a.category for a in history.allocations}
    names = [c for c in (*CATEGORIES, UNKNOWN) if c in found] if UNKNOWN in found else list(CATEGORIES)
    by_category = bytes_by_state(history, names)
    total = by_category.sum(axis=0)
    peak = int(total.argmax())

    def split(state: int) -> dict[str, int]:
        return dict(zip(names, by_category[:, state].tolist(), strict=True))

    made = [a for a in history.allocations if a.first > 0]
    standing = [dataclasses.replace(a, source=any_layer(a.source)) for a in history.allocations if a.first == 0]
    return {
        "tool": history.tool,
        "truncated": history.truncated,
        "events": history.states - 1,
        "seconds": history.seconds[-1],
        "before_bytes": int(total[0]),
        "after_bytes": int(total[-1]),
        "peak_bytes": int(total[peak]),
        "peak_seconds": history.seconds[peak],
        "peak_event": peak,
        "peak_stage": stage_at(history, peak),
        "categories": names,
        "before_by_category": split(0),
        "peak_by_category": split(peak),
        "after_by_category": split(-1),
        "stages": stage_rows(history, total, split),
        "timeline": timeline(history, names, by_category),
        "largest": largest(made, history),
        "standing": largest(standing, history),
        **rectangles(history),
    }


def stage_rows(history: History, total: np.ndarray, split: Any) -> list[dict[str, Any]]:
    """When each stage began and ended, and its bytes."""
    rows = []
    for stage in history.stages:
        peak = stage.first + int(total[stage.first : stage.last + 1].argmax())
        rows.append(
            {
                "name": stage.name,
                "start": history.seconds[stage.first],
                "end": history.seconds[stage.last],
                "first_event": stage.first,
                "last_event": stage.last,
                "start_bytes": int(total[stage.first]),
                "end_bytes": int(total[stage.last]),
                "peak_bytes": int(total[peak]),
                "peak_by_category": split(peak),
            }
        )
    return rows


def timeline(history: History, categories: Sequence[str], by_category: np.ndarray) -> dict[str, Any]:
    """At most `TIMELINE_POINTS` states with the bytes of every category.

    The record is cut into equal runs of events, and of each the lowest and the highest total are kept: no peak is
    lost, and the picture has the outline of the whole. The first and last state and all stages' are kept as well.
    """
    total = by_category.sum(axis=0)
    kept = {0, int(total.argmax()), len(total) - 1}
    for stage in history.stages:
        kept |= {stage.first, stage.last, stage.first + int(total[stage.first : stage.last + 1].argmax())}
    if len(total) <= TIMELINE_POINTS:
        kept = set(range(len(total)))
    else:
        runs = (TIMELINE_POINTS - len(kept)) // 2
        edges = np.linspace(0, len(total), runs + 1, dtype=int)
        for begin, end in pairwise(edges):
            kept |= {begin + int(total[begin:end].argmin()), begin + int(total[begin:end].argmax())}
    states = sorted(kept)
    return {
        "seconds": [history.seconds[state] for state in states],
        "event": [int(state) for state in states],
        "bytes": {name: by_category[i, states].tolist() for i, name in enumerate(categories)},
    }


def largest(allocations: Iterable[Allocation], history: History, count: int = LARGEST) -> list[dict[str, Any]]:
    """The largest allocations, those of one size, category, stage and source as one row."""
    groups = defaultdict(list)
    for a in allocations:
        groups[a.bytes, a.category, a.stage, a.source].append(a)
    ranked = sorted(groups.items(), key=lambda item: (-item[0][0], -len(item[1]), str(item[0])))
    return [
        {
            "bytes": key[0],
            "count": len(group),
            "total_bytes": key[0] * len(group),
            "category": key[1],
            "stage": key[2],
            "source": key[3],
            "seconds": float(np.median([lifetime(a, history) for a in group])),
            "kept": sum(a.last == history.states for a in group),
        }
        for key, group in ranked[:count]
    ]


def lifetime(allocation: Allocation, history: History) -> float:
    """Seconds for which it lived within the record."""
    return history.seconds[min(allocation.last, history.states - 1)] - history.seconds[allocation.first]


def rectangles(history: History) -> dict[str, Any]:
    """The largest allocations one by one, for drawing; what was there all the time is one rectangle per category."""
    always = [a for a in history.allocations if a.first == 0 and a.last == history.states]
    others = [a for a in history.allocations if a.first > 0 or a.last < history.states]
    shown = sorted(others, key=lambda a: -a.bytes)[:RECTANGLES]
    bytes_always, count_always = Counter(), Counter(a.category for a in always)
    for a in always:
        bytes_always[a.category] += a.bytes
    merged = [
        Allocation(0, bytes_always[name], 0, history.states, f"{name} ({count} allocation{'s' * (count != 1)})", name)
        for name, count in count_always.items()
    ]
    return {
        "allocations": [
            {
                "bytes": a.bytes,
                "start": history.seconds[a.first],
                "end": history.seconds[min(a.last, history.states - 1)],
                "first_event": a.first,
                "last_event": min(a.last, history.states - 1),
                "category": a.category,
                "stage": a.stage,
                "source": a.source,
            }
            for a in sorted(merged + shown, key=lambda a: (a.first, -a.bytes))
        ],
        "allocations_total": len(history.allocations),
        "allocations_smallest_bytes": min((a.bytes for a in shown), default=0),
    }
