"""The tables of a notebook: measured here, or read from the records of another machine."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from lmcore.errors import require
from lmcore.profiling.cases import WorkloadConfig
from lmcore.profiling.runner import Task, require_complete, run_cases
from lmcore.provenance import environment
from lmcore.results import ENVIRONMENT, in_common, provenance_of_cases, read_results, write_results


@dataclass(frozen=True)
class Results:
    """Results of a notebook in the folder `out`; with `records`, a folder of results files, nothing is measured."""

    out: str | os.PathLike
    records: str | os.PathLike | None = None

    def table(self, name: str, measure: Callable[[], pd.DataFrame | tuple[pd.DataFrame, dict]]) -> pd.DataFrame:
        """The table `name`, as it is in out/results/<name>.json.

        `measure` makes it, and may return its provenance as well (default: this process's). With `records`, it is not
        called: the table is the one in records/<name>.json. Raises `UserError` if there is none.
        """
        if self.records:
            file = Path(self.records) / f"{name}.json"
            require(file.is_file(), f"The records in {self.records} have no table {name}: there is no {file}.")
            table, provenance, _ = read_results(file)
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

        def measure() -> tuple[pd.DataFrame, dict]:
            records = run(task, cases, Path(self.out) / "runs" / folder, title=folder.rpartition("/")[2])
            require_complete(records)
            return make(records), provenance_of_cases(records)

        return self.table(name, measure)
