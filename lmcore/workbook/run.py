"""Runs the workbook: executes the notebooks in order, keeps their records, and makes the writeup."""

import contextlib
import math
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmcore.errors import UserError, require
from lmcore.workbook.execution import WorkbookProgress, execute, expected_seconds
from lmcore.workbook.kernel import private_kernel
from lmcore.workbook.notebook import clean, damage, read_notebook, write_notebook
from lmcore.workbook.parameters import find_notebooks, find_project, locate, resolve_parameters
from lmcore.workbook.record import (
    NotebookRecord,
    as_json,
    holding,
    read_notebook_record,
    source_hash,
    update_plan,
    write_notebook_record,
)
from lmcore.workbook.stopping import MARK, STOP_SECONDS, StopSignals


@dataclass
class WorkbookResult:
    """Where everything is, and whether every notebook ran."""

    out: Path
    html: Path | None
    """The writeup; None if none was asked for, or the run was stopped."""
    pdf: Path | None
    outcomes: list[NotebookRecord]
    """Of the notebooks that were asked for, in order."""
    stopped: str | None = None
    """By which signal the run was stopped, and where, in words; None if it ended by itself."""

    @property
    def failure(self) -> str | None:
        """The first failure in words, or None."""
        return next((outcome.sentence for outcome in self.outcomes if outcome.state == "failed"), None)


def run_workbook(
    scale: str = "smoke",
    data: str = "embedded",
    out: str | os.PathLike | None = None,
    notebooks: Sequence[str] | None = None,
    parameters: Mapping[str, Any] | None = None,
    project: str | os.PathLike | None = None,
    resume: bool = False,
    writeup: bool = True,
    stop_seconds: float = STOP_SECONDS,
) -> WorkbookResult:
    """Executes the notebooks at `scale` into `out` (default runs/<scale>) and renders the writeup.

    `data` is "embedded", a corpus to download, or a path; `notebooks` picks some by name; `parameters` overrides
    notebook parameters by name. With `resume`, notebooks that are done with the same scale, data, parameters and cells
    are kept; without `writeup`, notebooks are executed and no more.

    Executed notebooks go to out/notebooks, the answers to out/writeup. The first notebook that fails ends the run, as
    the later ones build on it; the writeup is made all the same and says so: see `WorkbookResult.failure`. Records of
    notebooks that are not asked for stay as they are.

    SIGINT (Ctrl-C), SIGUSR1 and SIGTERM stop the run: training saves itself, for which it has up to `stop_seconds`, and
    the executed notebook so far is kept: see `WorkbookResult.stopped`. A second SIGTERM or SIGINT ends all processes at
    once.

    Raises `UserError`, before anything runs, on unknown scales, notebooks or parameters, data that is not there, or a
    notebook that another process runs in `out`.
    """
    project = Path(project) if project is not None else find_project()
    out = Path(out) if out is not None else project / "runs" / scale
    require(0 < stop_seconds < math.inf, f"stop_seconds must be positive and finite, not {stop_seconds}.")
    with StopSignals(stop_seconds).heard() as stop:
        paths = find_notebooks(project, notebooks)
        common = {"scale": scale, "data": data, "out": str(out.resolve())}
        resolved = resolve_parameters(project, paths, scale, parameters or {}, common)
        data = locate(data)
        wanted = []
        for path in paths:
            values = as_json(resolved[path.stem] | ({} if "data" in (parameters or {}) else {"data": data}))
            wanted.append(
                NotebookRecord(path.stem, scale=scale, data=data, parameters=values, source=source_hash(path))
            )
        again = [
            record.name
            for path, record in zip(paths, wanted, strict=True)
            if not (resume and is_done(out, path, record))
        ]
        with holding(out, again):
            update_plan(out, scale, data, [path.stem for path in paths], [p.stem for p in find_notebooks(project)])
            outcomes = run_all(paths, wanted, out, resume, stop)
            result = WorkbookResult(out, None, None, outcomes)
            return finish(result, resume, writeup, stop)


def is_done(out: Path, path: Path, wanted: NotebookRecord, say: bool = False) -> bool:
    """Whether the notebook was executed to its end in `out`, with the same settings and cells, and is still whole.

    With `say`, one that is not whole any more is named in a line.
    """
    before = read_notebook_record(out, wanted.name)
    if before is None or not before.stands_for(wanted):
        return False
    fault = damage(out / "notebooks" / path.name, path)
    if fault and say:
        print(f"{wanted.name}: was done, but is run again: {fault}.", flush=True)
    return fault is None


