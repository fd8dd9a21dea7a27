"""Runs the workbook: executes the notebooks in order, keeps their records, and makes the writeup."""

import contextlib
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmcore.errors import require
from lmcore.files import temporary_folder
from lmcore.workbook.execution import WorkbookProgress, execute, expected_seconds
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
from lmcore.workbook.stopping import STOP_SECONDS, StopSignals


@dataclass
class WorkbookResult:
    """Where everything is, and whether every notebook ran."""

    out: Path
    outcomes: list[NotebookRecord]
    """Of the notebooks that were asked for, in order."""
    html: Path | None = None
    """The writeup; None if none was asked for, or the run was stopped."""
    pdf: Path | None = None
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

    Ctrl-C, SIGUSR1, SIGTERM and SIGHUP stop the run: training saves itself, for which it has up to `stop_seconds`, and
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
        data = locate(data)
        common = {"scale": scale, "data": data, "out": str(out.resolve())}
        resolved = resolve_parameters(project, paths, scale, parameters or {}, common)
        records, waiting = {}, []
        for path in paths:
            values = as_json(resolved[path.stem])
            wanted = NotebookRecord(path.stem, scale=scale, data=data, parameters=values, source=source_hash(path))
            done = done_before(out, path, wanted) if resume else None
            records[path.stem] = done or wanted
            waiting += [] if done else [path]
        with holding(out, [path.stem for path in waiting]):
            update_plan(out, scale, data, list(records), [path.stem for path in find_notebooks(project)])
            run_all(waiting, records, out, stop)
            return finish(WorkbookResult(out, list(records.values())), resume, writeup, stop)


def done_before(out: Path, path: Path, wanted: NotebookRecord) -> NotebookRecord | None:
    """The record of a notebook that was executed to its end in `out`, with the same settings and cells, and is whole.

    One that was done so, but is not whole any more, is named in a line.
    """
    before = read_notebook_record(out, wanted.name)
    if before is None or not before.stands_for(wanted):
        return None
    fault = damage(out / "notebooks" / path.name, path)
    print(f"{wanted.name}: " + (f"was done, but is run again: {fault}." if fault else "kept, done before"), flush=True)
    return None if fault else before


def run_all(paths: Sequence[Path], records: Mapping[str, NotebookRecord], out: Path, stop: StopSignals) -> None:
    """Executes the notebooks until one fails or a signal comes, and keeps their records up to date."""
    for path in paths:
        write_notebook_record(out, records[path.stem])
    with progress_of(paths, out, str(records[paths[0].stem].scale)) if paths else contextlib.nullcontext() as progress:
        for path in paths:
            record = records[path.stem]
            if stop.requested is None:
                execute(path, record, out, progress, stop)
                print(f"{record.name}: {record.state} after {record.seconds:.0f} s", flush=True)
            if record.state != "done":
                break


def progress_of(paths: Sequence[Path], out: Path, scale: str) -> contextlib.closing[WorkbookProgress]:
    """Progress of these notebooks, executed into `out`."""
    found = {path.stem: expected_seconds(path, out / "notebooks" / path.name, scale) for path in paths}
    expected, known = {name: seconds for name, (seconds, _) in found.items()}, all(known for _, known in found.values())
    return contextlib.closing(
        WorkbookProgress(expected, known, (out / "runs").resolve())
    )  # papermill changes the folder


def finish(result: WorkbookResult, resume: bool, writeup: bool, stop: StopSignals) -> WorkbookResult:
    """Adds the writeup, or where a signal stopped the notebooks; one that comes now lets the writeup be finished."""
    place = None
    first = next((outcome for outcome in result.outcomes if outcome.state != "done"), None)
    if stop.requested is not None and first is not None and result.failure is None:
        place = f"{'before' if first.state == 'not run' else 'in'} notebook {first.name}"
        place += f", cell {first.cell}" if first.cell else ""
    elif writeup:
        from lmcore.workbook.report.writeup import write_writeup

        print("workbook: the writeup is being made", flush=True)
        try:
            result.html, result.pdf = write_writeup(result.out)
        except Exception:
            if stop.requested is None:
                raise
            place = "while the writeup was made"  # the signal went to pandoc, too
    if place is not None:
        command = "the same command" if resume else "the same command with --resume"
        left = "".join(f" Training had not ended in time and was left behind: {words}." for words in stop.left_behind)
        result.stopped = f"stopped by {stop.requested.name} {place}; {command} resumes from there.{left}"
    return result


def refresh(project: str | os.PathLike | None = None, notebooks: Sequence[str] | None = None) -> list[Path]:
    """Executes the notebooks at their defaults and rewrites the committed outputs: those of cells tagged keep_output.

    A notebook that fails is left as it was. Returns the files that changed. Raises `UserError` naming the failure.
    """
    paths = find_notebooks(Path(project) if project is not None else find_project(), notebooks)
    changed = []
    with (
        temporary_folder("lmcore-refresh-") as folder,
        StopSignals().heard() as stop,
        progress_of(paths, Path(folder), "smoke") as progress,
    ):
        for path in paths:
            record = NotebookRecord(path.stem)
            execute(path, record, Path(folder), progress, stop)
            require(record.state == "done", str(record.sentence))
            before = path.read_bytes()
            write_notebook(path, clean(read_notebook(path), read_notebook(Path(folder) / "notebooks" / path.name)))
            changed += [path] if path.read_bytes() != before else []
    return changed
