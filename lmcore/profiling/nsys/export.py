"""Reads the SQLite export of Nsight Systems into a `Trace`.

The tables are those of NVIDIA's "SQLite Schema Reference"; tables without rows are not exported, columns come and go
with versions (seen: 2022.2 to 2025.3), and several obvious joins are wrong. Each is explained where it is done right.
"""

import functools
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pandas as pd

from lmcore.errors import UserError, require
from lmcore.profiling.nsys.trace import NEVER, Trace, build_trace, labels

PROCESS_OF_THREAD = -(1 << 24)
"""Mask (0xFFFFFFFFFF000000, signed) that leaves the process in a globalTid: in `globalPid` the thread's bits are 0."""

PUSH_POP_RANGE, START_END_RANGE = 59, 60
"""Event types of NVTX_EVENTS that last; the others are marks, domains and names of things."""

ACTIVITY = "CUPTI_ACTIVITY_KIND_"
KERNEL, RUNTIME, GRAPH = f"{ACTIVITY}KERNEL", f"{ACTIVITY}RUNTIME", f"{ACTIVITY}GRAPH_TRACE"
MEMCPY, MEMSET, NVTX = f"{ACTIVITY}MEMCPY", f"{ACTIVITY}MEMSET", "NVTX_EVENTS"
VERSION_TABLES = ("META_DATA_EXPORT", "EXPORT_META_DATA")
"""The table that says which version made the export, today and before 2023."""

COPY_KINDS = {1: "Host-to-Device", 2: "Device-to-Host", 8: "Device-to-Device", 9: "Host-to-Host", 10: "Peer-to-Peer"}
"""CUpti_ActivityMemcpyKind, for exports without a table of their names."""
MEMSET_KIND = -1

REQUIRED = {
    KERNEL: {"start", "end", "deviceId", "streamId", "correlationId", "globalPid", "demangledName"},
    GRAPH: {"start", "end", "deviceId", "streamId", "correlationId", "globalPid", "graphId"},
    MEMCPY: {"start", "end", "correlationId", "globalPid", "bytes", "copyKind"},
    MEMSET: {"start", "end", "correlationId", "globalPid", "bytes"},
    RUNTIME: {"start", "globalTid", "correlationId"},
    NVTX: {"start", "end", "eventType", "globalTid", "text"},
    "StringIds": {"id", "value"},
}
"""Columns that the analysis cannot do without, of tables that are there."""


class Export:
    """An open export: which tables and columns it has, and queries on it."""

    def __init__(self, connection: sqlite3.Connection, path: Path):
        self.connection, self.path = connection, path
        connection.text_factory = functools.partial(str, encoding="utf-8", errors="replace")  # not all is UTF-8
        tables = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
        self.columns = {
            name: {column[1] for column in connection.execute(f'PRAGMA table_info("{name}")')} for (name,) in tables
        }

    def numbers(self, table: str, columns: Mapping[str, str], where: str = "") -> pd.DataFrame:
        """Whole numbers by name of a column, each with its SQL; no rows where there is no such table.

        Rows go one by one into arrays: as Python's numbers a million of them would take a gigabyte.
        """
        sql = f"SELECT {', '.join(columns.values())} FROM {table} {where}"
        found = self.connection.execute(sql) if table in self.columns else ()
        return pd.DataFrame(np.fromiter(found, dtype=[(name, np.int64) for name in columns]))

    def column(self, table: str, name: str) -> str:
        """The column's name, or NULL where this version has no such column."""
        return name if name in self.columns.get(table, ()) else "NULL"

    @property
    def tool(self) -> str:
        """The version of Nsight Systems that exported it, such as "Nsight Systems 2025.3.1"."""
        table = next((name for name in VERSION_TABLES if name in self.columns), "META_DATA_EXPORT")
        sql = f"SELECT value FROM {table} WHERE name = 'EXPORT_PRODUCT_VERSION'"
        version = self.connection.execute(sql).fetchone()
        return f"Nsight Systems {'.'.join(str(version[0]).split('.')[:3])}" if version else "Nsight Systems"


@contextmanager
def open_export(path: str | Path) -> Iterator[Export]:
    """Opens an export for reading. Raises `UserError` for what is missing, empty, damaged or no export that we know."""
    path = Path(path)
    require(path.is_file(), f"There is no file {path}.")
    require(path.stat().st_size > 0, f"{path} is empty; export the .nsys-rep again with `nsys export --type sqlite`.")
    with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as connection:
        try:
            export = Export(connection, path)
            require(
                "StringIds" in export.columns and any(name in export.columns for name in VERSION_TABLES),
                f"{path} is an SQLite file, but not one that Nsight Systems exported: it has no table StringIds or "
                "META_DATA_EXPORT.",
            )
            again = "export the .nsys-rep again with a version from 2022.2 to 2025.3."
            for table, needed in REQUIRED.items():
                lacking = ", ".join(sorted(needed - export.columns.get(table, needed)))
                require(
                    not lacking, f"{path} was exported by {export.tool}, whose table {table} has no {lacking}; {again}"
                )
            for table in {KERNEL, RUNTIME} - export.columns.keys():
                word = table.removeprefix(ACTIVITY)
                others = ", ".join(name for name in export.columns if word in name and not name.startswith("ENUM_"))
                require(
                    not others,
                    f"{path} was exported by {export.tool}, which has no table {table} but {others}; {again}",
                )
            yield export
        except UserError:
            raise
        # also what is no number where one should be, or none that fits
        except (sqlite3.DatabaseError, ValueError, TypeError, ArithmeticError) as error:
            raise UserError(f"{path} cannot be read as an SQLite export of Nsight Systems ({error}).") from error


