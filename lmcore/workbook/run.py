"""Runs the workbook: executes the notebooks in order, keeps their records, and makes the writeup."""

import contextlib
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmcore.errors import UserError, require, require_path
from lmcore.workbook.execution import CellProgress, execute
from lmcore.workbook.kernel import private_kernel
from lmcore.workbook.notebook import clean, read_notebook, write_notebook
from lmcore.workbook.parameters import find_notebooks, find_project, resolve_parameters
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

    SIGUSR1 and SIGTERM stop the run: training saves itself, for which it has up to `stop_seconds`, and the executed
    notebook so far is kept: see `WorkbookResult.stopped`. A second SIGTERM or SIGINT ends all processes at once.

    Raises `UserError`, before anything runs, on unknown scales, notebooks or parameters, data that is not there, or a
    notebook that another process runs in `out`.
    """
    project = Path(project) if project is not None else find_project()
    out = Path(out) if out is not None else project / "runs" / scale
    require(0 < stop_seconds < math.inf, f"stop_seconds must be positive and finite, not {stop_seconds}.")
    with StopSignals(stop_seconds).heard() as stop:
        paths = find_notebooks(project, notebooks)
        data = locate(data)
        common = {"scale": scale, "data": data, "out": str(out.resolve())}
        resolved = resolve_parameters(project, paths, scale, parameters or {}, common)
        wanted = [
            NotebookRecord(
                path.stem, scale=scale, data=data, parameters=as_json(resolved[path.stem]), source=source_hash(path)
            )
            for path in paths
        ]
        with holding(out, [record.name for record in wanted if not (resume and is_done(out, record))]):
            update_plan(out, scale, data, [path.stem for path in paths], [p.stem for p in find_notebooks(project)])
            outcomes = run_all(paths, wanted, out, resume, stop)
            result = WorkbookResult(out, None, None, outcomes)
            return finish(result, resume, writeup, stop)


def locate(data: str) -> str:
    """`data` as the notebooks need it: a name as it is, a path in full. Raises `UserError` if it is neither."""
    from lmcore.data.downloads import SOURCES

    names = ("embedded", *SOURCES)
    require_path("data", data)
    require(
        data in names or Path(data).exists(),
        f"There is no file or folder {data}; name one, or one of the corpora {', '.join(names)}.",
    )
    return data if data in names else str(Path(data).resolve())


def is_done(out: Path, wanted: NotebookRecord) -> bool:
    """Whether the notebook was executed to its end in `out`, with the same settings and cells."""
    before = read_notebook_record(out, wanted.name)
    return before is not None and before.stands_for(wanted) and (out / "notebooks" / f"{wanted.name}.ipynb").exists()


def run_all(
    paths: Sequence[Path], wanted: Sequence[NotebookRecord], out: Path, resume: bool, stop: StopSignals
) -> list[NotebookRecord]:
    """Executes the notebooks until one fails or a signal comes, and keeps their records up to date."""
    records = list(wanted)
    waiting = []
    for index, record in enumerate(wanted):
        if resume and is_done(out, record):
            records[index] = read_notebook_record(out, record.name) or record
            print(f"{record.name}: kept, done before", flush=True)
        else:
            write_notebook_record(out, record)
            waiting.append(index)
    if not waiting:
        return records
    progress = CellProgress([paths[index] for index in waiting])
    try:
        with private_kernel({MARK: stop.mark}) as kernel:
            for index in waiting:
                if stop.requested is not None:
                    break
                hook = progress.hook(paths[index].stem)
                records[index] = run_one(paths[index], records[index], out, kernel, hook, stop)
                print(f"{records[index].name}: {records[index].state} after {records[index].seconds:.0f} s", flush=True)
                if records[index].state != "done":
                    break
    finally:
        progress.close()
    return records


def run_one(path: Path, record: NotebookRecord, out: Path, kernel: str, hook: Any, stop: StopSignals) -> NotebookRecord:
    """Executes one notebook, with its record on disk all the while."""
    from lmcore.provenance import environment

    record.state, record.environment = "running", as_json(environment())
    record.job = os.environ.get("SLURM_JOB_ID") or os.environ.get("LMCORE_JOB_ID")
    write_notebook_record(out, record)
    target = out / "notebooks" / path.name
    target.unlink(missing_ok=True)  # what an earlier run has left says nothing of this one
    try:
        ended = execute(path, target, record.parameters or {}, kernel, hook, stop)
    except BaseException:  # Ctrl-C, a full disk
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
