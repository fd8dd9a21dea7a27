"""Executes one notebook, says what it is doing, and checks, cell by cell, that it really ran."""

import json
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import nbformat
import yaml
from tqdm.auto import tqdm

from lmcore.errors import UserError
from lmcore.files import atomic_write
from lmcore.progress import SECONDS_BETWEEN_LINES
from lmcore.workbook.notebook import INJECTED, code_cells, execution_fault, heading_above, read_notebook, tags
from lmcore.workbook.record import NotebookRecord
from lmcore.workbook.stopping import Stopped, StopSignals

HEARTBEAT_SECONDS = 5.0
ERROR_MARKER = "papermill-error-cell-tag"

DURATIONS = Path("papermill_jobs") / "durations.yaml"
"""Of a project: the seconds of the longer cells at scale smoke, by notebook and cell id."""
OTHER_CELL_SECONDS, START_SECONDS = 0.05, 4.0
"""Of a cell that durations.yaml does not name, and from the start of a kernel to its first cell."""
TRUSTED_SECONDS = 5.0
"""The expected durations count as right until so much has been measured of this machine."""


def expected_seconds(source: Path, executed: Path, scale: str) -> tuple[dict[str, float], bool]:
    """Seconds of each code cell by its id, and whether that is known.

    Known are the times of an earlier execution, and at scale smoke those of durations.yaml.
    """
    ids = [cell.get("id", str(number)) for number, cell in code_cells(read_notebook(source))]
    with suppress(UserError, AttributeError, KeyError, TypeError):
        made = read_notebook(executed)
        taken = {cell.get("id"): cell.metadata.papermill.duration for _, cell in code_cells(made)}
        if made.metadata.papermill.parameters["scale"] == scale:
            return {id: float(taken[id]) for id in ids}, True
    table = {}
    with suppress(OSError, yaml.YAMLError):
        table = yaml.safe_load((source.parents[1] / DURATIONS).read_text(encoding="utf-8")).get(source.stem, {})
    return {id: table.get(id, OTHER_CELL_SECONDS) for id in ids}, bool(table) and scale == "smoke"


class WorkbookProgress:
    """Says which cell of which notebook runs, what goes on in it and how long all will take: a bar, or lines.

    A line every ten seconds where standard error is no terminal. `expected` has the seconds of each notebook's code
    cells by id; the time left is theirs (not shown if they are not `known`), scaled by what the cells so far have taken
    on this machine. `runs` is the folder of the runs that the cells train.
    """

    def __init__(self, expected: Mapping[str, Mapping[str, float]], known: bool, runs: Path | None = None):
        self.expected, self.known, self.runs = expected, known, runs
        self.totals = {name: START_SECONDS + sum(cells.values()) for name, cells in expected.items()}
        self.finished = 0.0  # expected seconds of what is done
        self.began = self.last_line = time.monotonic()
        self.bar = None
        if sys.stderr.isatty():
            self.bar = tqdm(total=100, desc="workbook", bar_format="{desc}: {percentage:3.0f}%|{bar:20}|{postfix}")
        self._begin(next(iter(expected)), 0, START_SECONDS)
        self.stop = threading.Event()
        self.heart = threading.Thread(target=self._beat, daemon=True)
        self.heart.start()

    def _beat(self) -> None:
        while not self.stop.wait(HEARTBEAT_SECONDS):
            self.show()

    def _begin(self, name: str, number: int, seconds: float) -> None:
        self.name, self.number, self.seconds, self.said = name, number, seconds, ""
        self.cell_began = time.monotonic()
        self.show()

    def begin_notebook(self, name: str) -> None:
        """The notebooks before `name` are done; its kernel starts."""
        names = list(self.totals)
        self.finished = sum(self.totals[other] for other in names[: names.index(name)])
        self._begin(name, 0, START_SECONDS)

    def begin_cell(self, cell: nbformat.NotebookNode) -> None:
        """A cell of the notebook starts."""
        if (id := cell.get("id")) in (cells := self.expected[self.name]):  # not papermill's own
            self.finished += self.seconds
            self._begin(self.name, [*cells].index(id) + 1, cells[id])

    def write(self, text: str) -> None:
        """Takes what the cell prints: the last line is shown."""
        self.said = next((line.strip() for line in reversed(text.splitlines()) if line.strip()), self.said)

    def flush(self) -> None:
        """A file has this, and papermill calls it."""

    def share(self, now: float) -> tuple[float, float]:
        """Which part of the notebooks is done, by the expected durations, and the seconds that the rest will take."""
        total = sum(self.totals.values())
        slowness = (self.cell_began - self.began + TRUSTED_SECONDS) / (self.finished + TRUSTED_SECONDS)
        done = min(self.finished + min((now - self.cell_began) / slowness, self.seconds), total)
        return done / total, (total - done) * (now - self.began + TRUSTED_SECONDS) / (done + TRUSTED_SECONDS)

    def line(self, now: float) -> str:
        """What is shown: time, notebook, cell and what goes on in it."""
        left = f", {in_words(self.share(now)[1])} left" if self.known else ""
        names, cells = list(self.expected), len(self.expected[self.name])
        place = f"notebook {names.index(self.name) + 1}/{len(names)} {self.name}, cell {self.number}/{cells}"
        doing = self.number and (going_on(self.runs, now - self.cell_began) or self.said)
        return f"{now - self.began:.0f} s{left}, {place}{f': {doing}' if doing else ''}"

    def show(self) -> None:
        """Draws the bar, or prints a line if the last one was ten seconds ago."""
        now = time.monotonic()
        if self.bar is not None:
            self.bar.set_postfix_str(self.line(now), refresh=False)
            self.bar.n = round(100 * self.share(now)[0])
            self.bar.refresh()
        elif now - self.last_line >= SECONDS_BETWEEN_LINES:
            self.last_line = now
            print(f"workbook: {self.line(now)}", flush=True)

    def close(self) -> None:
        """Ends the bar and the thread."""
        self.stop.set()
        self.heart.join()
        if self.bar is not None:
            self.bar.close()


def in_words(seconds: float) -> str:
    """About how long: 40 s, 3 min, 2.5 h."""
    if seconds < 100:
        return f"{max(5, 5 * round(seconds / 5))} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def going_on(runs: Path | None, seconds: float) -> str | None:
    """The training run (name, step, loss) or benchmark case below `runs` that wrote last in the last `seconds`."""
    with suppress(OSError, ValueError, KeyError, TypeError):  # files that come, go and are half written
        files = [*runs.rglob("metrics.jsonl"), *runs.rglob(".?*.lock")] if runs else []
        file = max(files, key=lambda path: path.stat().st_mtime)
        if file.stat().st_mtime < time.time() - seconds:
            return None
        if file.suffix == ".lock":  # of a case, held as long as it is measured
            return f"case {file.name[1:-5]}"
        last = json.loads(file.read_text(encoding="utf-8").splitlines()[-1])
        steps = json.loads((file.parent / "config.json").read_text(encoding="utf-8"))["steps"]
        return f"{file.parent.name}, step {last['step']:,}/{steps:,}, loss {last['train_loss']:.3f}"
    return None


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
    progress: WorkbookProgress | None = None,
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
        if progress:
            progress.begin_cell(cell)

    problem = None
    try:
        if progress:
            progress.begin_notebook(source.stem)
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
                stdout_file=progress,
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
