"""What differs between clusters: papermill_jobs/site.yaml, read into options of sbatch."""

import os
import re
import shlex
from collections.abc import Collection
from pathlib import Path
from typing import Any

import yaml

from lmcore.errors import UserError, require

KINDS = ("workbook", "notebook", "writeup", "sweep", "sweep-table", "train")
"""The scripts in papermill_jobs/, without .sbatch."""

OWN_VARIABLES = (
    "SCALE", "DATA", "OUT", "NOTEBOOKS", "SWEEP", "RUN", "CONFIG", "GPUS", "ATTEMPTS", "STOP_SECONDS",
    "LMCORE_SETUP", "PATH",
)  # fmt: skip
"""What `environment` may not set: where a job's results go is fixed when it is submitted."""

OWN_OPTIONS = re.compile(r"-[oJa].*|--(output|job-name|array|signal|open-mode|no-requeue)([= ].*)?")
"""What `extra` may not say: logs and arrays would not be found again, or the job not be queued again."""

OPTIONS = ("account", "partition", "qos", "gres", "cpus_per_task", "memory", "time", "constraint", "reservation")
"""Settings that are options of sbatch; Slurm itself refuses wrong values of those that are not checked here."""

COUNTS = ("cpus_per_task", "signal_seconds", "attempts_without_progress")
LISTS, MAPPINGS = ("setup", "extra"), ("environment", "jobs")
SETTINGS = (*OPTIONS, "gpus", "scratch", *COUNTS[1:], *LISTS, *MAPPINGS)
"""All settings; papermill_jobs/site.yaml explains them."""


def seconds_of_limit(time: str) -> int:
    """A time limit as sbatch takes it, in seconds. Raises `UserError` on one that is none, and on 0: no limit there."""
    whole = re.fullmatch(r"\d+|\d+:\d\d(:\d\d)?|\d+-\d+(:\d\d){0,2}", time) is not None
    require(whole, f"time must be minutes, hours:minutes:seconds or days-hours, not {time!r}.")
    days, dash, clock = time.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    if not dash and len(parts) < 3:  # minutes, or minutes:seconds
        parts = [0, *parts]
    hours, minutes, seconds = [*parts, 0, 0][:3]
    total = ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
    require(total > 0, f"time must be above 0, not {time!r}: Slurm takes that for no limit at all.")
    return total


