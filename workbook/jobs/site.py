"""What differs between clusters: papermill_jobs/site.yaml, as options of sbatch and variables of a job."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from lmcore.errors import require
from workbook.parameters import read_mapping

OURS = ("setup", "environment", "jobs")
"""Settings that are ours; every other one is an option of sbatch by its own name, which sbatch checks itself."""


def load_site(file: Path) -> dict[str, Any]:
    """The settings in a site's file. Raises `UserError`, naming file and setting, for one that is wrong."""
    site = read_mapping(file, yaml.BaseLoader)  # values as written: 12:00:00 would be a number, and qos: off false
    _check(site, f"{file}")
    return site


def _check(settings: Mapping[str, Any], place: str) -> None:
    for name, value in settings.items():
        if name in ("environment", "jobs") or place.endswith(", jobs"):
            require(isinstance(value, dict), f"{place}: {name} must be a mapping, not {value!r}.")
            _check(value, f"{place}, {name}")
        else:
            require(isinstance(value, str), f"{place}: {name} must hold plain text, not {value!r}.")
