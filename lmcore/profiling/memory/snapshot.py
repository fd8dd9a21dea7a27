"""Allocation history: which piece of memory lived when, and where it came from (CS336 A2, 2025 §1.1.6).

Reads the snapshots of `torch.cuda.memory._snapshot()`, the format that pytorch.org/memory_viz shows. Time is counted in
*states*: state 0 is before the first event of the record, state k after k events, each one allocation or one free.
"""

import functools
import itertools
import linecache
import os
import re
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from lmcore.errors import UserError, require
from lmcore.files import PlainUnpickler, not_a_pipe

UNKNOWN = "unknown"
"""Category of an allocation of which nobody said what it is for."""

NO_FRAME = "no Python frame"
"""Source of what C++ allocated on a thread without Python, as the backward pass does on a GPU."""

PYTHON_FILE = re.compile(r".*\.py|<(ipython-input|python-input|doctest|stdin|string)\b.*")
"""Of a frame in Python: a file, or what notebooks, the interpreter and doctests have in place of one."""

FREED = ("free_completed", "free")
"""Actions after which the memory may be used again (a request alone may still wait for another stream)."""

PACKAGE = Path(__file__).resolve().parents[2]

PROFILERS = ("lmcore/profiling/", "lmcore/cli/")
"""What calls the code that is watched."""


class Event(NamedTuple):
    """One allocation (`bytes` > 0) or free (`bytes` <= 0) at an address."""

    address: int
    bytes: int
    source: str = NO_FRAME
    category: str = UNKNOWN


@dataclass(frozen=True)
class History:
    """All allocations of a record."""

    tool: str
    allocations: pd.DataFrame
    """A row for each piece of memory, in order of its beginning: address, bytes (as requested), source, category, stage
    (that made it; None: before the record or between stages), and the states in which it is alive: first, first + 1, …,
    last - 1. First 0: it was there before the record; last the number of states: it was still there at the end."""
    seconds: Sequence[float]
    """When each state began, from the first event."""
    stages: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """The parts of the step, in order, with the states in which each begins and ends."""
    truncated: bool = False
    """True: the record was full, and its beginning is lost; what then lived counts as there before."""

    def stage_at(self, state: int) -> str | None:
        """The stage whose event led to this state."""
        return next((name for name, (first, last) in self.stages.items() if first < state <= last), None)


def replay(events: Sequence[Event], standing: Iterable[Event] = ()) -> pd.DataFrame:
    """The allocations that `events` tell of, as in `History`.

    There before were the `standing` ones, and each address that is freed without having been allocated. An address
    that is allocated while it is alive, because the free is missing, ends where it begins again.
    """
    standing = list(standing)
    table = pd.DataFrame([*standing, *events], columns=Event._fields).astype({"bytes": "int64"})
    table["first"] = np.maximum(np.arange(len(table)) - len(standing) + 1, 0)
    table["last"] = table.groupby("address")["first"].shift(-1, fill_value=len(events) + 1)
    untold = table[(table["bytes"] < 0) & ~table.duplicated("address")]
    untold = untold.assign(bytes=-untold["bytes"], last=untold["first"], first=0)
    found = pd.concat([untold, table[table["bytes"] > 0]]).assign(stage=None)
    return found.sort_values(["first", "address"], ignore_index=True)


def read_snapshot(path: str | os.PathLike) -> dict[str, Any]:
    """The snapshot in a pickle, of ours or of anybody who records one with `torch.cuda.memory._dump_snapshot`.

    Nothing in the pickle is executed: it may hold plain data only. Raises `UserError` for any other file.
    """
    path = not_a_pipe(path)
    try:
        with open(path, "rb") as file:
            snapshot = PlainUnpickler(file).load()
    except OSError as error:
        raise UserError(f"Cannot read {path}: {error.strerror or error}.") from None
    except Exception:  # a damaged pickle can raise anything
        snapshot = None
    require(
        isinstance(snapshot, dict) and all(isinstance(snapshot.get(k), list) for k in ("device_traces", "segments")),
        f"{path} is not a memory snapshot; make one with torch.cuda.memory._dump_snapshot, or with lmcore memory.",
    )
    return snapshot


