"""The same `Trace` from torch.profiler, for machines without Nsight Systems: CUDA kernels, or CPU operators."""

import gzip
import json
import os
import re
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pandas as pd
from torch.profiler import ProfilerActivity, profile

from lmcore.errors import UserError
from lmcore.profiling.nsys.trace import NEVER, Trace, build_trace

CUDA_TOOL, CPU_TOOL = "torch.profiler (CUDA)", "torch.profiler (CPU operators)"

LAUNCHES = ("cuda_runtime", "cuda_driver")
"""Categories of events that ask for GPU work, which has the same correlation id."""

PYTORCHS_OWN = re.compile(r"^(Optimizer\.\w+#|ProfilerStep#)")
"""Ranges that PyTorch makes itself; Nsight Systems would not see them."""

Event = dict[str, Any]


def record_trace(run: Callable[[profile], Any], path: str | os.PathLike, cuda: bool) -> tuple[Trace, Any]:
    """Calls `run` with a torch.profiler, which it enters around what is to be recorded.

    The record is kept at `path` (.json.gz, for Perfetto or chrome://tracing). Returns the trace and what `run` returns.
    """
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * cuda
    profiler = profile(activities=activities)
    result = run(profiler)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(path))
    return read_torch_trace(path), result


def read_torch_trace(path: str | os.PathLike) -> Trace:
    """The trace in a record of torch.profiler, with kernels where it has any, else with CPU operators.

    Raises `UserError` for a file that is missing or no such record.
    """
    path = Path(path)
    try:
        return trace_of(_events(path))
    except FileNotFoundError:
        raise UserError(f"There is no file {path}.") from None
    # also what gzip (EOFError, zlib.error), json (RecursionError) and events that lack something raise
    except (OSError, ValueError, LookupError, TypeError, AttributeError, EOFError, RecursionError, zlib.error) as error:
        raise UserError(f"{path} cannot be read as a record of torch.profiler ({error!r}).") from error


def _events(path: Path) -> list[Event]:
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else open(path, encoding="utf-8") as file:
        return json.load(file)["traceEvents"]


def trace_of(events: list[Event]) -> Trace:
    """The trace that the events of a record make."""
    lasting = [event for event in events if event.get("ph") == "X"]
    kernels = [event for event in lasting if event.get("cat") == "kernel"]
    launches = first_launches(event for event in lasting if event.get("cat") in LAUNCHES)
    ranges = [event for event in lasting if event.get("cat") == "user_annotation"]
    ranges = [event for event in ranges if not PYTORCHS_OWN.match(event["name"])]
    copies = [event for event in lasting if event.get("cat") in ("gpu_memcpy", "gpu_memset")]
    operators = [] if kernels else [event for event in lasting if event.get("cat") == "cpu_op"]
    return build_trace(
        CUDA_TOOL if kernels else CPU_TOOL,
        table([kernel_row(event, launches) for event in kernels] + operator_rows(operators), KERNEL_FIELDS),
        table([range_row(event) for event in ranges], "name start end process thread"),
        table([copy_row(event, launches) for event in copies], "start end operation bytes process thread launched_at"),
    )


KERNEL_FIELDS = "name start end duration device stream process thread launched_at graph"


def table(rows: list[dict[str, Any]], columns: str) -> pd.DataFrame:
    """The rows with these columns, which it has even without rows."""
    return pd.DataFrame(rows, columns=columns.split())


def nanoseconds(event: Event) -> tuple[int, int]:
    """Start and end of an event, whose own numbers are microseconds; rounded so that what nests still does."""
    return round(event["ts"] * 1000), round((event["ts"] + event["dur"]) * 1000)


def number(thread: Any) -> int:
    """A process or thread id as a number."""
    return thread if isinstance(thread, int) else int(re.sub(r"\D", "", str(thread)) or 0)


def range_row(event: Event) -> dict[str, Any]:
    """A range of record_function."""
    start, end = nanoseconds(event)
    thread = {"process": number(event["pid"]), "thread": number(event["tid"])}
    return {"name": event["name"], "start": start, "end": end} | thread


def first_launches(events: Iterable[Event]) -> dict[int, dict[str, int]]:
    """process, thread and launched_at by correlation id; of several calls with one id, of the outer one."""
    found: dict[int, dict[str, int]] = {}
    for event in sorted(events, key=lambda event: event["ts"]):
        place = {"process": number(event["pid"]), "thread": number(event["tid"])}
        found.setdefault(event["args"].get("correlation"), place | {"launched_at": nanoseconds(event)[0]})
    return found


def launch_of(event: Event, launches: dict[int, dict[str, int]]) -> dict[str, int]:
    """Where and when a kernel or copy was asked for; `NEVER` where the record has no launch."""
    unknown = {"process": NEVER, "thread": NEVER, "launched_at": NEVER}
    return launches.get(event["args"].get("correlation"), unknown)


def kernel_row(event: Event, launches: dict[int, dict[str, int]]) -> dict[str, Any]:
    """A CUDA kernel."""
    start, end = nanoseconds(event)
    arguments = event["args"]
    place = {"device": arguments.get("device", 0), "stream": arguments.get("stream", 0)}
    graph = {"graph": bool(arguments.get("graph node id", 0))}
    times = {"name": event["name"], "start": start, "end": end, "duration": end - start}
    return times | place | graph | launch_of(event, launches)


def copy_row(event: Event, launches: dict[int, dict[str, int]]) -> dict[str, Any]:
    """A memory copy or fill; its name is such as "Memcpy HtoD (Pageable -> Device)"."""
    start, end = nanoseconds(event)
    directions = {
        "HtoD": "Host-to-Device",
        "DtoH": "Device-to-Host",
        "DtoD": "Device-to-Device",
        "PtoP": "Peer-to-Peer",
    }
    operation = next((words for short, words in directions.items() if short in event["name"]), "Memset")
    row = {"start": start, "end": end, "operation": operation, "bytes": event["args"].get("bytes", 0)}
    return row | launch_of(event, launches)


def operator_rows(events: list[Event]) -> list[dict[str, Any]]:
    """CPU operators, each with its own time: without that of the operators it calls, which have rows of their own.

    They count as launched when they begin, by the thread they run on. A range that ran in between is not taken off.
    """
    rows: list[dict[str, Any]] = []
    callers: dict[int, list[dict[str, Any]]] = {}
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        row = range_row(event) | {"device": 0, "stream": number(event["tid"]), "graph": False}
        row |= {"duration": row["end"] - row["start"], "launched_at": row["start"]}
        open_calls = callers.setdefault(row["thread"], [])
        while open_calls and open_calls[-1]["end"] <= row["start"]:
            open_calls.pop()
        if open_calls:
            open_calls[-1]["duration"] -= min(row["end"], open_calls[-1]["end"]) - row["start"]
        open_calls.append(row)
        rows.append(row)
    return rows
