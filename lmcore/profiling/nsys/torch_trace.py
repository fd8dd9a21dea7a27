"""The same `Trace` from a record of torch.profiler: CUDA kernels, or CPU operators. Reading one needs no PyTorch."""

import gzip
import json
import os
import re
import zlib
from pathlib import Path
from typing import Any

import pandas as pd

from lmcore.errors import UserError, require
from lmcore.profiling.nsys.trace import NEVER, Trace, build_trace

CUDA_TOOL, CPU_TOOL = "torch.profiler (CUDA)", "torch.profiler (CPU operators)"

PYTORCHS_OWN = re.compile(r"^(Optimizer\.\w+#|ProfilerStep#)")
"""Ranges that PyTorch makes itself; Nsight Systems would not see them."""

DIRECTIONS = {"HtoD": "Host-to-Device", "DtoH": "Device-to-Host", "DtoD": "Device-to-Device", "PtoP": "Peer-to-Peer"}
"""In names such as "Memcpy HtoD (Pageable -> Device)"; what has none of them is a memset."""

Event = dict[str, Any]


def read_torch_trace(path: str | os.PathLike) -> Trace:
    """The trace in a record of torch.profiler (.json or .json.gz), with kernels where it has any, else CPU operators.

    Raises `UserError` for a file that is missing, damaged or no such record.
    """
    path = Path(path)
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else open(path, encoding="utf-8") as file:
            events = json.load(file)["traceEvents"]
        trace = trace_of([event for event in events if event.get("ph") == "X"])
    except FileNotFoundError:
        raise UserError(f"There is no file {path}.") from None
    # also what gzip (EOFError, zlib.error), json (RecursionError) and events that lack something raise
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, EOFError, RecursionError,
            zlib.error) as error:  # fmt: skip
        why = f"it has no {error}" if isinstance(error, KeyError) else repr(error)
        raise UserError(f"{path} cannot be read as a record of torch.profiler ({why}).") from error
    require(
        any(len(part) for part in (trace.kernels, trace.ranges, trace.copies)),
        f"{path} holds no kernel, operator or range: nothing ran while torch.profiler recorded.",
    )
    return trace


def trace_of(events: list[Event]) -> Trace:
    """The trace that the lasting events of a record make."""

    def rows(*categories: str) -> list[Event]:
        return [row(event) for event in events if event.get("cat") in categories]

    launches: dict[int, Event] = {}
    for call in sorted(rows("cuda_runtime", "cuda_driver"), key=lambda call: call["start"]):
        # of several calls with one correlation id the outer one, which began first
        launches.setdefault(call["correlation"], {key: call[key] for key in ("process", "thread", "launched_at")})
    unknown = dict.fromkeys(("process", "thread", "launched_at"), NEVER)
    kernels, copies = (
        [work | launches.get(work["correlation"], unknown) for work in rows(*categories)]
        for categories in (["kernel"], ["gpu_memcpy", "gpu_memset"])
    )
    times = ["name", "start", "end", "duration", "process", "thread", "launched_at"]
    ranges = [found for found in rows("user_annotation") if not PYTORCHS_OWN.match(found["name"])]
    return build_trace(
        CUDA_TOOL if kernels else CPU_TOOL,
        pd.DataFrame(kernels or own_times(rows("cpu_op")), columns=[*times, "device", "stream", "graph"]),
        pd.DataFrame(ranges, columns=times),
        pd.DataFrame(copies, columns=[*times, "operation", "bytes"]),
    )


def row(event: Event) -> Event:
    """An event's name, times in nanoseconds and place. Its own microseconds are rounded so that what nests still does.

    It counts as launched when it begins, which is so for operators.
    """
    start, end = round(event["ts"] * 1000), round((event["ts"] + event["dur"]) * 1000)
    ids = {"process": event["pid"], "thread": event["tid"]}
    ids = {name: id if isinstance(id, int) else int(re.sub(r"\D", "", str(id)) or 0) for name, id in ids.items()}
    more = event.get("args", {})
    return ids | {
        "name": event["name"], "start": start, "end": end, "duration": end - start, "launched_at": start,
        "device": more.get("device", 0), "stream": more.get("stream", 0), "graph": bool(more.get("graph node id", 0)),
        "operation": next((words for short, words in DIRECTIONS.items() if short in event["name"]), "Memset"),
        "bytes": more.get("bytes", 0), "correlation": more.get("correlation"),
    }  # fmt: skip


def own_times(operators: list[Event]) -> list[Event]:
    """CPU operators, each with its own time: without that of the operators it calls, which have rows of their own.

    A range that ran in between is not taken off. The stream of an operator is its thread.
    """
    callers: dict[int, list[Event]] = {}
    for one in sorted(operators, key=lambda one: (one["start"], -one["duration"])):
        one["stream"] = one["thread"]
        open_calls = callers.setdefault(one["thread"], [])
        while open_calls and open_calls[-1]["end"] <= one["start"]:
            open_calls.pop()
        if open_calls:
            open_calls[-1]["duration"] -= min(one["end"], open_calls[-1]["end"]) - one["start"]
        open_calls.append(one)
    return operators
