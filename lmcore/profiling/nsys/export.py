"""Reads the SQLite export of Nsight Systems into a `Trace`.

The tables are those of NVIDIA's "SQLite Schema Reference"; tables without rows are not exported, columns come and go
with versions (seen: 2022.2 to 2025.3), and several obvious joins are wrong. Each is explained where it is done right.
"""

import functools
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pandas as pd

from lmcore.errors import UserError, require
from lmcore.profiling.nsys.trace import NEVER, Trace, build_trace

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

REQUIRED = {
    KERNEL: {"start", "end", "deviceId", "streamId", "correlationId", "globalPid", "demangledName"},
    RUNTIME: {"start", "globalTid", "correlationId"},
    NVTX: {"start", "end", "eventType", "globalTid", "text"},
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

    def query(self, sql: str, columns: str) -> pd.DataFrame:
        """Rows of a query as a table with these columns, which it has even without rows."""
        return pd.DataFrame(self.connection.execute(sql).fetchall(), columns=columns.split())

    def column(self, table: str, name: str) -> str:
        """The column's name, or NULL where this version has no such column."""
        return name if name in self.columns[table] else "NULL"

    @property
    def tool(self) -> str:
        """The version of Nsight Systems that exported it, such as "Nsight Systems 2025.3.1"."""
        table = next(name for name in VERSION_TABLES if name in self.columns)
        sql = f"SELECT value FROM {table} WHERE name = 'EXPORT_PRODUCT_VERSION'"
        version = self.connection.execute(sql).fetchone()
        return f"Nsight Systems {'.'.join(version[0].split('.')[:3])}" if version and version[0] else "Nsight Systems"


@contextmanager
def open_export(path: str | Path) -> Iterator[Export]:
    """Opens an export for reading. Raises `UserError` for what is missing, empty, damaged or no export."""
    path = Path(path)
    require(path.is_file(), f"There is no file {path}.")
    require(path.stat().st_size > 0, f"{path} is empty; export the .nsys-rep again with `nsys export --type sqlite`.")
    with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as connection:
        try:
            export = Export(connection, path)
            tables = {"StringIds", *VERSION_TABLES} & set(export.columns)
            require(
                len(tables) >= 2,
                f"{path} is an SQLite file, but not one that Nsight Systems exported: it has no table StringIds or "
                "META_DATA_EXPORT.",
            )
            for table, needed in REQUIRED.items():
                lacking = sorted(needed - export.columns.get(table, needed))
                require(
                    not lacking,
                    f"{path} was exported by {export.tool}, whose table {table} has no {', '.join(lacking)}; "
                    "export the .nsys-rep again with Nsight Systems 2022 or newer.",
                )
            yield export
        except UserError:
            raise
        except (sqlite3.DatabaseError, ValueError, TypeError) as error:  # also what is no number where one should be
            raise UserError(f"{path} cannot be read as an SQLite export of Nsight Systems ({error}).") from error


def read_export(path: str | Path) -> Trace:
    """The trace in an SQLite export.

    Raises `UserError` for a file that is missing, empty, damaged or not an export, and for one in which nothing was
    recorded because the capture range never fired.
    """
    with open_export(path) as export:
        recorded = {KERNEL, GRAPH, RUNTIME, MEMCPY, NVTX} & set(export.columns)
        require(
            any(export.connection.execute(f"SELECT 1 FROM {table} LIMIT 1").fetchone() for table in recorded),
            f"{path} holds no CUDA call, kernel or range: the capture range never fired, as the program did not call "
            "torch.cuda.profiler.start(), or it used no GPU.",
        )
        launches = read_launches(export)
        kernels = pd.concat([read_kernels(export), read_graphs(export)], ignore_index=True)
        return build_trace(
            export.tool, launched(kernels, launches), read_ranges(export), launched(read_copies(export), launches)
        )


def read_launches(export: Export) -> pd.DataFrame:
    """When and by which thread each piece of GPU work was asked for: process, correlation, thread, launched_at.

    Correlation ids are unique in one process only. There may be two runtime rows for one, such as cudaLaunchKernel
    around cudaLaunchKernel_v7000 or the driver's call inside the runtime's: the outer one, which began first, is kept.
    """
    if RUNTIME not in export.columns:
        return export.query("SELECT 0, 0, 0, 0 WHERE 0", "process correlation thread launched_at")
    sql = f"SELECT globalTid & {PROCESS_OF_THREAD}, correlationId, globalTid, start FROM {RUNTIME}"
    rows = export.query(sql, "process correlation thread launched_at").sort_values("launched_at", kind="stable")
    return rows.drop_duplicates(["process", "correlation"])


def launched(work: pd.DataFrame, launches: pd.DataFrame) -> pd.DataFrame:
    """The work with its launch, joined on correlation id and process; `NEVER` where the record has none."""
    joined = work.merge(launches, how="left", on=["process", "correlation"], validate="many_to_one")
    for column in ("thread", "launched_at"):
        joined[column] = joined[column].astype("Int64").fillna(NEVER).astype("int64")
    return joined.drop(columns="correlation")


KERNEL_FIELDS = "name start end device stream process correlation graph"


def read_kernels(export: Export) -> pd.DataFrame:
    """Kernels, also those inside CUDA graphs where nodes were traced (--cuda-graph-trace=node)."""
    if KERNEL not in export.columns:
        return export.query("SELECT 0, 0, 0, 0, 0, 0, 0, 0 WHERE 0", KERNEL_FIELDS).astype({"graph": bool})
    node = export.column(KERNEL, "graphNodeId")
    sql = f"""
        SELECT COALESCE(value, 'unnamed kernel'), start, end, deviceId, streamId, globalPid, correlationId,
               COALESCE({node}, 0) != 0
        FROM {KERNEL} LEFT JOIN StringIds ON StringIds.id = demangledName"""
    return export.query(sql, KERNEL_FIELDS).astype({"graph": bool})


def read_graphs(export: Export) -> pd.DataFrame:
    """Launches of whole CUDA graphs, as one kernel each from the first node's start to the last one's end.

    That is all there is where graphs were traced as a whole; a launch whose nodes were traced is left out.
    """
    if GRAPH not in export.columns:
        return export.query("SELECT 0, 0, 0, 0, 0, 0, 0, 0 WHERE 0", KERNEL_FIELDS).astype({"graph": bool})
    traced = f"SELECT globalPid, correlationId FROM {KERNEL}" if KERNEL in export.columns else "SELECT 0, 0 WHERE 0"
    sql = f"""
        SELECT 'CUDA graph ' || graphId, start, end, deviceId, streamId, globalPid, correlationId, 1
        FROM {GRAPH} WHERE (globalPid, correlationId) NOT IN ({traced})"""
    return export.query(sql, KERNEL_FIELDS).astype({"graph": bool})


def read_copies(export: Export) -> pd.DataFrame:
    """cudaMemcpy by direction, and cudaMemset, with their bytes."""
    fields = "start end operation bytes process correlation"
    parts = [export.query("SELECT 0, 0, 0, 0, 0, 0 WHERE 0", fields)]
    if MEMCPY in export.columns:
        sql = f"SELECT start, end, copyKind, bytes, globalPid, correlationId FROM {MEMCPY}"
        copies, names = export.query(sql, fields), COPY_KINDS
        if "ENUM_CUDA_MEMCPY_OPER" in export.columns:
            names = dict(export.connection.execute("SELECT id, label FROM ENUM_CUDA_MEMCPY_OPER"))
        copies["operation"] = [names.get(kind, f"copy of kind {kind}") for kind in copies["operation"]]
        parts.append(copies)
    if MEMSET in export.columns:
        sql = f"SELECT start, end, 'Memset', bytes, globalPid, correlationId FROM {MEMSET}"
        parts.append(export.query(sql, fields))
    return pd.concat([part for part in parts if len(part)] or parts[:1], ignore_index=True)


def read_ranges(export: Export) -> pd.DataFrame:
    """NVTX ranges that began and ended while the capture ran: name, start, end, process, thread.

    A registered string's text is behind `textId`, any other in `text`.
    """
    fields = "name start end process thread"
    if NVTX not in export.columns:
        return export.query("SELECT 0, 0, 0, 0, 0 WHERE 0", fields)
    sql = f"""
        SELECT COALESCE(text, value, 'unnamed'), start, end, globalTid & {PROCESS_OF_THREAD}, globalTid
        FROM {NVTX} LEFT JOIN StringIds ON StringIds.id = {export.column(NVTX, "textId")}
        WHERE eventType IN ({PUSH_POP_RANGE}, {START_END_RANGE}) AND end IS NOT NULL"""
    return export.query(sql, fields)
