"""`workbook run`: executes the notebooks in order, keeps their records, and makes the writeup."""

import json
import math
import sys
from pathlib import Path

from lmcore.errors import EXIT_FAILURE, EXIT_INTERRUPTED, require
from lmcore.stopping import stop_signals
from workbook.execution import STOP_SECONDS, execute
from workbook.parameters import find_notebooks, find_project, locate, parse_overrides, resolve_parameters
from workbook.record import NotebookRecord, holding, read_record, remove_others, source_hash, write_record


def run(
    scale: str = "smoke",
    data: str = "embedded",
    out: Path | None = None,
    notebooks: tuple[str, ...] = (),
    parameters: tuple[str, ...] = (),
    resume: bool = False,
    writeup: bool = True,
    stop_seconds: float = STOP_SECONDS,
) -> int:
    """Execute the notebooks in order and make the writeup. Exit codes: 1 a notebook failed, 75 stopped by a signal.

    The first notebook that fails ends the run, as the later ones build on it; the writeup is made all the same and says
    so. Ctrl-C, SIGTERM, SIGHUP and SIGUSR1 stop it where nothing is lost; a second SIGINT or SIGTERM ends the command
    and its notebooks at once: 130, 143. What is wrong with the options or the data is said before anything runs.

    Args:
        scale: smoke, laptop or gpu: a folder in papermill_jobs/parameters/.
        data: embedded, a corpus to download (tinystories, ...), or a text file, a folder of text, a prepared corpus.
        out: Folder for everything that is made (default: runs/<scale>).
        notebooks: Only these, by number or name; the records of the others stay as they are.
        parameters: name=value pairs that override notebook parameters of that name; values are Python literals or text.
        resume: Keep the notebooks that are done with the same scale, data, parameters and cells.
        writeup: Make the writeup, too.
        stop_seconds: How long training may take to save itself after a signal.
    """
    project = find_project()
    out = out or project / "runs" / scale
    require(0 < stop_seconds < math.inf, f"stop_seconds must be positive and finite, not {stop_seconds}.")
    with stop_signals() as stop:
        paths, data = find_notebooks(project, notebooks), locate(data)
        common = {"scale": scale, "data": data, "out": str(out.resolve())}
        resolved = resolve_parameters(project, paths, scale, parse_overrides(parameters), common)
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
            remove_others(out, scale, data)
            for _, record in waiting:
                write_record(out, record)
            for path, record in waiting:
                if not stop.is_set():
                    execute(path, record, out, stop, stop_seconds)
                if record.state != "done":
                    break
        unfinished = next((record for record in records if record.unfinished), None)
        if writeup and (unfinished is None or unfinished.state == "failed"):
            from workbook.report.writeup import write_writeup

            print("workbook: the writeup is being made", flush=True)
            print("".join(f"PDF: {pdf}\n" for pdf in write_writeup(out)), end="")
    if unfinished is None:
        return 0
    resumes = "" if unfinished.state == "failed" else " The same command with --resume resumes from there."
    print(f"workbook: {unfinished.unfinished}{resumes}", file=sys.stderr)
    return EXIT_FAILURE if unfinished.state == "failed" else EXIT_INTERRUPTED