def read_export(path: str | Path) -> Trace:
    """The trace in an SQLite export.

    Raises `UserError` for a file that is missing, empty, damaged or not an export, for a version with other tables or
    columns, and for one in which nothing was recorded because the capture range never fired.
    """
    with open_export(path) as export:
        recorded = {
            table
            for table in REQUIRED.keys() & export.columns.keys() - {"StringIds"}
            if export.connection.execute(f"SELECT 1 FROM {table} LIMIT 1").fetchone()
        }
        require(
            bool(recorded),
            f"{path} holds no CUDA call, kernel or range: the capture range never fired, as the program did not call "
            "torch.cuda.profiler.start(), or it used no GPU.",
        )
        launches = read_launches(export)
        kernels, copies = (launched(work, launches) for work in (read_kernels(export), read_copies(export)))
        return build_trace(export.tool, kernels, read_ranges(export), copies)


def read_launches(export: Export) -> pd.DataFrame:
    """When and by which thread each piece of GPU work was asked for: process, correlation, thread, launched_at.

    Correlation ids are unique in one process only. There may be two runtime rows for one, such as cudaLaunchKernel
    around cudaLaunchKernel_v7000 or the driver's call inside the runtime's: the outer one, which began first, is kept.
    """
    process = f"globalTid & {PROCESS_OF_THREAD}"
    columns = {"process": process, "correlation": "correlationId", "thread": "globalTid", "launched_at": "start"}
    rows = export.numbers(RUNTIME, columns).sort_values("launched_at", kind="stable")
    return rows.drop_duplicates(["process", "correlation"])


def launched(work: pd.DataFrame, launches: pd.DataFrame) -> pd.DataFrame:
    """The work with its launch, joined on correlation id and process; `NEVER` where the record has none."""
    numbered = launches[["process", "correlation"]].assign(row=np.arange(len(launches)))
    row = work.merge(numbered, how="left", on=["process", "correlation"])["row"].fillna(-1).astype("int64")
    for column in ("thread", "launched_at"):  # taken by row: in a merge with gaps they are floats, too short for ids
        work[column] = np.append(launches[column], NEVER)[row]
    return work.drop(columns="correlation")


def read_kernels(export: Export) -> pd.DataFrame:
    """Kernels, also those inside CUDA graphs where nodes were traced (--cuda-graph-trace=node), and whole graphs.

    A graph traced as a whole is one kernel from the first node's start to the last one's end; a launch whose nodes
    were traced is left out.
    """
    place = {"start": "start", "end": "end", "device": "deviceId", "stream": "streamId", "process": "globalPid"}
    place["correlation"] = "correlationId"
    node = f"COALESCE({export.column(KERNEL, 'graphNodeId')}, 0) != 0"
    kernels = export.numbers(KERNEL, {"name": "COALESCE(demangledName, -1)", **place, "graph": node})
    traced = f"SELECT globalPid, correlationId FROM {KERNEL}" if len(kernels) else "SELECT 0, 0 WHERE 0"
    where = f"WHERE (globalPid, correlationId) NOT IN ({traced})"
    graphs = export.numbers(GRAPH, {"name": "graphId", **place, "graph": "1"}, where)
    strings = dict(export.connection.execute("SELECT id, value FROM StringIds"))
    ids, codes = np.unique(kernels["name"], return_inverse=True)
    graph_ids, graph_codes = np.unique(graphs["name"], return_inverse=True)
    names = [strings.get(id) or "unnamed kernel" for id in ids] + [f"CUDA graph {id}" for id in graph_ids]
    work = pd.concat([kernels, graphs], ignore_index=True).astype({"graph": bool})
    work["name"] = labels(np.append(codes, graph_codes + len(ids)), names)
    return work


def read_copies(export: Export) -> pd.DataFrame:
    """cudaMemcpy by direction, and cudaMemset, with their bytes."""
    columns = {"start": "start", "end": "end", "operation": "copyKind", "bytes": "bytes", "process": "globalPid"}
    columns["correlation"] = "correlationId"
    copies = export.numbers(MEMCPY, columns)
    fills = export.numbers(MEMSET, columns | {"operation": str(MEMSET_KIND)})
    names = COPY_KINDS
    if "ENUM_CUDA_MEMCPY_OPER" in export.columns:
        names = dict(export.connection.execute("SELECT id, label FROM ENUM_CUDA_MEMCPY_OPER"))
    names = names | {MEMSET_KIND: "Memset"}
    work = pd.concat([copies, fills], ignore_index=True)
    kinds, codes = np.unique(work["operation"], return_inverse=True)
    work["operation"] = labels(codes, [names.get(kind, f"copy of kind {kind}") for kind in kinds])
    return work


def read_ranges(export: Export) -> pd.DataFrame:
    """NVTX ranges that began and ended while the capture ran: name, start, end, process, thread.

    A registered string's text is behind `textId`, any other in `text`.
    """
    columns = ["name", "start", "end", "process", "thread"]
    if NVTX not in export.columns:
        return pd.DataFrame(columns=columns)
    sql = f"""
        SELECT COALESCE(text, value, 'unnamed'), start, end, globalTid & {PROCESS_OF_THREAD}, globalTid
        FROM {NVTX} LEFT JOIN StringIds ON StringIds.id = {export.column(NVTX, "textId")}
        WHERE eventType IN ({PUSH_POP_RANGE}, {START_END_RANGE}) AND end IS NOT NULL"""
    return pd.DataFrame(export.connection.execute(sql).fetchall(), columns=columns)
