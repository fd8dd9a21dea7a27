"""Cuts an export of Nsight Systems down to what the analysis reads, as the one in tests/data.

python tests/trim_export.py SOURCE TARGET [RANGE]
"""

import sqlite3
import sys
from contextlib import closing
from pathlib import Path

from lmcore.errors import require
from lmcore.profiling.nsys.export import GRAPH, KERNEL, MEMCPY, MEMSET, NVTX, RUNTIME, VERSION_TABLES, open_export

WORK = {
    KERNEL: "start end deviceId streamId correlationId globalPid demangledName shortName graphNodeId",
    GRAPH: "start end deviceId streamId correlationId globalPid graphId graphExecId",
    MEMCPY: "start end deviceId streamId correlationId globalPid bytes copyKind",
    MEMSET: "start end deviceId streamId correlationId globalPid bytes",
}
CALLS = {RUNTIME: "start end globalTid correlationId nameId"}
RANGES = {NVTX: "start end eventType text globalTid textId domainId"}
NAMES = {"StringIds": "id value", "ENUM_CUDA_MEMCPY_OPER": "id name label", "TARGET_INFO_GPU": "id name"}
VERSIONS = dict.fromkeys(VERSION_TABLES, "name value")
"""What is kept of each table. Everything else goes: environment variables, processes, threads, call chains, paths."""

STRINGS = {KERNEL: ("demangledName", "shortName"), RUNTIME: ("nameId",), NVTX: ("textId",)}


def trim_export(source: Path, target: Path, range: str | None = None) -> Path:
    """Writes a small export with the same trace: kernels, graphs, copies, their runtime calls, ranges, the GPU's name.

    With `range` only what was launched inside the first range of this name is kept. Raises `UserError` for a source
    that is no export, a target that exists, and an unknown name.
    """
    require(not target.exists(), f"{target} exists; name a new file.")
    with open_export(source) as export:
        columns = export.columns
    with closing(sqlite3.connect(target, uri=True)) as db:
        db.execute("ATTACH ? AS source", (f"{source.resolve().as_uri()}?mode=ro",))

        def copy(tables: dict[str, str], where: str) -> list[str]:
            there = [name for name in tables if name in columns]
            for name in there:
                kept = ", ".join(column for column in tables[name].split() if column in columns[name])
                db.execute(f"CREATE TABLE {name} AS SELECT {kept} FROM source.{name} WHERE {where}")
            return there

        copy({"StringIds": NAMES["StringIds"]}, "1")
        copy(RANGES, "eventType IN (59, 60) AND end IS NOT NULL")
        if range is not None:
            text = "COALESCE(text, (SELECT value FROM StringIds WHERE id = textId))"
            first = db.execute(f"SELECT start, end FROM {NVTX} WHERE {text} = ? ORDER BY start", (range,)).fetchone()
            require(first is not None, f"{source} has no range {range}.")
            db.execute(f"DELETE FROM {NVTX} WHERE start NOT BETWEEN ? AND ?", first)
        begun = "1" if range is None else f"start BETWEEN {first[0]} AND {first[1]}"
        calls = f"SELECT correlationId FROM source.{RUNTIME} WHERE {begun}"
        work = copy(WORK, "1" if range is None else f"correlationId IN ({calls})")
        asked = " UNION ".join(f"SELECT correlationId FROM {name}" for name in work)
        copy(CALLS, f"{begun} AND correlationId IN ({asked or 'SELECT 0 WHERE 0'})")
        names = [(table, name) for table in STRINGS for name in STRINGS[table] if name in columns.get(table, ())]
        used = " UNION ".join(f"SELECT {name} FROM main.{table} WHERE {name} IS NOT NULL" for table, name in names)
        db.execute(f"DELETE FROM main.StringIds WHERE id NOT IN ({used})")
        copy({name: NAMES[name] for name in NAMES if name != "StringIds"}, "1")
        copy(VERSIONS, "name LIKE 'EXPORT_PRODUCT_%' OR name LIKE 'EXPORT_SCHEMA_VERSION%'")
        db.commit()
        db.execute("DETACH source")
        db.execute("VACUUM")
    return target


if __name__ == "__main__":
    print(trim_export(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:]))
