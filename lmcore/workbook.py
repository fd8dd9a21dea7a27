"""Executes the notebooks in order, without a browser, checks that they really ran, and makes the writeup."""

import dataclasses
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from lmcore.config import require
from lmcore.errors import UserError
from lmcore.files import write_json
from lmcore.notebook import clean, code_cells, execution_fault, heading_above, read_notebook, write_notebook
from lmcore.parameters import find_notebooks, find_project, resolve_parameters
from lmcore.progress import Progress

KERNEL = "lmcore-workbook"
RECORD = "workbook.json"
HEARTBEAT_SECONDS = 5.0


@dataclass
class Outcome:
    """What became of one notebook."""

    name: str
    state: str = "not run"
    """not run, running, done or failed."""
    seconds: float = 0.0
    cell: int | None = None
    """Code cell that failed, from 1."""
    heading: str | None = None
    """The heading under which it stands."""
    error: str | None = None

    @property
    def sentence(self) -> str:
        """The failure in words."""
        where = f" (under “{self.heading}”)" if self.heading else ""
        return f"Notebook {self.name} failed at code cell {self.cell}{where}: {self.error}."


@dataclass
class WorkbookResult:
    """Where everything is, and whether every notebook ran."""

    out: Path
    html: Path
    pdf: Path
    outcomes: list[Outcome]

    @property
    def failure(self) -> str | None:
        """The first failure in words, or None."""
        return next((outcome.sentence for outcome in self.outcomes if outcome.state == "failed"), None)


@contextmanager
def private_kernel() -> Iterator[str]:
    """Name of a Jupyter kernel that is this very interpreter, whatever kernels and profiles are installed."""
    with tempfile.TemporaryDirectory(prefix="lmcore-kernel-") as folder:
        spec = Path(folder) / "kernels" / KERNEL
        spec.mkdir(parents=True)
        environment = {
            "IPYTHONDIR": str(Path(folder) / "ipython"),
            # a cluster's MPLBACKEND=Agg would make every figure vanish from the notebook
            "MPLBACKEND": "module://matplotlib_inline.backend_inline",
            "PYDEVD_DISABLE_FILE_VALIDATION": "1",
        }
        argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}", "--log-level=ERROR"]
        kernel = {"argv": argv, "display_name": KERNEL, "language": "python", "env": environment}
        (spec / "kernel.json").write_text(json.dumps(kernel), encoding="utf-8")
        changes = {
            "JUPYTER_PATH": os.pathsep.join(filter(None, [folder, os.environ.get("JUPYTER_PATH")])),
            "JUPYTER_RUNTIME_DIR": str(Path(folder) / "runtime"),
        }
        before = {key: os.environ.get(key) for key in changes}
        os.environ.update(changes)
        try:
            yield KERNEL
        finally:
            for key, value in before.items():
                os.environ.pop(key) if value is None else os.environ.update({key: value})


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
            started += "injected-parameters" not in cell.metadata.get("tags", [])
            self.done = before + max(started - 1, 0)
            self.note = f"notebook {names.index(name) + 1}/{len(names)} {name}, cell {started}/{self.counts[name]}"
            self.progress.update(self.done, self.note)

        return on_cell_execute

    def close(self) -> None:
        """Ends the bar and the thread."""
        self.stop.set()
        self.heart.join()
        self.progress.close()


def execute(
    source: Path, target: Path, parameters: Mapping[str, Any], kernel: str, on_cell_execute: Any = None
) -> Outcome:
    """Executes one notebook into `target`, which also keeps a run that failed, and checks it cell by cell."""
    import papermill
    from papermill.exceptions import PapermillException

    outcome, began = Outcome(source.stem, "running"), time.monotonic()
    target.parent.mkdir(parents=True, exist_ok=True)
    fallback = None
    try:
        hooks = {"on_cell_execute": on_cell_execute} if on_cell_execute else {}
        papermill.execute_notebook(
            source,
            target,
            dict(parameters),
            kernel_name=kernel,
            language="python",
            cwd=source.parent,
            progress_bar=False,
            coalesce_streams=True,  # what a cell prints reaches the writeup in one piece
            **hooks,
        )
    except (PapermillException, RuntimeError) as error:  # RuntimeError: the kernel died, or never answered
        fallback = str(error).splitlines()[0] if str(error) else type(error).__name__
    outcome.seconds = round(time.monotonic() - began, 1)
    executed = read_notebook(target)
    fault = execution_fault(executed)
    outcome.state = "done" if fault is None and fallback is None else "failed"
    if outcome.state == "failed":
        outcome.cell, outcome.error = fault or (sum(1 for _ in code_cells(executed)), fallback)
        if fault is not None and fault[1] == "the cell was not run" and fallback is not None:
            outcome.error = fallback
        outcome.error = outcome.error.rstrip(".")
        outcome.heading = heading_above(executed, outcome.cell)
    return outcome


