"""What differs between clusters: papermill_jobs/site.yaml, read into options of sbatch."""

import dataclasses
import os
import re
import shlex
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from lmcore.errors import UserError, require

KINDS = ("workbook", "notebook", "writeup", "sweep", "sweep-table")
"""The scripts in papermill_jobs/, without .sbatch."""

OPTIONS = {
    "account": "account", "partition": "partition", "qos": "qos", "gres": "gres", "cpus_per_task": "cpus-per-task",
    "memory": "mem", "time": "time", "constraint": "constraint", "reservation": "reservation",
}  # fmt: skip
"""Options of sbatch by field."""

OWN_VARIABLES = ("SCALE", "DATA", "OUT", "NOTEBOOKS", "SWEEP", "ATTEMPTS", "STOP_SECONDS", "LMCORE_SETUP", "PATH")
"""What `environment` may not set: where a job's results go is fixed when it is submitted."""

OWN_OPTIONS = re.compile(r"-[oJa].*|--(output|job-name|array|signal|open-mode|no-requeue)([= ].*)?")
"""What `extra` may not say: logs and arrays would not be found again, or the job not be queued again."""

TIME = re.compile(r"\d+|\d+:\d\d(:\d\d)?|\d+-\d+(:\d\d){0,2}")
"""Minutes, minutes:seconds, hours:minutes:seconds, days-hours[:minutes[:seconds]] (sbatch's manual page)."""


def seconds_of_limit(time: str) -> int:
    """A time limit as sbatch takes it, in seconds. Raises `UserError` on one that is none, and on 0: no limit there."""
    whole = TIME.fullmatch(time) is not None
    require(whole, f"time must be minutes, hours:minutes:seconds or days-hours, not {time!r}.")
    days, dash, clock = time.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    if not dash and len(parts) < 3:  # minutes, or minutes:seconds
        parts = [0, *parts]
    hours, minutes, seconds = [*parts, 0, 0][:3]
    total = ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
    require(total > 0, f"time must be above 0, not {time!r}: Slurm takes that for no limit at all.")
    return total