def run_all(
    paths: Sequence[Path], wanted: Sequence[NotebookRecord], out: Path, resume: bool, stop: StopSignals
) -> list[NotebookRecord]:
    """Executes the notebooks until one fails or a signal comes, and keeps their records up to date."""
    records = list(wanted)
    waiting = []
    for index, (path, record) in enumerate(zip(paths, wanted, strict=True)):
        if resume and is_done(out, path, record, say=True):
            records[index] = read_notebook_record(out, record.name) or record
            print(f"{record.name}: kept, done before", flush=True)
        else:
            write_notebook_record(out, record)
            waiting.append(index)
    if not waiting:
        return records
    with (
        progress_of([paths[index] for index in waiting], out, str(wanted[0].scale)) as progress,
        private_kernel({MARK: stop.mark}) as kernel,
    ):
        for index in waiting:
            if stop.requested is not None:
                break
            records[index] = run_one(paths[index], records[index], out, kernel, progress, stop)
            print(f"{records[index].name}: {records[index].state} after {records[index].seconds:.0f} s", flush=True)
            if records[index].state != "done":
                break
    return records


@contextlib.contextmanager
def progress_of(paths: Sequence[Path], out: Path, scale: str) -> Iterator[WorkbookProgress]:
    """Progress of these notebooks, executed into `out`."""
    found = {path.stem: expected_seconds(path, out / "notebooks" / path.name, scale) for path in paths}
    expected, known = {name: seconds for name, (seconds, _) in found.items()}, all(known for _, known in found.values())
    progress = WorkbookProgress(expected, known, (out / "runs").resolve())  # papermill changes the folder
    try:
        yield progress
    finally:
        progress.close()


def run_one(
    path: Path, record: NotebookRecord, out: Path, kernel: str, progress: WorkbookProgress, stop: StopSignals
) -> NotebookRecord:
    """Executes one notebook, with its record on disk all the while."""
    from lmcore.provenance import environment

    record.state, record.environment = "running", as_json(environment())
    record.job = os.environ.get("SLURM_JOB_ID") or os.environ.get("LMCORE_JOB_ID")
    write_notebook_record(out, record)
    target = out / "notebooks" / path.name
    target.unlink(missing_ok=True)  # what an earlier run has left says nothing of this one
    try:
        ended = execute(path, target, record.parameters or {}, kernel, progress, stop)
    except BaseException:  # a full disk
        record.state = "stopped"
        with contextlib.suppress(UserError):
            write_notebook_record(out, record)
        raise
    for key in ("state", "seconds", "cell", "heading", "error"):
        setattr(record, key, getattr(ended, key))
    write_notebook_record(out, record)
    return record


def finish(result: WorkbookResult, resume: bool, writeup: bool, stop: StopSignals) -> WorkbookResult:
    """Adds the writeup, or where a signal stopped the notebooks; one that comes now lets the writeup be finished."""
    from lmcore.workbook.report.writeup import write_writeup

    failed = any(outcome.state == "failed" for outcome in result.outcomes)
    first = next((outcome for outcome in result.outcomes if outcome.state != "done"), None)
    if stop.requested is not None and first is not None and not failed:
        place = f"before notebook {first.name}" if first.state == "not run" else f"in notebook {first.name}"
        place += f", cell {first.cell}" if first.cell else ""
        result.stopped = stopped_sentence(stop, place, resume)
    elif writeup:
        print("workbook: the writeup is being made", flush=True)
        try:
            result.html, result.pdf = write_writeup(result.out)
        except Exception:
            if stop.requested is None:
                raise
            result.stopped = stopped_sentence(stop, "while the writeup was made", resume)  # it went to pandoc, too
    return result


def stopped_sentence(stop: StopSignals, place: str, resume: bool) -> str:
    """By which signal, where, how to go on, and what was left behind."""
    name = stop.requested.name if stop.requested else "a signal"
    command = "the same command" if resume else "the same command with --resume"
    left = "".join(f" Training had not ended in time and was left behind: {words}." for words in stop.left_behind)
    return f"stopped by {name} {place}; {command} goes on from there.{left}"


def refresh(project: str | os.PathLike | None = None, notebooks: Sequence[str] | None = None) -> list[Path]:
    """Executes the notebooks at their defaults and rewrites the committed outputs: those of cells tagged keep_output.

    A notebook that fails is left as it was. Returns the files that changed. Raises `UserError` naming the failure.
    """
    paths = find_notebooks(Path(project) if project is not None else find_project(), notebooks)
    changed = []
    with (
        tempfile.TemporaryDirectory(prefix="lmcore-refresh-") as folder,
        StopSignals().heard() as stop,
        private_kernel({MARK: stop.mark}) as kernel,
        progress_of(paths, Path(folder), "smoke") as progress,
    ):
        for path in paths:
            target = Path(folder) / path.name
            outcome = execute(path, target, {}, kernel, progress, stop)
            require(outcome.state == "done", str(outcome.sentence))
            before = path.read_bytes()
            write_notebook(path, clean(read_notebook(path), read_notebook(target)))
            changed += [path] if path.read_bytes() != before else []
    return changed
