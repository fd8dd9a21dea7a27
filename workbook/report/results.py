"""Tables as results files that say where they come from: measured here, or read from another machine's records."""

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from IPython.display import Markdown, display

from lmcore.errors import require
from lmcore.files import atomic_write, read_json
from lmcore.profiling.cases import WorkloadConfig
from lmcore.profiling.runner import Task, require_complete, run_cases
from lmcore.provenance import environment, utc_now

SIGNIFICANT_DIGITS = 7
"""Of the numbers in results files."""

ENVIRONMENT = (
    "device", "driver", "platform", "cores", "python", "torch", "cuda", "packages", "git_commit", "git_dirty",
    "command",
)  # fmt: skip
"""What the provenance of a table takes over from the environments of its runs."""


RECOMPUTE = "LMCORE_RECOMPUTE"
"""Environment variable: tables that were made from records of runs are made again from these, and must be the same."""


@dataclass(frozen=True)
class Results:
    """Results of a notebook in the folder `out`; with `records`, a folder of results files, nothing is measured."""

    out: str | os.PathLike
    records: str | os.PathLike | None = None

    def table(
        self,
        name: str,
        measure: Callable[[], pd.DataFrame | tuple[pd.DataFrame, dict]],
        made_from: Iterable[str | os.PathLike] = (),
    ) -> pd.DataFrame:
        """The table `name`, as it is in out/results/<name>.json.

        `measure` makes it, and may return its provenance as well (default: this process's). With `records`, it is not
        called: the table is the one in records/<name>.json. Raises `UserError` if there is none. `made_from` are the
        records of runs that `measure` reads: a grader has the table made again from them.
        """
        if self.records:
            file = Path(self.records) / f"{name}.json"
            require(file.is_file(), f"The records in {self.records} have no table {name}: there is no {file}.")
            table, provenance, _ = read_results(file)
            if isinstance(commits := provenance.get("git_commit"), list):
                rows = f"> The rows of `{name}` were measured at the commits {' and '.join(c[:8] for c in commits)}."
                display(Markdown(rows))
            files = [Path(path) for path in made_from]
            if RECOMPUTE in os.environ and files:
                gone = [path.relative_to(self.out).as_posix() for path in files if not path.is_file()]
                require(not gone, f"Table {name} cannot be made again: {''.join(gone[:1])} is not there.")
                made = measure()
                require_same_rows(name, table, made[0] if isinstance(made, tuple) else made)
        else:
            made = measure()
            table, provenance = made if isinstance(made, tuple) else (made, in_common([environment()], ENVIRONMENT))
        return write_results(table, Path(self.out) / "results" / f"{name}.json", provenance)

    def measured(
        self,
        name: str,
        task: Task,
        cases: Mapping[str, WorkloadConfig],
        make: Callable[[dict[str, dict[str, Any]]], pd.DataFrame],
        folder: str,
        run: Callable[..., dict[str, dict[str, Any]]] = run_cases,
    ) -> pd.DataFrame:
        """The table `name` that `make` gives of the records of all cases by name, kept in out/runs/<folder>. `task`
        measures each case in a process of its own, by `run`."""

        files = {case: Path(self.out) / "runs" / folder / f"{case}.json" for case in cases}

        def measure() -> tuple[pd.DataFrame, dict]:
            if RECOMPUTE in os.environ:
                records = {case: read_json(file) for case, file in files.items()}
            else:
                records = run(task, cases, Path(self.out) / "runs" / folder, title=folder.rpartition("/")[2])
            require_complete(records)
            return make(records), provenance_of_cases(records)

        return self.table(name, measure, files.values())


def require_same_rows(name: str, table: pd.DataFrame, again: pd.DataFrame) -> None:
    """Raises `UserError` at the first cell of a table that is not what its runs give."""
    pairs = zip(table.to_dict("records"), again.to_dict("records"), strict=False)
    for number, (row, made) in enumerate(pairs, 1):
        for column, value in made.items():
            there, here = _plain(row.get(column)), _plain(value)
            require(there == here, f"Table {name} has {there} as {column} in row {number}; its runs give {here}.")
    require(len(table) == len(again), f"Table {name} has {len(table)} rows; its runs give {len(again)}.")


def provenance_of_cases(records: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Where measurements come from: machine, versions, commit and command; a list where the cells differ."""
    environments = [record["environment"] for record in records.values() if record["environment"]]
    return {"time_utc": utc_now(), "cases": len(records)} | in_common(environments)


def in_common(environments: Sequence[Mapping[str, Any]], keys: Sequence[str] = ENVIRONMENT) -> dict[str, Any]:
    """Each of the keys with the value that all environments have; a list of the distinct ones where they differ."""
    found = {}
    for key in keys:
        values = [environment.get(key) for environment in environments]
        distinct = [value for index, value in enumerate(values) if value not in values[:index]]
        found[key] = distinct[0] if len(distinct) == 1 else distinct
    return found


def write_results(
    table: pd.DataFrame, path: str | os.PathLike, provenance: Mapping[str, Any], **notes: Any
) -> pd.DataFrame:
    """Writes {provenance, notes, columns, rows} to `path` (.json); returns the rows as written."""
    require(Path(path).suffix == ".json", f"A results file ends in .json, not {Path(path).name}.")
    rows = [{key: _plain(value) for key, value in row.items()} for row in table.to_dict("records")]
    head = {"provenance": dict(provenance), "notes": notes, "columns": list(table.columns)}
    with atomic_write(path, "w") as file:  # a line for each row, so that differences between two runs can be read
        file.write(json.dumps(head, indent=2, ensure_ascii=False).removesuffix("\n}"))
        file.write(',\n  "rows": [\n' + ",\n".join(f"    {json.dumps(row)}" for row in rows) + "\n  ]\n}\n")
    return pd.DataFrame(rows, columns=table.columns)


def read_results(path: str | os.PathLike) -> tuple[pd.DataFrame, dict[str, Any], dict[str, Any]]:
    """Table, provenance and notes of a results file. Raises `UserError` if it is not one."""
    content = read_json(path)
    complete = isinstance(content, dict) and {"provenance", "notes", "columns", "rows"} <= content.keys()
    require(complete, f"{path} is not a results file: it lacks provenance, notes, columns or rows.")
    return pd.DataFrame(content["rows"], columns=content["columns"]), content["provenance"], content["notes"]


def _plain(value: Any) -> Any:
    """A cell as JSON has it: numpy scalars as Python's, what is missing or not finite as null."""
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, float):
        return float(f"{value:.{SIGNIFICANT_DIGITS}g}") if math.isfinite(value) else None
    return value