def run_workbook(
    scale: str = "smoke",
    data: str = "embedded",
    out: str | os.PathLike | None = None,
    notebooks: Sequence[str] | None = None,
    parameters: Mapping[str, Any] | None = None,
    project: str | os.PathLike | None = None,
) -> WorkbookResult:
    """Executes the notebooks at `scale` into `out` (default runs/<scale>) and renders the writeup.

    `data` is "embedded", a corpus to download, or a path; `notebooks` picks some by name; `parameters` overrides
    notebook parameters by name.
    Executed notebooks go to out/notebooks, the answers to out/writeup. The first notebook that fails ends the run, as
    the later ones build on it; the writeup is made all the same and says so: see `WorkbookResult.failure`.

    Raises `UserError`, before anything runs, on unknown scales, notebooks or parameters, data that is not there, or a
    folder that another process uses.
    """
    project = Path(project) if project is not None else find_project()
    out = Path(out) if out is not None else project / "runs" / scale
    paths = find_notebooks(project, notebooks)
    common = {"scale": scale, "data": locate(data), "out": str(out.resolve())}
    resolved = resolve_parameters(project, paths, scale, parameters or {}, common)
    with folder_lock(out), terminate_as_interrupt():
        record = {"scale": scale, "data": data, "parameters": resolved}
        outcomes = run_all(paths, resolved, out, record)
        return render(out, outcomes)


def locate(data: str) -> str:
    """`data` as the notebooks need it: a name as it is, a path in full. Raises `UserError` if it is neither."""
    from lmcore.data.downloads import SOURCES

    names = ("embedded", *SOURCES)
    require(
        data in names or Path(data).exists(),
        f"There is no file or folder {data}; name one, or one of the corpora {', '.join(names)}.",
    )
    return data if data in names else str(Path(data).resolve())


def run_all(
    paths: Sequence[Path], parameters: Mapping[str, Mapping[str, Any]], out: Path, record: dict[str, Any]
) -> list[Outcome]:
    """Executes the notebooks until one fails, and keeps the record in out/workbook.json up to date."""
    from lmcore.provenance import environment

    outcomes = [Outcome(path.stem) for path in paths]
    record["environment"] = environment()

    def save() -> None:
        write_json(out / RECORD, record | {"notebooks": [dataclasses.asdict(outcome) for outcome in outcomes]})

    save()
    progress = CellProgress(paths)
    try:
        with private_kernel() as kernel:
            for index, path in enumerate(paths):
                outcomes[index].state = "running"
                save()
                target = out / "notebooks" / path.name
                outcomes[index] = execute(path, target, parameters[path.stem], kernel, progress.hook(path.stem))
                save()
                print(f"{path.stem}: {outcomes[index].state} after {outcomes[index].seconds:.0f} s", flush=True)
                if outcomes[index].state == "failed":
                    break
    finally:
        progress.close()
    return outcomes


def render(out: Path, outcomes: list[Outcome]) -> WorkbookResult:
    """Makes the writeup of an executed workbook."""
    from lmcore.report.writeup import write_writeup

    html, pdf = write_writeup(out)
    return WorkbookResult(out, html, pdf, outcomes)


@contextmanager
def folder_lock(out: Path) -> Iterator[None]:
    """Holds the output folder for this process. Raises `UserError` if another does, or it cannot be written."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = FileLock(out / ".workbook.lock")
        lock.acquire(timeout=0)
    except Timeout:
        raise UserError(f"Another process is running a workbook in {out}; wait for it or choose another OUT.") from None
    except OSError as error:
        raise UserError(f"The folder {out} cannot be written to ({error.strerror}).") from error
    try:
        yield
    finally:
        lock.release()


@contextmanager
def terminate_as_interrupt() -> Iterator[None]:
    """SIGTERM, as a batch system sends it, ends the run like Ctrl-C: kernels are shut down, the record stays."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def refresh(project: str | os.PathLike | None = None, notebooks: Sequence[str] | None = None) -> list[Path]:
    """Executes the notebooks at their defaults and rewrites the committed outputs: those of cells tagged keep_output.

    A notebook that fails is left as it was. Returns the files that changed. Raises `UserError` naming the failure.
    """
    paths = find_notebooks(Path(project) if project is not None else find_project(), notebooks)
    changed = []
    with tempfile.TemporaryDirectory(prefix="lmcore-refresh-") as folder, private_kernel() as kernel:
        progress = CellProgress(paths)
        try:
            for path in paths:
                target = Path(folder) / path.name
                outcome = execute(path, target, {}, kernel, progress.hook(path.stem))
                require(outcome.state == "done", outcome.sentence)
                before = path.read_bytes()
                write_notebook(path, clean(read_notebook(path), read_notebook(target)))
                changed += [path] if path.read_bytes() != before else []
        finally:
            progress.close()
    return changed
