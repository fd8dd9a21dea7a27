"""Allocation history: which piece of memory lived when, and where it came from (CS336 A2 section 1.1.6).

Reads the snapshots of `torch.cuda.memory._snapshot()`, the format that pytorch.org/memory_viz shows. Time is counted in
*states*: state 0 is before the first event of the record, state k after k events, each one allocation or one free.
"""

import ast
import functools
import os
import pickle
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from lmcore.errors import UserError, require

UNKNOWN = "unknown"
"""Category of an allocation of which nobody said what it is for."""

NO_FRAME = "no Python frame"
"""Source of what C++ allocated on a thread without Python, as the backward pass does on a GPU."""

FREED = ("free_completed", "free")
"""Actions after which the memory may be used again (a request alone may still wait for another stream)."""

PACKAGE = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Allocation:
    """One piece of memory: `bytes` as requested, alive in the states first, first + 1, …, last - 1."""

    address: int
    bytes: int
    first: int
    """0: it was there before the record."""
    last: int
    """Number of states: it was still there at the end."""
    source: str = NO_FRAME
    category: str = UNKNOWN
    stage: str | None = None
    """The part of the step that allocated it; None: before the record, or between the parts."""


@dataclass(frozen=True)
class Stage:
    """A part of the step, from the state in which it begins to the state in which it ends."""

    name: str
    first: int
    last: int


@dataclass(frozen=True)
class History:
    """All allocations of a record. `seconds[k]` is when state k began, from the first event."""

    tool: str
    allocations: tuple[Allocation, ...]
    seconds: tuple[float, ...]
    stages: tuple[Stage, ...] = ()
    truncated: bool = False
    """True: the record was full, and its beginning is lost; what then lived counts as there before."""

    @property
    def states(self) -> int:
        """Number of states, one more than events."""
        return len(self.seconds)


@dataclass(frozen=True)
class Event:
    """One allocation (`bytes` > 0) or free (`bytes` <= 0) at an address; `time` in seconds."""

    address: int
    bytes: int
    time: float
    source: str = NO_FRAME
    category: str = UNKNOWN


def replay(events: Sequence[Event], standing: Iterable[Event] = ()) -> tuple[Allocation, ...]:
    """The allocations that `events` tell of, in order of their beginning, those that were there before first.

    There before were the `standing` ones, and each address that is freed without having been allocated. An address
    that is allocated while it is alive, because the free is missing, ends where it begins again.
    """
    alive = {event.address: (0, event) for event in standing}
    done: list[Allocation] = []

    def end(address: int, last: int) -> None:
        first, event = alive.pop(address)
        done.append(Allocation(address, event.bytes, first, last, event.source))

    seen: set[int] = set()
    for state, event in enumerate(events, start=1):
        if event.bytes <= 0 and event.address not in alive and event.address not in seen:
            alive[event.address] = (0, Event(event.address, -event.bytes, 0.0))
        if event.address in alive:
            end(event.address, state)
        if event.bytes > 0:
            alive[event.address] = (state, event)
        seen.add(event.address)
    for address in list(alive):
        end(address, len(events) + 1)
    return tuple(sorted(done, key=lambda a: (a.first, a.address)))


def read_snapshot(path: str | os.PathLike) -> dict[str, Any]:
    """The snapshot in a pickle, of ours or of anybody who records one with `torch.cuda.memory._dump_snapshot`.

    Nothing in the pickle is executed: it may hold plain data only. Raises `UserError` for any other file.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            snapshot = PlainUnpickler(file).load()
    except OSError as error:
        raise UserError(f"Cannot read {path}: {error.strerror or error}.") from None
    except Exception:  # a damaged pickle can raise anything
        snapshot = None
    named = isinstance(snapshot, dict) and isinstance(snapshot.get("device_traces"), list)
    require(
        named and isinstance(snapshot.get("segments"), list),
        f"{path} is no memory snapshot; make one with torch.cuda.memory._dump_snapshot, or with lmcore memory.",
    )
    return snapshot


class PlainUnpickler(pickle.Unpickler):
    """Loads numbers, strings, lists and dictionaries, and refuses everything that would have to be imported."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} is no plain data")


def busiest_device(snapshot: Mapping[str, Any]) -> int:
    """Index of the device with the longest record. Raises `UserError` if nothing was recorded for any."""
    lengths = [len(trace) for trace in snapshot["device_traces"]]
    require(
        any(lengths),
        "The snapshot has no history: call torch.cuda.memory._record_memory_history(max_entries=...) before the work.",
    )
    return lengths.index(max(lengths))


def history_of(snapshot: Mapping[str, Any], device: int | None = None) -> History:
    """The history that a CUDA snapshot holds for one device (default: the one with the longest record).

    Its segments show what lived at the end of the record. What of it the record does not tell of was there before.
    Raises `UserError` for a snapshot without a history, or one that lacks what the format has.
    """
    try:
        device = busiest_device(snapshot) if device is None else device
        trace = [entry for entry in snapshot["device_traces"][device] if entry["action"] in ("alloc", *FREED)]
        events = [cuda_event(entry, index) for index, entry in enumerate(trace)]
        told = {event.address for event in events}
        standing = [block for block in active_blocks(snapshot["segments"], device) if block.address not in told]
        if any(not isinstance(event.bytes, int) or abs(event.bytes) >= 1 << 48 for event in (*events, *standing)):
            raise TypeError("an allocation of an impossible size")
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise UserError(f"The snapshot is damaged, or in a format not known here ({error!r}).") from None
    start = events[0].time if events else 0.0
    seconds = (0.0, *(event.time - start for event in events))
    return History("torch.cuda memory history", replay(events, standing), seconds)


