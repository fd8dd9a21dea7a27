"""The tables of a notebook: measured here, or read from the records of another machine."""

import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from lmcore.errors import require
from lmcore.provenance import environment
from lmcore.workbook.report.tables import ENVIRONMENT, in_common, read_results, write_results

PERTURB = "LMCORE_PERTURB"
"""Variable with a seed: the numbers of all tables are changed at random. Under some seed each claim has to fail."""

SETTINGS = ("learning_rate", "lr", "weight_decay", "dropout")
"""Columns of floats that are not measured."""


@dataclass(frozen=True)
class Results:
    """Results of a notebook in the folder `out`; with `records`, a folder of results files, nothing is measured."""

    out: str | os.PathLike
    records: str | os.PathLike | None = None

    def table(
        self, name: str, measure: Callable[[], pd.DataFrame | tuple[pd.DataFrame, dict]], **notes: object
    ) -> pd.DataFrame:
        """The table `name`, as it is in out/results/<name>.json, with a .csv beside it.

        `measure` makes it, and may return its provenance as well (default: this process's). With `records` it is not
        called: the table is the one in records/<name>.json. Raises `UserError` if there is none.
        """
        if self.records:
            file = Path(self.records) / f"{name}.json"
            require(file.is_file(), f"The records in {self.records} have no table {name}: there is no {file}.")
            table, provenance, notes = read_results(file)
        else:
            made = measure()
            table, provenance = made if isinstance(made, tuple) else (made, in_common([environment()], ENVIRONMENT))
        table = write_results(table, Path(self.out) / "results" / f"{name}.json", provenance, **notes)
        return perturbed(table, f"{os.environ[PERTURB]}-{name}") if os.environ.get(PERTURB) else table


def perturbed(table: pd.DataFrame, seed: str) -> pd.DataFrame:
    """The table with every measured float multiplied by a random factor, from about a tenth to ten."""
    random = np.random.default_rng(zlib.crc32(seed.encode()))
    floats = [name for name in table.select_dtypes("floating") if name not in SETTINGS]
    return table.assign(**{name: table[name] * random.lognormal(0, 1, len(table)) for name in floats})
