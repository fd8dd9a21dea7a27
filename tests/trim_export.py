"""Cuts an export of Nsight Systems down to what the analysis reads, as the one in tests/data.

python tests/trim_export.py SOURCE TARGET [RANGE]
"""

import sqlite3
import sys
from contextlib import closing
from pathlib import Path

from lmcore.errors import require
from lmcore.profiling.nsys.export import GRAPH, KERNEL, MEMCPY, MEMSET, NVTX, RUNTIME, VERSION_TABLES, read_export

WORK = {
    KERNEL: "start end deviceId streamId correlationId globalPid demangledName shortName graphNodeId",
    GRAPH: "start end deviceId streamId correlationId globalPid graphId graphExecId",
    MEMCPY: "start end deviceId streamId correlationId globalPid bytes copyKind",
    MEMSET: "start end deviceId streamId correlationId globalPid bytes",
}
NAMES = {"StringIds": "id value", "ENUM_CUDA_MEMCPY_OPER": "id name label", "TARGET_INFO_GPU": "id name"}
"""Tables and columns that are kept beside calls and ranges; not environment, processes, threads, call chains, paths."""


def trim_export(source: Path, target: Path, range: str | None = None) -> Path:
    """Writes a small export with the same trace: kernels, graphs, copies, their runtime calls, ranges, the GPU's name.

    With `range` only what was launched inside the first range of this name is kept. Raises `UserError` for a source
    that is no export, a target that exists, and an unknown name.
    """
    require(not target.exists(), f"{target} exists; name a new file.")
    ranges = read_export(source).ranges
    chosen = ranges[ranges["name"] == range] if range is not None else ranges
    require(range is None or len(chosen) > 0, f"{source} has no range {range}.")
    begun = "1" if range is None else f"start BETWEEN {chosen['start'].iloc[0]} AND {chosen['end'].iloc[0]}"
    with closing(sqlite3.connect(target, uri=True)) as db:
        db.execute("ATTACH ? AS source", (f"{source.resolve().as_uri()}?mode=ro",))

        def copy(table: str, columns: str, where: str = "1") -> str:
            there = [column[1] for column in db.execute(f"PRAGMA source.table_info({table})")]
            if kept := ", ".join(column for column in columns.split() if column in there):
                db.execute(f"CREATE TABLE {table} AS SELECT {kept} FROM source.{table} WHERE {where}")
            return f"SELECT correlationId FROM main.{table}" if kept else "SELECT 0 WHERE 0"

        lasting = f"eventType IN (59, 60) AND end > 0 AND {begun}"
        copy(NVTX, "start end eventType text globalTid textId domainId", lasting)
        calls = f"SELECT correlationId FROM source.{RUNTIME} WHERE {begun}"
        work = [copy(table, WORK[table], "1" if range is None else f"correlationId IN ({calls})") for table in WORK]
        asked = f"{begun} AND correlationId IN ({' UNION '.join(work)})"
        copy(RUNTIME, "start end globalTid correlationId nameId", asked)
        used = []
        for table, column in ((KERNEL, "demangledName"), (KERNEL, "shortName"), (RUNTIME, "nameId"), (NVTX, "textId")):
            if any(column == found[1] for found in db.execute(f"PRAGMA main.table_info({table})")):
                used.append(f"SELECT {column} FROM main.{table}")
        for table, columns in NAMES.items():
            copy(table, columns, f"id IN ({' UNION '.join(used)})" if table == "StringIds" else "1")
        for table in VERSION_TABLES:
            copy(table, "name value", "name LIKE 'EXPORT_PRODUCT_%' OR name LIKE 'EXPORT_SCHEMA_VERSION%'")
        db.commit()
        db.execute("DETACH source")
        db.execute("VACUUM")
    return target


if __name__ == "__main__":
    print(trim_export(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:]))
