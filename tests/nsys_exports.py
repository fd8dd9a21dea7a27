"""Exports of Nsight Systems for tests: real ones of other people's programs, and small ones that are made here."""

import os
import sqlite3
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path

import pytest

FORWARD_BACKWARD = "train_fwd_bwd_rtx3070ti_nsys2025.1.3.sqlite"
DUPLICATED = "saxpy_duplicate_correlation_a100.sqlite"
WHOLE_GRAPHS = "cudagraph_modegraph_a100_nsys2024.6.2.sqlite"

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
    "CUPTI_ACTIVITY_KIND_KERNEL": "start end deviceId streamId correlationId globalPid demangledName graphNodeId",
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": "start end deviceId streamId correlationId globalPid graphId graphExecId",
    "CUPTI_ACTIVITY_KIND_RUNTIME": "start end globalTid correlationId nameId",
    "CUPTI_ACTIVITY_KIND_MEMCPY": "start end deviceId streamId correlationId globalPid bytes copyKind",
    "CUPTI_ACTIVITY_KIND_MEMSET": "start end deviceId streamId correlationId globalPid bytes",
    "NVTX_EVENTS": "start end eventType text globalTid textId",
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
        self.add("CUPTI_ACTIVITY_KIND_RUNTIME", at, at + 1, thread, correlation, 1)

    def kernel(
        self, correlation: int, start: int, end: int, name: str = "gemm", process: int = PROCESS, node=None, stream=7
    ) -> None:
        row = (start, end, 0, stream, correlation, process, self.string(name), node)
        self.add("CUPTI_ACTIVITY_KIND_KERNEL", *row)

    def launch(self, correlation: int, at: int, start: int, end: int, name: str = "gemm", thread: int = MAIN) -> None:
        """A kernel and its one runtime call."""
        self.call(correlation, at, thread)
        self.kernel(correlation, start, end, name, thread & ~0xFFFFFF)

    def range(self, name: str, start: int, end: int | None, thread: int = MAIN, registered: bool = False) -> None:
        text, text_id = (None, self.string(name)) if registered else (name, None)
        self.add("NVTX_EVENTS", start, end, 59, text, thread, text_id)

    def write(self, path: Path) -> Path:
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
