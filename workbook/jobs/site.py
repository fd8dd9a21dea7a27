"""What differs between clusters: papermill_jobs/site.yaml, as options of sbatch and variables of a job."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from lmcore.errors import UserError, require
from workbook.parameters import find_project

OPTIONS = {
    "account": "account", "partition": "partition", "qos": "qos", "cpus_per_task": "cpus-per-task", "memory": "mem",
    "time": "time", "constraint": "constraint", "reservation": "reservation",
}  # fmt: skip
"""Settings that are options of sbatch, which checks their values itself."""

KINDS = dict.fromkeys([*OPTIONS, "gpus", "signal_seconds", "attempts_without_progress", "scratch"], str)
KINDS |= {"setup": list, "extra": list, "environment": dict, "jobs": dict}
"""All settings, and what their values are; papermill_jobs/site.yaml explains them."""

WORDS = {str: "a plain value", list: "a list of lines", dict: "a mapping"}


def load_site(file: Path) -> dict[str, Any]:
    """The settings in a site's file. Raises `UserError`, naming file and setting, for one that is wrong."""
    try:
        # every value as it is written: YAML would read 12:00:00 as a number, and qos: off as false
        site = yaml.load(file.read_text(encoding="utf-8"), yaml.BaseLoader) or {}
    except (yaml.YAMLError, OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file} cannot be read as YAML ({str(error).splitlines()[0]}).") from error
    _check(site, f"{file}")
    for name, settings in site.get("jobs", {}).items():
        _check(settings, f"{file}, jobs, {name}")
    return site


def _check(settings: Any, place: str) -> None:
    require(isinstance(settings, dict), f"{place} must be a mapping of settings, not {settings!r}.")
    for name, value in settings.items():
        require(name in KINDS, f"{place}: there is no setting {name!r}; there are {', '.join(KINDS)}.")
        require(isinstance(value, KINDS[name]), f"{place}: {name} must be {WORDS[KINDS[name]]}, not {value!r}.")
        lines = value if isinstance(value, list) else value.values() if name == "environment" else []
        require(all(isinstance(line, str) for line in lines), f"{place}: {name} must hold plain values, not {value!r}.")
        whole = name not in ("signal_seconds", "attempts_without_progress") or (value.isdecimal() and int(value) > 0)
        require(whole, f"{place}: {name} must be a whole number above 0, not {value!r}.")


def for_job(site: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """The settings of one job: `jobs` may have other values for its script, then for its name."""
    settings = dict(site)
    for name in names:
        settings |= site.get("jobs", {}).get(name, {})
    return settings


def options(settings: Mapping[str, Any]) -> list[str]:
    """Options for the command line of sbatch, which go before those in the script."""
    chosen = [f"--{OPTIONS[name]}={value}" for name, value in settings.items() if name in OPTIONS and value]
    if gpus := settings.get("gpus"):  # a number, or kind:number
        chosen.append("--gres=none" if gpus == "0" else f"--gres=gpu:{gpus}")
    return [*chosen, f"--signal=B:USR1@{settings.get('signal_seconds', 120)}", *settings.get("extra", [])]


def variables(settings: Mapping[str, Any]) -> dict[str, str]:
    """Variables for the environment of a job."""
    return {
        **settings.get("environment", {}),
        "ATTEMPTS": settings.get("attempts_without_progress", "3"),
        # the rest: for the notebook, and to requeue
        "STOP_SECONDS": str(max(int(settings.get("signal_seconds", 120)) * 5 // 6, 1)),
        "LMCORE_SETUP": "\n".join(settings.get("setup", [])),
    }


def scratch(site: Mapping[str, Any], project: Path) -> Path:
    """Folder in which runs/ lies: `scratch`, else the project's. Raises `UserError` on a variable that is unset."""
    path = os.path.expandvars(os.path.expanduser(site.get("scratch", "")))
    require("$" not in path, f"The scratch folder {path} names a variable that is not set.")
    return project / path


def runs_folders() -> list[Path]:
    """Folders in which output folders lie by default: runs/ of the project, and of the site's scratch folder."""
    project = find_project()
    file = project / "papermill_jobs" / "site.yaml"
    site = load_site(file) if file.is_file() else {}
    return list(dict.fromkeys([project / "runs", scratch(site, project) / "runs"]))
