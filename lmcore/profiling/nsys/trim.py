"""Cuts an export of Nsight Systems down to what the analysis reads, so that it can be shared."""

import contextlib
import os
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pandas as pd

from lmcore.errors import UserError, require
from lmcore.profiling.nsys.export import (
    GRAPH,
    KERNEL,
    MEMCPY,
    MEMSET,
    NVTX,
    PUSH_POP_RANGE,
    RUNTIME,
    START_END_RANGE,
    Export,
    open_export,
    read_ranges,
)

KEPT_COLUMNS = {
    KERNEL: "start end deviceId streamId correlationId globalPid demangledName shortName graphNodeId",
    GRAPH: "start end deviceId streamId correlationId globalPid graphId graphExecId",
    MEMCPY: "start end deviceId streamId correlationId globalPid bytes copyKind",
    MEMSET: "start end deviceId streamId correlationId globalPid bytes",
    RUNTIME: "start end globalTid correlationId nameId",
    NVTX: "start end eventType text globalTid textId domainId",
}
"""What is kept of each table. Everything else goes: environment variables, processes, threads, call chains, paths."""

STRING_COLUMNS = ("demangledName", "shortName", "nameId", "textId")
WORK = (KERNEL, GRAPH, MEMCPY, MEMSET)


def trim_export(source: str | os.PathLike, target: str | os.PathLike, ranges: Sequence[str] = ()) -> Path:
    """Writes a small export with the same trace: kernels, graphs, copies, their runtime calls, ranges, the GPU's name.

    With `ranges` only what was launched inside the first range of each of these names is kept. Names of kernels and
    ranges are as they were. Raises `UserError` for a source that is no export, a target that exists, and unknown names.
    """
    source, target = Path(source), Path(target)
    require(not target.exists(), f"{target} exists; name a new file.")
    with open_export(source) as export:
        tables = {name: kept_rows(export, name) for name in KEPT_COLUMNS if name in export.columns}
        if NVTX in tables:
            lasting = tables[NVTX]["eventType"].isin((PUSH_POP_RANGE, START_END_RANGE)) & tables[NVTX]["end"].notna()
            tables[NVTX] = tables[NVTX][lasting]
        if ranges:
            tables = within(tables, first_ranges(export, ranges))
        if RUNTIME in tables:
            asked = {number for name in WORK if name in tables for number in tables[name]["correlationId"]}
            tables[RUNTIME] = tables[RUNTIME][tables[RUNTIME]["correlationId"].isin(asked)]
        tables |= other_tables(export, tables)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with closing(sqlite3.connect(target)) as connection:
            for name, rows in tables.items():
                if len(rows):
                    rows.to_sql(name, connection, index=False)
            connection.commit()
            connection.execute("VACUUM")
    except (OSError, sqlite3.Error, pd.errors.DatabaseError) as error:
        with contextlib.suppress(OSError):
            target.unlink(missing_ok=True)
        raise UserError(f"Cannot write {target} ({error}).") from error
    return target


def kept_rows(export: Export, table: str) -> pd.DataFrame:
    """A table's rows with the columns that are kept and there."""
    names = [name for name in KEPT_COLUMNS[table].split() if name in export.columns[table]]
    return export.query(f"SELECT {', '.join(names)} FROM {table}", " ".join(names)).convert_dtypes()


def first_ranges(export: Export, names: Sequence[str]) -> list[tuple[int, int]]:
    """Start and end of the first range of each name."""
    ranges = read_ranges(export).sort_values("start")
    found = [ranges[ranges["name"] == name] for name in names]
    lacking = [name for name, rows in zip(names, found, strict=True) if rows.empty]
    there = ", ".join(ranges["name"].unique()[:20]) or "none"
    require(not lacking, f"{export.path} has no range {', '.join(lacking)}; there are {there}.")
    return [(int(rows["start"].iloc[0]), int(rows["end"].iloc[0])) for rows in found]


def within(tables: dict[str, pd.DataFrame], spans: Sequence[tuple[int, int]]) -> dict[str, pd.DataFrame]:
    """Ranges and runtime calls that begin in one of the spans, and the work those calls asked for."""

    def begun_inside(rows: pd.DataFrame) -> pd.DataFrame:
        inside = [rows["start"].between(start, end) for start, end in spans]
        return rows[pd.concat(inside, axis=1).any(axis=1)]

    kept = {name: begun_inside(tables[name]) for name in (NVTX, RUNTIME) if name in tables}
    calls = kept[RUNTIME]["correlationId"] if RUNTIME in kept else ()
    return kept | {name: tables[name][tables[name]["correlationId"].isin(calls)] for name in WORK if name in tables}


def other_tables(export: Export, tables: dict[str, pd.DataFrame]) -> dict[str, pd.DataFrame]:
    """The strings that are used, the version, the names of copies' directions and of the GPU."""
    used = [rows[name] for rows in tables.values() for name in STRING_COLUMNS if name in rows]
    strings = export.query("SELECT id, value FROM StringIds", "id value")
    version = next(name for name in ("META_DATA_EXPORT", "EXPORT_META_DATA") if name in export.columns)
    sql = f"SELECT name, value FROM {version} WHERE name LIKE 'EXPORT_PRODUCT_%' OR name LIKE 'EXPORT_SCHEMA_VERSION%'"
    found = {
        "StringIds": strings[strings["id"].isin(pd.concat(used) if used else ())],
        version: export.query(sql, "name value"),
    }
    for table, columns in (("ENUM_CUDA_MEMCPY_OPER", "id name label"), ("TARGET_INFO_GPU", "id name")):
        if table in export.columns:
            found[table] = export.query(f"SELECT {', '.join(columns.split())} FROM {table}", columns)
    return found