def histories_of(snapshot: Mapping[str, Any]) -> dict[int, History]:
    """The history of each device of a CUDA snapshot that allocated or freed while it was recorded, or held memory.

    The segments show what lived at the end of the record. What of it the record does not tell of was there before.
    Raises `UserError` for a snapshot without a history, or one that lacks what the format has.
    """
    try:
        traces = [[entry for entry in one if entry["action"] in ("alloc", *FREED)] for one in snapshot["device_traces"]]
        advice = "call torch.cuda.memory._record_memory_history(max_entries=...) before the work."
        require(any(traces), f"The snapshot has no history: {advice}")
        found = {device: device_history(trace, snapshot["segments"], device) for device, trace in enumerate(traces)}
        return {device: history for device, history in found.items() if len(history.allocations)}
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise UserError(f"The snapshot is damaged, or in a format not known here ({error!r}).") from None


def history_of(snapshot: Mapping[str, Any], device: int = 0) -> History:
    """That of `histories_of` for this device. Raises `UserError` if the snapshot holds nothing of it."""
    found = histories_of(snapshot)
    require(device in found, f"The snapshot holds nothing of device {device}.")
    return found[device]


def device_history(trace: Sequence[Mapping[str, Any]], segments: Sequence[Mapping[str, Any]], device: int) -> History:
    """The history of one device, from its allocations and frees and the segments of all devices."""
    events = [
        Event(entry["addr"], entry["size"], source_of(entry.get("frames") or ()))
        if entry["action"] == "alloc"
        else Event(entry["addr"], -entry["size"])
        for entry in trace
    ]
    told = {event.address for event in events}
    standing = [block for block in active_blocks(segments, device) if block.address not in told]
    if any(not isinstance(event.bytes, int) or abs(event.bytes) >= 1 << 48 for event in (*events, *standing)):
        raise TypeError("an allocation of an impossible size")
    times = [entry.get("time_us", index) / 1e6 for index, entry in enumerate(trace)]  # old records have no times
    seconds = (0.0, *(time - times[0] for time in times))
    return History("torch.cuda memory history", replay(events, standing), seconds)


def active_blocks(segments: Sequence[Mapping[str, Any]], device: int) -> Iterable[Event]:
    """What the allocator's segments hold for tensors at the moment of the snapshot."""
    for block in (block for segment in segments if segment["device"] == device for block in segment["blocks"]):
        if block["state"] != "inactive":
            size = block.get("requested_size") or block["size"]
            yield Event(block["address"], size, source_of(block.get("frames") or ()))


def source_of(frames: Sequence[Mapping[str, Any]]) -> str:
    """Where an allocation comes from, of a stack with the innermost frame first.

    That of `innermost`; without one the operation of the backward pass, where C++ frames name it; else `NO_FRAME`.
    """
    if python := innermost((str(frame["filename"]), frame["line"], frame["name"]) for frame in frames):
        return python
    operations = (re.search(r"(\w+Backward\d*)::apply", frame["name"]) for frame in frames)
    return next((found[1] for found in operations if found), NO_FRAME)


def innermost(frames: Iterable[tuple[str, int, str]]) -> str | None:
    """The innermost of a stack's frames (file, line, function) in lmcore, or in the code that its profilers call.

    Without one the innermost Python frame that is not PyTorch's own; None where there is none.
    """
    called = None
    for place in filter(None, itertools.starmap(place_of, frames)):
        if place.startswith("lmcore/"):
            return called if called and place.startswith(PROFILERS) else place
        called = called or place
    return called


@functools.cache
def place_of(filename: str, line: int, name: str) -> str | None:
    """A frame as "lmcore/model.py:59 Linear.forward", whatever folder lmcore ran from, or as "folder/script.py:7 main";
    None for one of PyTorch or C++."""
    if path := re.fullmatch(r"(?:.*/)?(lmcore/(?:\w+/)*\w+\.py)", filename):
        lines = linecache.getlines(str(PACKAGE.parent / path[1]))  # none without the file
        before = "".join(lines[:line] if line <= len(lines) else ())
        *_, owner = [name, *re.findall(r"^(?:class|def) (\w+)", before, re.MULTILINE)]
        return f"{path[1]}:{line} {name if owner == name else f'{owner}.{name}'}"
    if not PYTHON_FILE.fullmatch(filename) or "/torch/" in filename:
        return None
    return f"{'/'.join(Path(filename).parts[-2:])}:{line} {name}"


def running_line(frame: FrameType) -> str:
    """The `innermost` line that a running stack goes through, as "lmcore/model.py:59 Linear.forward"."""
    stack = ((one.f_code, line) for one, line in traceback.walk_stack(frame))
    return innermost((code.co_filename, line, code.co_name) for code, line in stack) or "elsewhere"
