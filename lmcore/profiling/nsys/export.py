"""Reads the SQLite export of Nsight Systems into a `Trace`.

The tables are those of NVIDIA's "SQLite Schema Reference"; tables without rows are not exported, columns come and go
with versions (seen: 2022.2 to 2025.3), and several obvious joins are wrong. Each is explained where it is done right.
"""

import functools
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pandas as pd

from lmcore.errors import UserError, require
from lmcore.files import not_a_pipe
from lmcore.profiling.nsys.trace import NEVER, NO_COPY, Trace, build_trace, listed

PROCESS_OF_THREAD = -(1 << 24)
"""Mask (0xFFFFFFFFFF000000, signed) that leaves the process in a globalTid: in `globalPid` the thread's bits are 0."""

PUSH_POP_RANGE, START_END_RANGE = 59, 60
"""Event types of NVTX_EVENTS that last; the others are marks, domains and names of things."""

ACTIVITY = "CUPTI_ACTIVITY_KIND_"
KERNEL, RUNTIME, GRAPH = f"{ACTIVITY}KERNEL", f"{ACTIVITY}RUNTIME", f"{ACTIVITY}GRAPH_TRACE"
MEMCPY, MEMSET, NVTX = f"{ACTIVITY}MEMCPY", f"{ACTIVITY}MEMSET", "NVTX_EVENTS"
DEVICES = "TARGET_INFO_CUDA_DEVICE"
"""Which GPU (gpuId) a process (pid) calls its device cudaId; older versions lack it."""

PID = "globalPid >> 24 & 16777215"
VERSION_TABLES = ("META_DATA_EXPORT", "EXPORT_META_DATA")
"""The table that says which version made the export, today and before 2023."""

COPY_KINDS = {1: "Host-to-Device", 2: "Device-to-Host", 8: "Device-to-Device", 9: "Host-to-Host", 10: "Peer-to-Peer"}
"""CUpti_ActivityMemcpyKind, without those of CUDA arrays and unified memory."""

WORK = {
    KERNEL: ("COALESCE(demangledName, 0)", "streamId", NO_COPY),
    GRAPH: ("graphId", "streamId", NO_COPY),
    MEMCPY: ("copyKind", -1, "bytes"),
    MEMSET: ("0", -1, "bytes"),
}
"""What has run: for each table in SQL the number that stands for a name, the stream, and the bytes copied.

Kernels inside CUDA graphs are kernels where nodes were traced (--cuda-graph-trace=node), else the graph is one, from
its first node's start to the last one's end.
"""


def read_export(path: str | Path) -> Trace:
    """The trace in an SQLite export.

    Raises `UserError` for a file that is missing, empty, damaged or not an export, for a version with other tables or
    columns, and for one in which nothing was recorded because the capture range never fired.
    """
    path = Path(path)
    require(not_a_pipe(path).is_file(), f"There is no file {path}.")
    require(path.stat().st_size > 0, f"{path} is empty; export the .nsys-rep again with `nsys export --type sqlite`.")
    tool, again = "Nsight Systems", ""
    with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as db:
        db.text_factory = functools.partial(str, encoding="utf-8", errors="replace")  # not all is UTF-8
        try:
            tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            version = [name for name in VERSION_TABLES if name in tables]
            require(
                "StringIds" in tables and len(version) > 0,
                f"{path} is an SQLite file, but not one that Nsight Systems exported: it has no table StringIds or "
                "META_DATA_EXPORT.",
            )
            sql = f"SELECT value FROM {version[0]} WHERE name = 'EXPORT_PRODUCT_VERSION'"
            for (number,) in db.execute(sql):
                tool += f" {'.'.join(str(number).split('.')[:3])}"
            again = "; export the .nsys-rep again with a version from 2022.2 to 2025.3"
            recorded = [name for name in (RUNTIME, NVTX, *WORK) if name in tables]
            require(
                any(db.execute(f"SELECT 1 FROM {name} LIMIT 1").fetchone() for name in recorded),
                f"{path} holds no CUDA call, kernel or range: the capture range never fired, as the program did not "
                "call torch.cuda.profiler.start(), or it used no GPU.",
            )
            return build_trace(tool, read_work(db, tables), *read_ranges(db, recorded))
        except UserError:
            raise
        # a missing column; text where a number belongs, or a number out of range
        except (sqlite3.DatabaseError, ValueError, TypeError, ArithmeticError) as error:
            raise UserError(f"{path} cannot be read as an SQLite export of {tool} ({error}){again}.") from error


