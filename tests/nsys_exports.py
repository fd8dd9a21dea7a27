"""Exports of Nsight Systems for tests: real ones of other people's programs, and small ones that are made here."""

import os
import sqlite3
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from lmcore.profiling.nsys.export import GRAPH, KERNEL, MEMCPY, MEMSET, NVTX, RUNTIME

FORWARD_BACKWARD = "train_fwd_bwd_rtx3070ti_nsys2025.1.3.sqlite"
DUPLICATED = "saxpy_duplicate_correlation_a100.sqlite"
WHOLE_GRAPHS = "cudagraph_modegraph_a100_nsys2024.6.2.sqlite"
H200 = Path(__file__).parent / "data" / "h200_two_layers_nsys2025.3.sqlite"
"""Of our own: two layers, two inference passes and two training steps, trimmed by trim_export.py."""

PROCESS = 7 << 24
MAIN, AUTOGRAD = PROCESS | 1, PROCESS | 2


def sample(name: str) -> Path:
    """A real export; the test is skipped where there is none."""
    here = Path(__file__).parents[2] / "shared" / "nsys_samples"
    path = Path(os.environ.get("LMCORE_TEST_NSYS", here)) / name
    if not path.is_file():
        pytest.skip(f"no real export {name} here: set LMCORE_TEST_NSYS to its folder")
    return path


def rows(path: Path, sql: str) -> list[tuple]:
    """Rows of a query on an export."""
    with closing(sqlite3.connect(path)) as connection:
        connection.text_factory = lambda text: text.decode(errors="replace")
        return connection.execute(sql).fetchall()


COLUMNS = {
    KERNEL: "start end deviceId streamId correlationId globalPid demangledName graphNodeId",
    GRAPH: "start end deviceId streamId correlationId globalPid graphId graphExecId",
    RUNTIME: "start end globalTid correlationId nameId",
    MEMCPY: "start end deviceId streamId correlationId globalPid bytes copyKind",
    MEMSET: "start end deviceId streamId correlationId globalPid bytes",
    NVTX: "start end eventType text globalTid textId",
    "StringIds": "id value",
    "META_DATA_EXPORT": "name value",
    "TARGET_INFO_SYSTEM_ENV": "name value",
}


class SmallExport:
    """Collects rows and writes them as an export; tables without rows are not made, as nsys does."""

    def __init__(self):
        self.tables: dict[str, list[Sequence]] = {name: [] for name in COLUMNS}
        self.tables["META_DATA_EXPORT"] = [("EXPORT_PRODUCT_VERSION", "2025.3.1.90")]
        self.strings: dict[str, int] = {"cudaLaunchKernel": 1}

    def string(self, text: str) -> int:
        return self.strings.setdefault(text, len(self.strings) + 1)

    def add(self, table: str, *row) -> None:
        self.tables[table].append(row)

    def call(self, correlation: int, at: int, thread: int = MAIN) -> None:
        self.add(RUNTIME, at, at + 1, thread, correlation, 1)

    def kernel(
        self, correlation: int, start: int, end: int, name: str = "gemm", process: int = PROCESS, node=None, stream=7
    ) -> None:
        row = (start, end, 0, stream, correlation, process, self.string(name), node)
        self.add(KERNEL, *row)

    def launch(self, correlation: int, at: int, start: int, end: int, name: str = "gemm", thread: int = MAIN) -> None:
        """A kernel and its one runtime call."""
        self.call(correlation, at, thread)
        self.kernel(correlation, start, end, name, thread & ~0xFFFFFF)

    def range(self, name: str, start: int, end: int | None, thread: int = MAIN, registered: bool = False) -> None:
        text, text_id = (None, self.string(name)) if registered else (name, None)
        self.add(NVTX, start, end, 59, text, thread, text_id)

    def write(self, path: Path) -> Path:
        path.unlink(missing_ok=True)
        self.tables["StringIds"] = [(number, text) for text, number in self.strings.items()]
        with closing(sqlite3.connect(path)) as connection:
            for name, found in self.tables.items():
                if found:
                    write_table(connection, name, COLUMNS[name].split(), found)
            connection.commit()
        return path


def write_table(connection: sqlite3.Connection, name: str, columns: Sequence[str], found: Iterable[Sequence]) -> None:
    connection.execute(f"CREATE TABLE {name} ({', '.join(columns)})")
    connection.executemany(f"INSERT INTO {name} VALUES ({', '.join('?' * len(columns))})", found)


def write_large_export(path: Path) -> Path:
    """100 steps of two halves: a million CUDA calls, four in five of which launch one of 200 kernels of 8 ns.

    Call i is at 10 i ns; steps take 100,000 ns; the kernels' names have 300 characters.
    """
    with closing(sqlite3.connect(SmallExport().write(path))) as connection:
        for table in (KERNEL, RUNTIME, NVTX):
            write_table(connection, table, COLUMNS[table].split(), ())
        count = "WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n LIMIT {})"
        names = f"SELECT i + 2, 'kernel_' || i || '<{'x' * 290}>()' FROM n"
        calls = f"SELECT 10 * i, 10 * i + 5, CASE i % 2 WHEN 0 THEN {MAIN} ELSE {AUTOGRAD} END, i, 1 FROM n"
        kernels = f"""SELECT 10 * c + 4, 10 * c + 12, 0, 7, c, {PROCESS}, 2 + i % 200, NULL
                      FROM (SELECT i, i + i / 4 AS c FROM n)"""
        for table, rows_made, sql in (
            ("StringIds", 200, names),
            (RUNTIME, 1_000_000, calls),
            (KERNEL, 800_000, kernels),
        ):
            connection.execute(f"INSERT INTO {table} {count.format(rows_made)} {sql}")
        for name, begin, end in (("step", 0, 99_990), ("half", 1, 50_000)):
            ranges = [(100_000 * i + begin, 100_000 * i + end, 59, name, MAIN, None) for i in range(100)]
            connection.executemany(f"INSERT INTO {NVTX} VALUES (?, ?, ?, ?, ?, ?)", ranges)
        connection.commit()
    return path
