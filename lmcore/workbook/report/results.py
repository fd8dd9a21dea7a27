"""The tables of a notebook: measured here, or read from the records of another machine."""

import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from lmcore.errors import require
from lmcore.profiling.cases import WorkloadConfig
from lmcore.profiling.runner import Task, require_complete, run_cases
from lmcore.provenance import environment
from lmcore.workbook.report.tables import ENVIRONMENT, in_common, provenance_of_cases, read_results, write_results

PERTURB = "LMCORE_PERTURB"
"""Variable with a seed: the numbers of all tables are changed at random. Under some seed each claim has to fail."""


@dataclass(frozen=True)
class Results:
    """Results of a notebook in the folder `out`; with `records`, a folder of results files, nothing is measured."""

    out: str | os.PathLike
    records: str | os.PathLike | None = None

    def table(
        self, name: str, measure: Callable[[], pd.DataFrame | tuple[pd.DataFrame, dict]], keys: Sequence[str] = ()
    ) -> pd.DataFrame:
        """The table `name`, as it is in out/results/<name>.json, with a .csv beside it.

        `measure` makes it, and may return its provenance as well (default: this process's). `keys` are the columns that
        tell the rows apart and are not measured. With `records`, `measure` is not called: the table is the one in
        records/<name>.json. Raises `UserError` if there is none.
        """
        if self.records:
            file = Path(self.records) / f"{name}.json"
            require(file.is_file(), f"The records in {self.records} have no table {name}: there is no {file}.")
            table, provenance, _ = read_results(file)
        else:
            made = measure()
            table, provenance = made if isinstance(made, tuple) else (made, in_common([environment()], ENVIRONMENT))
        table = write_results(table, Path(self.out) / "results" / f"{name}.json", provenance)
        return perturbed(table, keys, f"{os.environ[PERTURB]}-{name}") if os.environ.get(PERTURB) else table

    def measured(
        self,
        name: str,
        task: Task,
        cases: Mapping[str, WorkloadConfig],
        make: Callable[[dict[str, dict[str, Any]]], pd.DataFrame],
        keys: Sequence[str],
        folder: str,
        run: Callable[..., dict[str, dict[str, Any]]] = run_cases,
    ) -> pd.DataFrame:
        """The table `name` that `make` gives of the records of all cases by name, kept in out/runs/<folder>. `task`
        measures each case in a process of its own, by `run`."""

        def measure() -> tuple[pd.DataFrame, dict]:
            records = run(task, cases, Path(self.out) / "runs" / folder, title=folder.rpartition("/")[2])
            require_complete(records)
            return make(records), provenance_of_cases(records)

        return self.table(name, measure, keys)


def perturbed(table: pd.DataFrame, keys: Sequence[str], seed: str) -> pd.DataFrame:
    """The table with each measured number multiplied by a random factor, about a tenth to ten, and each bool drawn.

    Rows with the same keys, repetitions of one measurement, have the same factor: else it would be lost in their mean.
    """
    random = np.random.default_rng(zlib.crc32(seed.encode()))
    group = table.groupby(list(keys), dropna=False).ngroup() if keys else np.arange(len(table))
    changed = table.copy()
    for name in table.columns.difference(keys):
        factor = random.lognormal(0, 1, len(table))[group]
        if table[name].dtype == bool:
            changed[name] = factor > 1
        elif pd.api.types.is_numeric_dtype(table[name]):
            values = table[name] * factor
            changed[name] = values.round().astype(int) if table[name].dtype.kind in "iu" else values
    return changed