@dataclass(frozen=True)
class Site:
    """Settings of one cluster. What is None stays as the scripts have it."""

    account: str | None = None
    partition: str | None = None
    qos: str | None = None
    gpus: str | None = None
    """A number, or kind:number: short for `gres` gpu:number; 0: no GPU."""
    gres: str | None = None
    """As --gres, in place of `gpus`."""
    cpus_per_task: int | None = None
    memory: str | None = None
    time: str | None = None
    constraint: str | None = None
    reservation: str | None = None
    setup: tuple[str, ...] = ()
    """Lines of shell before anything else."""
    environment: dict[str, str] = field(default_factory=dict)
    scratch: str | None = None
    """Folder under which results lie unless they are named; ~ and $VARIABLES stand for what they are on submission."""
    signal_seconds: int = 120
    attempts_without_progress: int = 3
    extra: tuple[str, ...] = ()
    jobs: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Other values by kind or name of job."""

    def __post_init__(self):
        require(self.gpus is None or self.gres is None, "gpus and gres ask for the same thing; set one of them.")
        gpus = self.gpus is None or re.fullmatch(r"([\w.-]+:)?\d+", self.gpus)
        require(bool(gpus), f"gpus must be a number or kind:number, not {self.gpus!r}.")
        if self.time is not None:
            seconds_of_limit(self.time)
        for name in ("cpus_per_task", "signal_seconds", "attempts_without_progress"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"{name} must be at least 1, not {value}.")
        require(self.signal_seconds <= 65535, f"signal_seconds must be at most 65535, not {self.signal_seconds}.")
        for name in self.environment:
            require(re.fullmatch(r"[A-Za-z_]\w*", name) is not None, f"environment: {name!r} is no variable's name.")
            sentence = "is set by lmcore submit itself; change PATH in setup, others by its words."
            require(name not in OWN_VARIABLES, f"environment: {name} {sentence}")
        for option in self.extra:
            require(re.match(r"--?[a-zA-Z]", option) is not None, f"extra: {option!r} is not an option of sbatch.")
            sentence = "is set by lmcore submit itself; remove it (signal_seconds sets --signal)."
            require(OWN_OPTIONS.fullmatch(option) is None, f"extra: {option!r} {sentence}")
            try:
                shlex.split(option)
            except ValueError:
                raise UserError(f"extra: {option!r} has a quote that is not closed.") from None

    def for_job(self, kind: str, name: str) -> "Site":
        """The settings of one job: `jobs` may have other values for its kind, and for its name."""
        return self.replaced(self.jobs.get(kind, {})).replaced(self.jobs.get(name, {}) if name != kind else {})

    def replaced(self, values: dict[str, Any]) -> "Site":
        """A copy with other values; one of gpus and gres puts the other out of force."""
        values = converted(values)
        for one, other in (("gpus", "gres"), ("gres", "gpus")):
            if one in values:
                values.setdefault(other, None)
        return dataclasses.replace(self, **values)

    def options(self) -> list[str]:
        """Options for the command line of sbatch, which go before those in the script."""
        gpus = self.gpus and ("none" if self.gpus.rpartition(":")[2].strip("0") == "" else f"gpu:{self.gpus}")
        values = {option: getattr(self, name) for name, option in OPTIONS.items()} | {"gres": gpus or self.gres}
        values["signal"] = f"B:USR1@{self.signal_seconds}"
        chosen = [f"--{option}={value}" for option, value in values.items() if value is not None]
        return [*chosen, *(word for option in self.extra for word in shlex.split(option))]

    def variables(self) -> dict[str, str]:
        """Variables for the environment of a job."""
        return {
            "ATTEMPTS": str(self.attempts_without_progress),
            "STOP_SECONDS": str(
                max(self.signal_seconds * 5 // 6, 1)
            ),  # the rest is for the notebook, and to queue again
            "LMCORE_SETUP": "\n".join(self.setup),
            **self.environment,
        }

    def folder(self, project: Path) -> Path:
        """Folder in which runs/ lies: `scratch`, else the project's. Raises `UserError` on a variable that is unset."""
        path = os.path.expandvars(os.path.expanduser(self.scratch or ""))
        require("$" not in path, f"The scratch folder {self.scratch} names a variable that is not set.")
        return project / path


def load_site(file: Path, names: typing.Collection[str] | None = ()) -> Site:
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
        site = Site(**converted(values))
        for name, changes in site.jobs.items():
            known = names is None or name in KINDS or name in names
            require(known, f"jobs: there is no job {name!r}; there are {', '.join([*KINDS, *(names or ())])}.")
            require(isinstance(changes, dict), f"jobs: {name} must be a mapping of settings, {{}} for none.")
            for key in ("jobs", "scratch"):
                require(key not in changes, f"jobs: {name} cannot have its own {key}.")
            site.for_job(name, name)
    except UserError as error:
        raise UserError(f"{file}: {error}") from None
    return site


def converted(values: Any) -> dict[str, Any]:
    """Values of a YAML file, all of them text, as the fields of `Site` want them. Raises `UserError`."""
    require(isinstance(values, dict), f"settings must be a mapping of names to values, not {values!r}.")
    types = {known.name: known.type for known in dataclasses.fields(Site)}
    result: dict[str, Any] = {}
    for name, value in values.items():
        require(name in types, f"there is no setting {name!r}; there are {', '.join(types)}.")
        if isinstance(value, str) and value in ("", "~", "null"):
            continue
        if types[name] in (int, int | None):
            require(str(value).isdecimal(), f"{name} must be a whole number, not {value!r}.")
            value = int(value)
        elif name in ("setup", "extra"):
            listed = isinstance(value, list | tuple) and all(isinstance(line, str) for line in value)
            require(listed, f"{name} must be a list of lines, not {value!r}.")
            value = tuple(value)
        elif name in ("environment", "jobs"):
            require(isinstance(value, dict), f"{name} must be a mapping, not {value!r}.")
            plain = name == "jobs" or all(isinstance(text, str) for text in value.values())
            require(plain, f"{name} must map names to plain values.")
        else:
            require(isinstance(value, str), f"{name} must be a plain value, not {value!r}.")
        result[name] = value
    return result
