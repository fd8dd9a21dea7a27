"""The same `Trace` from a record of torch.profiler: CUDA kernels, or CPU operators. Reading one needs no PyTorch."""

import gzip
import json
import os
import re
from pathlib import Path
from typing import Any

import pandas as pd

from lmcore.errors import UserError, require
from lmcore.files import not_a_pipe
from lmcore.profiling.nsys.trace import NEVER, NO_COPY, NUMBERS, Trace, build_trace, listed

CUDA_TOOL, CPU_TOOL = "torch.profiler (CUDA)", "torch.profiler (CPU operators)"

PYTORCHS_OWN = re.compile(r"^(Optimizer\.\w+#|ProfilerStep#)")
"""Ranges that PyTorch makes itself; Nsight Systems would not see them."""

COPIES = {"HtoD": "Host-to-Device", "DtoH": "Device-to-Host", "DtoD": "Device-to-Device", "PtoP": "Peer-to-Peer"}
"""In names such as "Memcpy HtoD (Pageable -> Device)"; what has none of them is a memset."""

PASSED_OVER = {
    "cpu_op", "operator", "gpu_user_annotation", "python_function", "trace", "overhead", "cuda_sync", "cuda_event",
    "cuda_profiler_range",
}  # fmt: skip
"""Categories that are no work of a GPU, nor its launch; operators count where there are no kernels."""

MARKS = ("M", "i", "I", "s", "t", "f", "C")
"""Phases of events that do not last: metadata, instants, arrows and counters."""

Event = dict[str, Any]


def read_torch_trace(path: str | os.PathLike) -> Trace:
    """The trace in a record of torch.profiler (.json or .json.gz), with kernels where it has any, else CPU operators.

    Raises `UserError` for a file that is missing, damaged or no such record.
    """
    path = Path(path)
    require(not_a_pipe(path).is_file(), f"There is no file {path}.")
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else open(path, encoding="utf-8") as file:
            events = json.load(file)["traceEvents"]
        trace = trace_of([event for event in events if event.get("ph") not in MARKS])
    except Exception as error:  # whatever gzip, json and events that lack something raise
        why = f"it has no {error}" if isinstance(error, KeyError) else repr(error)
        raise UserError(f"{path} cannot be read as a record of torch.profiler ({why}).") from error
    why = " ".join(trace.notes) or "nothing ran while torch.profiler recorded."
    require(len(trace.work) + len(trace.ranges) > 0, f"{path} holds no kernel, operator or range: {why}")
    return trace


def trace_of(events: list[Event]) -> Trace:
    """The trace that the lasting events of a record make, by their categories today and until PyTorch 1.11. A note
    names those of other categories, or of another phase than X, such as a beginning without its end."""
    left: dict[str, list[Event]] = {}
    for event in events:
        phase = "" if event.get("ph") == "X" else f" (phase {event.get('ph')})"
        left.setdefault(str(event.get("cat")).lower() + phase, []).append(event)

    def rows(*categories: str) -> list[Event]:
        return [row(event) for category in categories for event in left.pop(category, ())]

    launches: dict[int, Event] = {}
    for call in sorted(rows("cuda_runtime", "cuda_driver", "runtime"), key=lambda call: call["start"]):
        # of several calls with one correlation id the outer one, which began first
        launches.setdefault(call["correlation"], {key: call[key] for key in ("process", "thread", "launched_at")})
    launches.pop(None, None)  # calls without an id launched nothing that is known
    kernels, copies = rows("kernel"), rows("gpu_memcpy", "gpu_memset", "memcpy", "memset")
    for one in kernels + copies:
        one |= launches.get(one["correlation"], dict.fromkeys(("process", "thread", "launched_at"), NEVER))
    ranges = [found for found in rows("user_annotation") if not PYTORCHS_OWN.match(found["name"])]
    unknown = {category: len(found) for category, found in left.items() if category not in PASSED_OVER}
    many = f"{sum(unknown.values()):,} of {len(events):,} events are of categories that are not known"
    return build_trace(
        CUDA_TOOL if kernels else CPU_TOOL,
        pd.DataFrame((kernels or own_times(rows("cpu_op", "operator"))) + copies, columns=["name", *NUMBERS]),
        pd.DataFrame(ranges, columns=["name", "start", "end", "process", "thread"]),
        [f"{many} and are left out: {listed(pd.Series([*unknown]))}."] if unknown else [],
    )


def row(event: Event) -> Event:
    """An event's name, times in nanoseconds and place. Its own microseconds are rounded so that what nests still does.

    It counts as launched when it begins, which is so for operators; the stream of an operator is its thread.
    """
    start, end = round(event["ts"] * 1000), round((event["ts"] + event["dur"]) * 1000)
    process, thread = (
        id if isinstance(id, int) else int(re.sub(r"\D", "", str(id)) or 0) for id in (event["pid"], event["tid"])
    )
    more = event.get("args", {})
    found = {
        "name": event["name"], "start": start, "end": end, "duration": end - start, "launched_at": start,
        "process": process, "thread": thread, "device": more.get("device", 0), "stream": more.get("stream", thread),
        "bytes": NO_COPY, "correlation": more.get("correlation"),
    }  # fmt: skip
    if not str(event.get("cat")).lower().endswith(("memcpy", "memset")):
        return found
    name = next((words for short, words in COPIES.items() if short in event["name"]), "Memset")
    return found | {"name": name, "stream": -1, "bytes": more.get("bytes", 0)}


def own_times(operators: list[Event]) -> list[Event]:
    """CPU operators, each with its own time: without that of the operators it calls, which have rows of their own.

    A range that ran in between is not taken off.
    """
    callers: dict[int, list[Event]] = {}
    for one in sorted(operators, key=lambda one: (one["start"], -one["duration"])):
        if one["duration"] < 0:  # impossible: `build_trace` leaves it out
            continue
        open_calls = callers.setdefault(one["thread"], [])
        while open_calls and open_calls[-1]["end"] <= one["start"]:
            open_calls.pop()
        if open_calls:
            open_calls[-1]["duration"] -= min(one["end"], open_calls[-1]["end"]) - one["start"]
        open_calls.append(one)
    return operators