def read_work(db: sqlite3.Connection, tables: set[str]) -> pd.DataFrame:
    """Kernels, CUDA graphs, cudaMemcpy by direction and cudaMemset, each with its launch; `NEVER` where that is not
    recorded.

    Correlation ids are unique in one process only. There may be two runtime rows for one, such as cudaLaunchKernel
    around cudaLaunchKernel_v7000 or the driver's call inside the runtime's: the outer one, which began first, is kept.
    """
    db.execute("""
        CREATE TEMP TABLE launches (thread INTEGER, at INTEGER, process INTEGER, correlation INTEGER,
        PRIMARY KEY (process, correlation))""")  # of the types of the tables it joins, or its index is not used
    if RUNTIME in tables:  # globalTid is that of the row with the least start, as SQLite promises
        db.execute(f"""
            INSERT INTO launches SELECT globalTid, MIN(start), globalTid & {PROCESS_OF_THREAD} AS process, correlationId
            FROM {RUNTIME} GROUP BY process, correlationId""")
    strings = dict(db.execute("SELECT id, value FROM StringIds"))
    names = {
        KERNEL: lambda number: strings.get(number) or "unnamed kernel",
        GRAPH: lambda number: f"CUDA graph {number}",
        MEMCPY: lambda number: COPY_KINDS.get(number, f"copy of kind {number}"),
        MEMSET: lambda number: "Memset",
    }
    found = []
    device = "deviceId"  # a process's own number: with CUDA_VISIBLE_DEVICES each process may have a device 0
    if DEVICES in tables:
        device = f"COALESCE((SELECT MIN(gpuId) FROM {DEVICES} WHERE cudaId = deviceId AND pid = {PID}), deviceId)"
    for table, (name, stream, size) in WORK.items():
        columns = {
            "name": name, "start": "start", "end": "end", "device": device, "stream": stream, "process": "globalPid",
            "thread": f"COALESCE(thread, {NEVER})", "launched_at": f"COALESCE(at, {NEVER})", "bytes": size,
        }  # fmt: skip
        sql = f"""SELECT {", ".join(map(str, columns.values()))} FROM {table} LEFT JOIN launches
            ON process = {table}.globalPid AND correlation = {table}.correlationId"""
        if table == GRAPH and KERNEL in tables:  # a launch whose nodes were traced is left out
            sql += f" WHERE (globalPid, correlationId) NOT IN (SELECT globalPid, correlationId FROM {KERNEL})"
        # rows go one by one into an array: as Python's numbers a million of them would take a gigabyte
        rows = np.fromiter(db.execute(sql) if table in tables else (), dtype=[(name, np.int64) for name in columns])
        work = pd.DataFrame(rows)
        work["name"] = work["name"].map({number: names[table](number) for number in work["name"].unique()})
        found.append(work.assign(duration=work["end"] - work["start"]))
    return pd.concat(found)


def read_ranges(db: sqlite3.Connection, recorded: Sequence[str]) -> tuple[pd.DataFrame, list[str]]:
    """NVTX ranges (name, start, end, process, thread) that began while the capture ran, and notes on them.

    One that was still open when the capture ended lasts to the end of the `recorded` tables.
    A registered string's text is behind `textId`, any other in `text`.
    """
    columns = ["name", "start", "end", "process", "thread"]
    if NVTX not in recorded:
        return pd.DataFrame(columns=columns), []
    last = max(db.execute(f"SELECT MAX(COALESCE(end, start, 0)) FROM {name}").fetchone()[0] or 0 for name in recorded)
    sql = f"""
        SELECT COALESCE(text, value, 'unnamed'), start, COALESCE(end, {last}), globalTid & {PROCESS_OF_THREAD},
        globalTid, end IS NULL
        FROM {NVTX} LEFT JOIN StringIds ON StringIds.id = textId
        WHERE eventType IN ({PUSH_POP_RANGE}, {START_END_RANGE})"""
    ranges = pd.DataFrame(db.execute(sql).fetchall(), columns=[*columns, "open"])
    still = ranges.loc[ranges.pop("open") == 1, "name"]
    many = f"{len(still):,} of {len(ranges):,} ranges were"
    return ranges, [f"{many} open when the record ended and count up to its end: {listed(still)}."] * (len(still) > 0)
