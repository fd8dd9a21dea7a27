"""Executes one notebook, says what it is doing, and checks, cell by cell, that it really ran."""

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import nbformat
import yaml
from tqdm.auto import tqdm

from lmcore.errors import UserError
from lmcore.files import atomic_write, temporary_folder
from lmcore.progress import SECONDS_BETWEEN_LINES
from lmcore.workbook.notebook import code_cells, execution_fault, heading_above, read_notebook
from lmcore.workbook.record import NotebookRecord, write_notebook_record
from lmcore.workbook.stopping import LAUNCHER, MARK, StopSignals

HEARTBEAT_SECONDS = 5.0

LONGEST_SOCKET = 90
"""Characters of a path that systems take for a socket, with some left for its number."""

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

    A line every ten seconds where standard error is not a terminal. `expected` has the seconds of each notebook's code
    cells by id; the time left is theirs (not shown if they are not `known`), scaled by what the cells so far have taken
    on this machine. `runs` is the folder of the runs that the cells train.
    """

    def __init__(self, expected: Mapping[str, Mapping[str, float]], known: bool, runs: Path | None = None):
        self.known, self.runs = known, runs
        self.steps = {  # cell None: the kernel starts
            (name, id): seconds
            for name, cells in expected.items()
            for id, seconds in {None: START_SECONDS, **cells}.items()
        }
        self.began = self.last_line = time.monotonic()
        self.bar = None
        if sys.stderr.isatty():
            self.bar = tqdm(total=100, desc="workbook", bar_format="{desc}: {percentage:3.0f}%|{bar:20}|{postfix}")
        self.begin(next(iter(expected)))
        self.stop = threading.Event()
        self.heart = threading.Thread(target=self._beat, daemon=True)
        self.heart.start()

    def _beat(self) -> None:
        while not self.stop.wait(HEARTBEAT_SECONDS):
            self.show()

    def begin(self, name: str, cell: str | None = None) -> None:
        """A notebook's kernel starts, or a cell by its id; what is before it is done."""
        if (name, cell) in self.steps:  # not papermill's own
            self.step, self.said, self.step_began = (name, cell), "", time.monotonic()
            self.show()

    def write(self, text: str) -> None:
        """Takes what the cell prints: the last line is shown."""
        self.said = next((line.strip() for line in reversed(text.splitlines()) if line.strip()), self.said)

    def flush(self) -> None:
        """A file has this, and papermill calls it."""

    def share(self, now: float) -> tuple[float, float]:
        """Which part of the notebooks is done, by the expected durations, and the seconds that the rest will take."""
        seconds, at = list(self.steps.values()), list(self.steps).index(self.step)
        total, finished = sum(seconds), sum(seconds[:at])
        slowness = (self.step_began - self.began + TRUSTED_SECONDS) / (finished + TRUSTED_SECONDS)
        done = finished + min((now - self.step_began) / slowness, seconds[at])
        return done / total, (total - done) * (now - self.began + TRUSTED_SECONDS) / (done + TRUSTED_SECONDS)

    def line(self, now: float) -> str:
        """What is shown: time, notebook, cell and what goes on in it."""
        left = f", {in_words(self.share(now)[1])} left" if self.known else ""
        names, cells = (
            list(dict.fromkeys(name for name, _ in self.steps)),
            [s for s in self.steps if s[0] == self.step[0]],
        )
        place = f"notebook {names.index(self.step[0]) + 1}/{len(names)} {self.step[0]}"
        number = cells.index(self.step)
        doing = number and (going_on(self.runs, now - self.step_began) or self.said)
        return f"{now - self.began:.0f} s{left}, {place}, cell {number}/{len(cells) - 1}{f': {doing}' if doing else ''}"

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
    with suppress(OSError, ValueError, LookupError, TypeError):  # files that come, go and are half written
        files = [*runs.rglob("metrics.jsonl"), *runs.rglob(".?*.lock")] if runs else []
        file = max(files, key=lambda path: path.stat().st_mtime)
        if file.stat().st_mtime < time.time() - seconds - 0.01:  # the clock of files ticks more coarsely
            return None
        if file.suffix == ".lock":  # of a case, held as long as it is measured
            return f"case {file.name[1:-5]}"
        last = json.loads(file.read_text(encoding="utf-8").splitlines()[-1])
        steps = json.loads((file.parent / "config.json").read_text(encoding="utf-8"))["steps"]
        return f"{file.parent.name}, step {last['step']:,}/{steps:,}, loss {last['train_loss']:.3f}"
    return None


