"""Training sweeps as job arrays: a Python file makes the configurations, each is a task, one table has them all."""

import runpy
from pathlib import Path

import pandas as pd

from lmcore.config import TrainConfig, to_dict
from lmcore.data import open_data
from lmcore.errors import require
from lmcore.files import read_json
from lmcore.recipes import recipe
from lmcore.run import RunFolder
from workbook.jobs.submit import Job
from workbook.report import results, tables
from workbook.report.variations import with_steps
from workbook.sweep import is_finished


def sweep_runs(file: Path, data: Path, recipe_name: str, steps: int | None) -> dict[str, TrainConfig]:
    """The configurations of a sweep by name: what `runs(base)` in the Python file returns for this recipe and data.

    `data` is a prepared corpus. Raises `UserError` where there is no such file, function, recipe or corpus.
    """
    there = ", ".join(sorted(path.stem for path in file.parent.glob("*.py")))
    require(file.is_file(), f"There is no sweep {file}; there are {there or 'none'}.")
    functions, corpus = runpy.run_path(str(file)), open_data(data.resolve())
    require("runs" in functions, f"{file} must define runs(base), which returns configurations by name.")
    return functions["runs"](with_steps(recipe(recipe_name, str(corpus.folder), corpus.vocab_size), steps))


def sweep_jobs(name: str, runs: dict[str, TrainConfig], out: Path, concurrency: int | None) -> list[Job]:
    """An array over what is unfinished of out/sweep.json, then the table of all of it; none if all is finished."""
    require(concurrency is None or concurrency >= 1, f"--concurrency must be at least 1, not {concurrency}.")
    left = [str(n) for n, (run, config) in enumerate(runs.items()) if not is_finished(config, RunFolder(out / run))]
    tasks = ",".join(left) + (f"%{concurrency}" if concurrency else "")
    files = {out / "sweep.json": {run: to_dict(config) for run, config in runs.items()}}
    table = Job(f"{name}-table", "sweep-table", {}, after=(name,), even_if_failed=True)
    return [Job(name, "sweep", {}, array=tasks, files=files), table] if left else []


def write_sweep_table(out: Path) -> tuple[pd.DataFrame, Path]:
    """Writes out/results/<name>.json with a row for each run that has begun, and the curves beside it.

    Returns the table and its file.
    """
    require((out / "sweep.json").is_file(), f"{out} is not the folder of a sweep: it has no sweep.json.")
    folders = {name: RunFolder(out / name) for name in read_json(out / "sweep.json")}
    runs = {name: run for name, run in folders.items() if run.config_file.exists()}
    file, provenance = out / "results" / f"{out.name}.json", tables.provenance_of(runs)
    results.write_results(tables.curves_table(runs), file.with_stem(f"{out.name}_curves"), provenance)
    return results.write_results(tables.run_table(runs), file, provenance), file
