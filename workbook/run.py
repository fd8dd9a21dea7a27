"""Runs the workbook: executes the notebooks in order, keeps their records, and makes the writeup."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lmcore.errors import require
from lmcore.stopping import stop_signals
from workbook.execution import STOP_SECONDS, execute
from workbook.parameters import find_notebooks, find_project, locate, resolve_parameters
from workbook.record import NotebookRecord, holding, plan, read_record, source_hash, write_record


def run_workbook(
    scale: str = "smoke",
    data: str = "embedded",
    out: str | os.PathLike | None = None,
    notebooks: Sequence[str] = (),
    parameters: Mapping[str, Any] | None = None,
    resume: bool = False,
    writeup: bool = True,
    stop_seconds: float = STOP_SECONDS,
) -> tuple[list[NotebookRecord], list[Path]]:
    """Executes the project's notebooks at `scale` into `out` (default runs/<scale>) and renders the writeup.

    `data` is "embedded", a corpus to download, or a path; `notebooks` picks some by name; `parameters` overrides
    notebook parameters by name. With `resume`, notebooks that are done with the same scale, data, parameters and cells
    are kept. Records of notebooks that are not asked for stay as they are.

    The first notebook that fails ends the run, as the later ones build on it; the writeup is made all the same and says
    so. A stop signal ends it, too: training saves itself, for which it has up to `stop_seconds`, and the executed
    notebook so far is kept.

    Returns the records of the notebooks that were asked for, in order, and the PDFs of the writeup: none if none was
    asked for, or a signal stopped the run. Raises `UserError`, before anything runs, on unknown scales, notebooks or
    parameters, data that is not there or too short, or a notebook that another process runs in `out`.
    """
    project = find_project()
    out = Path(out or project / "runs" / scale)
    require(0 < stop_seconds < math.inf, f"stop_seconds must be positive and finite, not {stop_seconds}.")
    with stop_signals() as stop:
        paths, data = find_notebooks(project, notebooks), locate(data)
        common = {"scale": scale, "data": data, "out": str(out.resolve())}
        resolved = resolve_parameters(project, paths, scale, parameters or {}, common)
        records, waiting = [], []
        for path in paths:
            values = json.loads(json.dumps(resolved[path.stem], default=str))  # as a record has them
            record = NotebookRecord(path.stem, scale=scale, data=data, parameters=values, source=source_hash(path))
            before = read_record(out, path.stem) if resume else None
            if before and before.stands_for(record) and (out / "notebooks" / path.name).exists():
                print(f"{path.stem}: kept, done before", flush=True)
                record = before
            else:
                waiting.append((path, record))
            records.append(record)
        with holding(out, [record.name for _, record in waiting]):
            plan(out, scale, data, [])
            for _, record in waiting:
                write_record(out, record)
            for path, record in waiting:
                if not stop.is_set():
                    execute(path, record, out, stop, stop_seconds)
                if record.state != "done":
                    break
        ended = next((record.state for record in records if record.state != "done"), "done")
        if not writeup or ended not in ("done", "failed"):
            return records, []
        from workbook.report.writeup import write_writeup

        print("workbook: the writeup is being made", flush=True)
        return records, write_writeup(out)