def cuda_event(entry: Mapping[str, Any], index: int) -> Event:
    """A trace entry as an event. Records of old versions have no time; they count microseconds by events."""
    allocated = entry["action"] == "alloc"
    source = source_of(entry.get("frames") or ()) if allocated else NO_FRAME
    return Event(
        entry["addr"], entry["size"] if allocated else -entry["size"], entry.get("time_us", index) / 1e6, source
    )


def active_blocks(segments: Sequence[Mapping[str, Any]], device: int) -> Iterable[Event]:
    """What the allocator's segments hold for tensors at the moment of the snapshot."""
    for segment in segments:
        if segment.get("device", device) != device:
            continue
        address = segment["address"]
        for block in segment["blocks"]:
            address = block.get("address", address)
            if block["state"] != "inactive":
                source = source_of(block.get("frames") or ())
                yield Event(address, block.get("requested_size") or block["size"], 0.0, source)
            address += block["size"]


def counted_states(trace: Sequence[Mapping[str, Any]]) -> tuple[list[int], list[int]]:
    """For each allocation of a CUDA trace, in order, the state right after it; the same for each requested free.

    With them a moment that is known as numbers of allocations and frees, which the allocator counts, becomes a state:
    no clock is needed, and a record that lost its beginning is counted from its end.
    """
    allocations, requests, state = [], [], 0
    for index, entry in enumerate(trace):
        action = entry["action"]
        state += action == "alloc" or action in FREED
        if action == "alloc":
            allocations.append(state)
        elif action == "free_requested":
            completed = index + 1 < len(trace) and trace[index + 1]["action"] in FREED
            requests.append(state + completed)
    return allocations, requests


def state_after(allocations: int, frees: int, trace_states: tuple[list[int], list[int]]) -> int:
    """The first state with only so many allocations and requested frees still to come (see `counted_states`)."""

    def reached(states: list[int], still: int) -> int:
        return states[len(states) - still - 1] if still < len(states) else 0

    return max(reached(trace_states[0], allocations), reached(trace_states[1], frees))


def source_of(frames: Sequence[Mapping[str, Any]]) -> str:
    """Where an allocation comes from, of a stack with the innermost frame first.

    The innermost frame in lmcore as "lmcore/model.py:59 Linear.forward"; without one the innermost Python frame that
    is not PyTorch's own; else the operation of the backward pass, where C++ frames name it; else `NO_FRAME`.
    """
    python = [frame for frame in frames if str(frame["filename"]).endswith(".py")]
    for frame in python:
        if ours := frame_in_lmcore(frame["filename"], frame["line"], frame["name"]):
            return ours
    for frame in python:
        if "/torch/" not in frame["filename"]:
            return f"{'/'.join(Path(frame['filename']).parts[-2:])}:{frame['line']} {frame['name']}"
    for frame in frames:
        if operation := re.search(r"(\w+Backward\d*)::apply", frame["name"]):
            return operation[1]
    return NO_FRAME


def frame_in_lmcore(filename: str, line: int, name: str) -> str | None:
    """A frame of lmcore as "lmcore/model.py:59 Linear.forward", whatever folder it ran from; None for another's."""
    path = re.fullmatch(r"(?:.*/)?(lmcore/(?:\w+/)*\w+\.py)", filename)
    return f"{path[1]}:{line} {qualified_name(PACKAGE.parent / path[1], line, name)}" if path else None


def calling_line(frame: FrameType | None) -> str:
    """The innermost line of lmcore that a running stack goes through."""
    while frame is not None:
        code = frame.f_code
        if ours := frame_in_lmcore(code.co_filename, frame.f_lineno, code.co_name):
            return ours
        frame = frame.f_back
    return "outside lmcore"


def qualified_name(path: Path, line: int, name: str) -> str:
    """The function around a line with its class in front ("Linear.forward"), if it is `name`; else `name` alone."""
    around = [found for first, last, found in functions_in(path) if first <= line <= last]
    innermost = around[-1] if around else name
    return innermost if innermost.rpartition(".")[2] == name else name


@functools.lru_cache
def functions_in(path: Path) -> tuple[tuple[int, int, str], ...]:
    """First line, last line and qualified name of each function in a file, outer ones first; none without the file."""
    found = []

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            named = isinstance(child, ast.FunctionDef | ast.ClassDef)
            if isinstance(child, ast.FunctionDef):
                found.append((child.lineno, child.end_lineno or child.lineno, prefix + child.name))
            visit(child, f"{prefix}{child.name}." if named else prefix)

    try:
        visit(ast.parse(path.read_text(encoding="utf-8")), "")
    except (OSError, SyntaxError):
        return ()
    return tuple(found)