class Site(dict[str, Any]):
    """Settings of one cluster by name, as they are written in its file. What is not there stays as the scripts have it.

    Raises `UserError` in a sentence that names the setting.
    """

    def __init__(self, **values: Any):
        super().__init__({name: value for name, value in values.items() if value not in ("", "~", "null")})
        for name, value in self.items():
            require(name in SETTINGS, f"there is no setting {name!r}; there are {', '.join(SETTINGS)}.")
            require(isinstance(value, list) or name not in LISTS, f"{name} must be a list of lines, not {value!r}.")
            require(isinstance(value, dict) or name not in MAPPINGS, f"{name} must be a mapping, not {value!r}.")
            plain = isinstance(value, str) or name in (*LISTS, *MAPPINGS)
            require(plain, f"{name} must be a plain value, not {value!r}.")
            whole = name not in COUNTS or (value.isdecimal() and 0 < int(value) < 65536)
            require(whole, f"{name} must be a whole number from 1 to 65535, not {value!r}.")
        counted = re.fullmatch(r"([\w.-]+:)?\d+", self.get("gpus", "0")) is not None
        require(counted, f"gpus must be a number or kind:number, not {self.get('gpus')!r}.")
        require(not {"gpus", "gres"} <= self.keys(), "gpus and gres ask for the same thing; set one of them.")
        seconds_of_limit(self.get("time", "1"))
        environment, setup, extra = self.get("environment", {}), self.get("setup", []), self.get("extra", [])
        for line in (*setup, *extra, *environment.values()):
            require(isinstance(line, str), f"setup, extra and environment must hold plain values, not {line!r}.")
        for name in environment:
            require(re.fullmatch(r"[A-Za-z_]\w*", name) is not None, f"environment: {name!r} is not a variable's name.")
            sentence = "is set by lmcore submit itself; change PATH in setup, others by its words."
            require(name not in OWN_VARIABLES, f"environment: {name} {sentence}")
        for option in extra:
            require(re.match(r"--?[a-zA-Z]", option) is not None, f"extra: {option!r} is not an option of sbatch.")
            sentence = "is set by lmcore submit itself; remove it (signal_seconds sets --signal)."
            require(OWN_OPTIONS.fullmatch(option) is None, f"extra: {option!r} {sentence}")
            try:
                shlex.split(option)
            except ValueError:
                raise UserError(f"extra: {option!r} has a quote that is not closed.") from None

    def for_job(self, *names: str, **values: str) -> "Site":
        """The settings of one job: `jobs` may have other values for its kind, then for its name; `values` come last.

        One of gpus and gres puts the other out of force.
        """
        settings = dict(self)
        for changes in (*(self.get("jobs", {}).get(name, {}) for name in names), values):
            for one, other in (("gpus", "gres"), ("gres", "gpus")):
                if one in changes and other not in changes:
                    settings.pop(other, None)
            settings |= changes
        return Site(**settings)

    @property
    def signal_seconds(self) -> int:
        """How long before the time limit the job is told to save itself."""
        return int(self.get("signal_seconds", "120"))

    def options(self) -> list[str]:
        """Options for the command line of sbatch, which go before those in the script."""
        gpus = self.get("gpus")
        none = gpus is not None and gpus.rpartition(":")[2].strip("0") == ""
        values = {"gres": gpus and ("none" if none else f"gpu:{gpus}")} | self
        names = {"cpus_per_task": "cpus-per-task", "memory": "mem"}
        chosen = [f"--{names.get(name, name)}={values[name]}" for name in OPTIONS if values.get(name) is not None]
        extra = [word for option in self.get("extra", []) for word in shlex.split(option)]
        return [*chosen, f"--signal=B:USR1@{self.signal_seconds}", *extra]

    def variables(self) -> dict[str, str]:
        """Variables for the environment of a job."""
        return {
            "ATTEMPTS": self.get("attempts_without_progress", "3"),
            "STOP_SECONDS": str(max(self.signal_seconds * 5 // 6, 1)),  # the rest: for the notebook, and to requeue
            "LMCORE_SETUP": "\n".join(self.get("setup", [])),
            **self.get("environment", {}),
        }

    def folder(self, project: Path) -> Path:
        """Folder in which runs/ lies: `scratch`, else the project's. Raises `UserError` on a variable that is unset."""
        path = os.path.expandvars(os.path.expanduser(self.get("scratch", "")))
        require("$" not in path, f"The scratch folder {self.get('scratch')} names a variable that is not set.")
        return project / path


def load_site(file: Path, names: Collection[str] | None = ()) -> Site:
    """Reads a site's file; `names` are the jobs that its `jobs` may speak of, besides kinds; None: any.

    Raises `UserError` in one sentence that names the file and the field.
    """
    try:
        # every value as it is written: YAML would read 12:00:00 as a number, and qos: off as false
        values = yaml.load(file.read_text(encoding="utf-8"), yaml.BaseLoader) or {}
    except FileNotFoundError:
        raise UserError(f"There is no file {file}; take papermill_jobs/site.yaml as a pattern.") from None
    except (yaml.YAMLError, OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file} cannot be read as YAML ({str(error).splitlines()[0]}).") from error
    try:
        require(isinstance(values, dict), f"settings must be a mapping of names to values, not {values!r}.")
        site = Site(**values)
        for name, changes in site.get("jobs", {}).items():
            known = names is None or name in KINDS or name in names
            require(known, f"jobs: there is no job {name!r}; there are {', '.join([*KINDS, *(names or ())])}.")
            require(isinstance(changes, dict), f"jobs: {name} must be a mapping of settings, {{}} for none.")
            for key in ("jobs", "scratch"):
                require(key not in changes, f"jobs: {name} cannot have its own {key}.")
            site.for_job(name)
    except UserError as error:
        raise UserError(f"{file}: {error}") from None
    return site
