"""What differs between clusters: papermill_jobs/site.yaml, read into options of sbatch."""

import dataclasses
import os
import re
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from lmcore.errors import UserError, require
from lmcore.workbook.jobs.ledger import Kind

KINDS = typing.get_args(Kind)
NUMBERS = ("cpus_per_task", "signal_seconds", "attempts_without_progress")
OPTIONS = {
    "account": "account",
    "partition": "partition",
    "qos": "qos",
    "gpus": "gpus",
    "gres": "gres",
    "cpus_per_task": "cpus-per-task",
    "memory": "mem",
    "time": "time",
    "constraint": "constraint",
    "reservation": "reservation",
}
"""Options of sbatch by field."""

OWN_VARIABLES = ("LMCORE_PROJECT", "SCALE", "DATA", "OUT", "NOTEBOOKS", "SWEEP", "ATTEMPTS", "STOP_SECONDS", "PATH")
"""What `environment` may not set: where a job's results go is fixed when it is submitted."""

OWN_OPTIONS = re.compile(r"-[oJa].*|--(output|job-name|array|signal|open-mode|no-requeue)([= ].*)?")
"""What `extra` may not say: logs and arrays would not be found again, or the job not be queued again."""

TIME = re.compile(r"\d+|\d+:\d\d(:\d\d)?|\d+-\d+(:\d\d){0,2}")
"""Minutes, minutes:seconds, hours:minutes:seconds, days-hours[:minutes[:seconds]] (sbatch's manual page)."""


def seconds_of_limit(time: str) -> int | None:
    """A time limit as sbatch takes it, in seconds; None: no limit (0), or none that can be read here."""
    if not TIME.fullmatch(time):
        return None
    days, dash, clock = time.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    if dash:
        hours, minutes, seconds = [*parts, 0, 0][:3]
    else:
        hours, minutes, seconds = [0, *parts] if len(parts) == 2 else [*parts, 0, 0, 0][:3]
        if len(parts) == 1:
            hours, minutes = 0, parts[0]
    return (((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds) or None


@dataclass(frozen=True)
class Site:
    """Settings of one cluster. What is None stays as the plain scripts have it."""

    account: str | None = None
    partition: str | None = None
    qos: str | None = None
    gpus: str | None = None
    """As --gpus: a number, or kind:number; 0: no GPU."""
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
        whole = self.time is None or TIME.fullmatch(self.time)
        require(bool(whole), f"time must be minutes, hours:minutes:seconds or days-hours, not {self.time!r}.")
        for name in NUMBERS:
            value = getattr(self, name)
            require(value is None or value >= 1, f"{name} must be at least 1, not {value}.")
        require(self.signal_seconds <= 65535, f"signal_seconds must be at most 65535, not {self.signal_seconds}.")
        for name in self.environment:
            require(re.fullmatch(r"[A-Za-z_]\w*", name) is not None, f"environment: {name!r} is no variable's name.")
            own = name not in OWN_VARIABLES
            require(
                own, f"environment: {name} is set by lmcore submit itself; change PATH in setup, others by its words."
            )
        for option in self.extra:
            require(re.match(r"--?[a-zA-Z]", option) is not None, f"extra: {option!r} is not an option of sbatch.")
            own = OWN_OPTIONS.fullmatch(option) is None
            require(own, f"extra: {option!r} is set by lmcore submit itself; remove it (signal_seconds sets --signal).")
        for name in [*OPTIONS, "scratch"]:
            line = "\n" not in str(getattr(self, name))
            require(line, f"{name} must be one line.")
        for line in (*self.setup, *self.extra):
            require("\n" not in line, f"{line.splitlines()[0]!r}: write further lines as entries of their own.")

    def for_job(self, kind: str, name: str) -> "Site":
        """The settings of one job: `jobs` may have other values for its kind, and for its name."""
        changed = self
        for key in dict.fromkeys((kind, name)):
            changed = changed.replaced(self.jobs.get(key, {}))
        return changed

    def replaced(self, values: dict[str, Any]) -> "Site":
        """A copy with other values; one of gpus and gres puts the other out of force."""
        values = converted(values)
        for one, other in (("gpus", "gres"), ("gres", "gpus")):
            if values.get(one) is not None and other not in values:
                values[other] = None
        return dataclasses.replace(self, **values)

    def options(self) -> dict[str, str | None]:
        """Options of sbatch by long name; None: the plain script's one is to go."""
        options: dict[str, str | None] = {
            option: str(value) for name, option in OPTIONS.items() if (value := getattr(self, name)) is not None
        }
        if self.gpus is not None:
            options["gres"] = None
        if self.gpus is not None and self.gpus.rpartition(":")[2].strip("0") == "":
            options["gpus"] = None
        return options | {"signal": f"B:USR1@{self.signal_seconds}"}

    def folder(self, project: Path) -> Path:
        """Folder in which runs/ lies: `scratch`, else the project's. Raises `UserError` on a variable that is unset."""
        if self.scratch is None:
            return project
        path = os.path.expandvars(os.path.expanduser(self.scratch))
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
    names = [known.name for known in dataclasses.fields(Site)]
    result = {}
    for name, value in values.items():
        require(name in names, f"there is no setting {name!r}; there are {', '.join(names)}.")
        if isinstance(value, str) and value in ("", "~", "null"):
            continue
        if name in NUMBERS:
            require(str(value).isdecimal(), f"{name} must be a whole number, not {value!r}.")
            result[name] = int(value)
        elif name in ("setup", "extra"):
            listed = isinstance(value, list | tuple) and all(isinstance(line, str) for line in value)
            require(listed, f"{name} must be a list of lines, not {value!r}.")
            result[name] = tuple(value)
        elif name in ("environment", "jobs"):
            require(isinstance(value, dict), f"{name} must be a mapping, not {value!r}.")
            plain = name == "jobs" or all(isinstance(text, str) for text in value.values())
            require(plain, f"{name} must map names to plain values.")
            result[name] = dict(value)
        else:
            require(isinstance(value, str), f"{name} must be a plain value, not {value!r}.")
            result[name] = value
    return result