def execute(source: Path, record: NotebookRecord, out: Path, progress: WorkbookProgress, stop: StopSignals) -> None:
    """Executes one notebook into out/notebooks with the record's parameters, and checks it.

    `record` says how it ended, and is on disk all the while. The executed notebook is saved before and after each cell,
    so that it also keeps a run that failed, was stopped or was killed.
    """
    from lmcore.provenance import environment, executing

    began, target = time.monotonic(), (out / "notebooks" / source.name).resolve()
    record.state, record.environment = "running", environment()
    record.job = os.environ.get("SLURM_JOB_ID") or os.environ.get("LMCORE_JOB_ID")
    write_notebook_record(out, record)
    target.unlink(missing_ok=True)  # what an earlier run has left says nothing of this one
    progress.begin(source.stem)
    try:
        with stop.watching(), executing(source.stem, record.parameters or {}):
            problem = _run(source, target, record.parameters or {}, progress, stop)
        record.seconds = round(time.monotonic() - began, 1)
        _judge(record, read_notebook(target), problem, stop)
    except BaseException:  # a full disk
        record.state = "stopped"
        with suppress(UserError):
            write_notebook_record(out, record)
        raise
    write_notebook_record(out, record)


def _run(
    source: Path, target: Path, parameters: Mapping[str, Any], progress: WorkbookProgress, stop: StopSignals
) -> str | None:
    """papermill's execution of a notebook; returns why it ended early, if papermill says so."""
    import papermill
    from papermill.exceptions import PapermillException
    from papermill.iorw import LocalHandler, papermill_io

    class WholeOrNot(LocalHandler):
        """Writes the executed notebook so that it is never half there: this process may be killed."""

        def write(self, text: str, path: str) -> None:
            with atomic_write(path, "w") as file:
                file.write(text)

    def begin_cell(cell: nbformat.NotebookNode, cell_index: int) -> None:
        if stop.requested is not None:
            raise InterruptedError
        progress.begin(source.stem, cell.get("id"))

    papermill_io.register(str(target), WholeOrNot())
    try:
        with _kernel({MARK: stop.mark}) as manager:
            papermill.execute_notebook(
                source,
                target,
                dict(parameters),
                kernel_name="python3",
                kernel_manager_class=manager,
                language="python",
                cwd=source.parent,
                progress_bar=False,
                coalesce_streams=True,  # what a cell prints reaches the writeup in one piece
                stdout_file=progress,
                on_cell_execute=begin_cell,
            )
    except UserError:  # the executed notebook cannot be written
        raise
    except Exception as error:
        # RuntimeError: the kernel died, or never answered
        if stop.requested is None and not isinstance(error, PapermillException | RuntimeError):
            raise
        return (str(error).splitlines() or [type(error).__name__])[0]
    return None


@contextlib.contextmanager
def _kernel(variables: Mapping[str, str]) -> Iterator[type]:
    """Makes the notebook's kernel this very interpreter, with these variables, whatever kernels are installed."""
    from jupyter_client.kernelspec import KernelSpec
    from jupyter_client.manager import AsyncKernelManager

    with temporary_folder("lmcore-kernel-") as folder:
        environment = {
            "IPYTHONDIR": str(folder),  # and no profile of the user's
            "JUPYTER_RUNTIME_DIR": str(folder),
            # a cluster's MPLBACKEND=Agg would make every figure vanish from the notebook
            "MPLBACKEND": "module://matplotlib_inline.backend_inline",
            "PYDEVD_DISABLE_FILE_VALIDATION": "1",
            **variables,
        }
        command = [sys.executable, "-m", LAUNCHER, "-f", "{connection_file}", "--log-level=ERROR"]
        spec = KernelSpec(argv=command, display_name="Python 3", language="python", env=environment)
        members: dict[str, Any] = {"kernel_spec": spec}
        sockets = str(folder / "k")
        if sys.platform != "win32" and len(sockets) < LONGEST_SOCKET:
            # ports may be taken between choosing and binding them, by the kernel of a job beside this one
            members |= {"_transport_default": lambda _: "ipc", "_ip_default": lambda _: sockets}
        yield type("Kernel", (AsyncKernelManager,), members)


def _judge(record: NotebookRecord, executed: nbformat.NotebookNode, problem: str | None, stop: StopSignals) -> None:
    """Completes the record of an execution that ended: done, failed or stopped, and where."""
    fault = execution_fault(executed)
    if fault is None and problem is None:
        record.state = "done"
        return
    if problem is not None and (fault is None or fault[1] == "the cell was not run"):
        # the kernel is gone: no cell has an error, and the one that ran has a number as if it had ended
        begun = (n for n, cell in code_cells(executed) if cell.metadata.get("papermill", {}).get("start_time"))
        fault = max(begun, default=None), problem
    record.cell, error = fault
    record.heading = heading_above(executed, record.cell) if record.cell else None
    record.state, record.error = "failed", error.rstrip(".")
    if stop.requested is not None:
        record.state, record.error = "stopped", stop.requested.name
