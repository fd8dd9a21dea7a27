"""Exports of Nsight Systems for tests: a real one, and small ones that are made here."""

import sqlite3
from contextlib import closing
from pathlib import Path

from lmcore.profiling.nsys.export import DEVICES, GRAPH, KERNEL, MEMCPY, MEMSET, NVTX, RUNTIME

H200 = Path(__file__).parent / "data" / "h200_two_layers_nsys2025.3.sqlite"
"""Two layers, two inference passes and two training steps, without what names a machine."""

PROCESS = 7 << 24
MAIN, AUTOGRAD = PROCESS | 1, PROCESS | 2


def rows(path: Path, *statements: str) -> list[tuple]:
    """Executes statements on an export; the rows of the last one."""
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.text_factory = lambda text: text.decode(errors="replace")
        return [connection.execute(sql).fetchall() for sql in statements][-1]


COLUMNS = {
    KERNEL: "start end streamId correlationId globalPid demangledName graphNodeId deviceId",
    GRAPH: "start end streamId correlationId globalPid graphId deviceId",
    RUNTIME: "start end globalTid correlationId nameId",
    MEMCPY: "start end correlationId globalPid bytes copyKind deviceId",
    MEMSET: "start end correlationId globalPid bytes deviceId",
    NVTX: "start end eventType text globalTid textId",
    "StringIds": "id value",
    "META_DATA_EXPORT": "name value",
    DEVICES: "gpuId cudaId pid",
}


class SmallExport:
    """Collects rows and writes them as an export; tables without rows are not made, as nsys does.

    A row may lack its last columns, which are then 0: work is of device 0.
    """

    def __init__(self):
        self.tables: dict[str, list[tuple]] = {name: [] for name in COLUMNS}
        self.add("META_DATA_EXPORT", "EXPORT_PRODUCT_VERSION", "2025.3.1.90")
        self.add("StringIds", 1, "cudaLaunchKernel")

    def add(self, table: str, *row) -> None:
        self.tables[table].append(row)

    def string(self, text: str) -> int:
        self.add("StringIds", len(self.tables["StringIds"]) + 1, text)
        return len(self.tables["StringIds"])

    def call(self, correlation: int, at: int, thread: int = MAIN) -> None:
        self.add(RUNTIME, at, at + 1, thread, correlation, 1)

    def kernel(
        self, correlation: int, start: int, end: int, name="gemm", process=PROCESS, node=None, stream=7, device=0
    ) -> None:
        self.add(KERNEL, start, end, stream, correlation, process, self.string(name), node, device)

    def launch(self, correlation: int, at: int, start: int, end: int, name="gemm", thread=MAIN, device=0) -> None:
        """A kernel and its one runtime call."""
        self.call(correlation, at, thread)
        self.kernel(correlation, start, end, name, thread & ~0xFFFFFF, device=device)

    def range(self, name: str, start: int, end: int | None, thread: int = MAIN, registered: bool = False) -> None:
        self.add(NVTX, start, end, 59, *((None, thread, self.string(name)) if registered else (name, thread, None)))

    def write(self, path: Path) -> Path:
        path.unlink(missing_ok=True)
        with closing(sqlite3.connect(path)) as connection, connection:
            for name, found in self.tables.items():
                if found:
                    columns = COLUMNS[name].split()
                    connection.execute(f"CREATE TABLE {name} ({', '.join(columns)})")
                    whole = ((*row, *[0] * (len(columns) - len(row))) for row in found)
                    connection.executemany(f"INSERT INTO {name} VALUES ({', '.join('?' * len(columns))})", whole)
        return path
