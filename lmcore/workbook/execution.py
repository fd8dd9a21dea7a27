"""Executes one notebook and checks, cell by cell, that it really ran."""

import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import nbformat

from lmcore.errors import UserError
from lmcore.files import atomic_write
from lmcore.progress import Progress
from lmcore.workbook.notebook import INJECTED, code_cells, execution_fault, heading_above, read_notebook, tags
from lmcore.workbook.record import NotebookRecord
from lmcore.workbook.stopping import Stopped, StopSignals

HEARTBEAT_SECONDS = 5.0
ERROR_MARKER = "papermill-error-cell-tag"


class CellProgress:
    """Progress over the code cells of several notebooks, told also while a long cell runs."""

    def __init__(self, notebooks: Sequence[Path]):
        self.counts = {path.stem: sum(1 for _ in code_cells(read_notebook(path))) for path in notebooks}
        self.progress = Progress(sum(self.counts.values()), "workbook", "cell")
        self.done, self.note, self.stop = 0, "", threading.Event()
        self.heart = threading.Thread(target=self._beat, daemon=True)
        self.heart.start()

    def _beat(self) -> None:
        while not self.stop.wait(HEARTBEAT_SECONDS):
            self.progress.update(self.done, self.note)

    def hook(self, name: str) -> Any:
        """A function for nbclient to call as each cell of notebook `name` starts."""
        names = list(self.counts)
        before = sum(self.counts[other] for other in names[: names.index(name)])
        started = 0

        def on_cell_execute(cell: Any, cell_index: int) -> None:
            nonlocal started
            started += INJECTED not in tags(cell)
            self.done = before + max(started - 1, 0)
            self.note = f"notebook {names.index(name) + 1}/{len(names)} {name}, cell {started}/{self.counts[name]}"
            self.progress.update(self.done, self.note)

        return on_cell_execute

    def close(self) -> None:
        """Ends the bar and the thread."""
        self.stop.set()
        self.heart.join()
        self.progress.close()


class AtomicNotebooks:
    """How papermill reads and writes executed notebooks: whole or not at all, as the process may be killed."""

    def read(self, path: str) -> str:
        """The text of a notebook."""
        return Path(path).read_text(encoding="utf-8")

    def write(self, text: str, path: str) -> None:
        """Replaces a notebook."""
        with atomic_write(path, "w") as file:
            file.write(text)

    def listdir(self, path: str) -> list[str]:
        """The files of a folder."""
        return [str(file) for file in Path(path).iterdir()]

    def pretty_path(self, path: str) -> str:
        """The path as it is shown."""
        return path


def execute(
    source: Path,
    target: Path,
    parameters: Mapping[str, Any],
    kernel: str,
    on_cell_execute: Any = None,
    stop: StopSignals | None = None,
) -> NotebookRecord:
    """Executes one notebook into `target` and checks it; the kernel's processes must carry the mark of `stop`.

    `target` is saved before and after each cell, so that it also keeps a run that failed, was stopped or was killed.
    """
    import papermill
    from papermill.exceptions import PapermillException
    from papermill.iorw import papermill_io

    from lmcore.provenance import executing

    record, began, target = NotebookRecord(source.stem, "running"), time.monotonic(), target.resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    papermill_io.register(str(target), AtomicNotebooks())
    stop = stop or StopSignals()
    running = None  # index of the cell that was begun last

    def begin_cell(cell: Any, cell_index: int) -> None:
        nonlocal running
        running = cell_index
        stop.require_go_on()
        if on_cell_execute:
            on_cell_execute(cell=cell, cell_index=cell_index)

    problem = None
    try:
        with stop.watching(), executing(source.stem, parameters):
            papermill.execute_notebook(
                source,
                target,
                dict(parameters),
                kernel_name=kernel,
                language="python",
                cwd=source.parent,
                progress_bar=False,
                coalesce_streams=True,  # what a cell prints reaches the writeup in one piece
                on_cell_execute=begin_cell,
            )
    except (PapermillException, RuntimeError, Stopped) as error:  # RuntimeError: the kernel died, or never answered
        problem = str(error).splitlines()[0] if str(error) else type(error).__name__
    except UserError:  # the executed notebook cannot be written
        raise
    except Exception as error:
        if stop.requested is None:
            raise
        problem = str(error)
    record.seconds = round(time.monotonic() - began, 1)
    return judge(record, read_notebook(target), running, problem, stop)


def judge(
    record: NotebookRecord, executed: nbformat.NotebookNode, running: int | None, problem: str | None, stop: StopSignals
) -> NotebookRecord:
    """Completes the record of an execution that ended: done, failed or stopped, and where."""
    fault = execution_fault(executed)
    if fault is None and problem is None:
        record.state = "done"
        return record
    record.state = "failed" if stop.requested is None else "stopped"
    cell, error = fault or (None, problem)
    if fault is None or (fault[1] == "the cell was not run" and problem is not None):
        # the kernel is gone: no cell has an error, and the one that ran has a number as if it had ended
        cell, error = number_of(executed, running), problem
    record.cell = cell
    record.error = error.rstrip(".") if stop.requested is None else stop.requested.name
    record.heading = None if cell is None else heading_above(executed, cell)
    return record


def number_of(executed: nbformat.NotebookNode, index: int | None) -> int | None:
    """Number, from 1, of the code cell at this index, where papermill's own parameters belong to the first one."""
    if index is None:
        return None
    cells = [cell for cell in executed.cells if ERROR_MARKER not in tags(cell)][: index + 1]
    return sum(cell.cell_type == "code" and INJECTED not in tags(cell) for cell in cells)
