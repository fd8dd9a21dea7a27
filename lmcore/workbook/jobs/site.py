"""What differs between clusters: papermill_jobs/site.yaml, read into options of sbatch."""

import dataclasses
import os
import re
import shlex
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from lmcore.errors import UserError, require

KINDS = ("workbook", "notebook", "writeup", "sweep", "sweep-table")
"""The scripts in papermill_jobs/, without .sbatch."""

OWN_VARIABLES = ("SCALE", "DATA", "OUT", "NOTEBOOKS", "SWEEP", "ATTEMPTS", "STOP_SECONDS", "LMCORE_SETUP", "PATH")
"""What `environment` may not set: where a job's results go is fixed when it is submitted."""

OWN_OPTIONS = re.compile(r"-[oJa].*|--(output|job-name|array|signal|open-mode|no-requeue)([= ].*)?")
"""What `extra` may not say: logs and arrays would not be found again, or the job not be queued again."""

MUST_BE = {list: "a list of lines", dict: "a mapping", str: "a plain value"}


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


@dataclass(frozen=True)
class Site:
    """Settings of one cluster, as they are written in its file. What is None stays as the scripts have it."""

    account: str | None = None
    partition: str | None = None
    qos: str | None = None
    gpus: str | None = None
    """A number, or kind:number: short for `gres` gpu:number; 0: no GPU."""
    gres: str | None = None
    """As --gres, in place of `gpus`."""
    cpus_per_task: str | None = None
    memory: str | None = None
    time: str | None = None
    constraint: str | None = None
    reservation: str | None = None
    setup: list[str] = field(default_factory=list)
    """Lines of shell before anything else."""
    environment: dict[str, str] = field(default_factory=dict)
    scratch: str | None = None
    """Folder under which results lie unless they are named; ~ and $VARIABLES stand for what they are on submission."""
    signal_seconds: str = "120"
    attempts_without_progress: str = "3"
    extra: list[str] = field(default_factory=list)
    jobs: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Other values by kind or name of job."""

    def __post_init__(self):
        for name, value in vars(self).items():
            kind = {"setup": list, "extra": list, "environment": dict, "jobs": dict}.get(name, str)
            require(value is None or isinstance(value, kind), f"{name} must be {MUST_BE[kind]}, not {value!r}.")
        for line in (*self.setup, *self.extra, *self.environment.values()):
            require(isinstance(line, str), f"setup, extra and environment must hold plain values, not {line!r}.")
        for name in ("cpus_per_task", "signal_seconds", "attempts_without_progress"):
            value = getattr(self, name) or "1"
            whole = value.isdecimal() and 0 < int(value) < 65536
            require(whole, f"{name} must be a whole number from 1 to 65535, not {value!r}.")
        counted = re.fullmatch(r"([\w.-]+:)?\d+", self.gpus or "0") is not None
        require(counted, f"gpus must be a number or kind:number, not {self.gpus!r}.")
        require(self.gpus is None or self.gres is None, "gpus and gres ask for the same thing; set one of them.")
        seconds_of_limit(self.time or "1")
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

    def replaced(self, values: Any) -> "Site":
        """A copy with other values; one of gpus and gres puts the other out of force. Raises `UserError`."""
        require(isinstance(values, dict), f"settings must be a mapping of names to values, not {values!r}.")
        for name in values:
            require(name in vars(self), f"there is no setting {name!r}; there are {', '.join(vars(self))}.")
        values = {name: value for name, value in values.items() if value not in ("", "~", "null")}
        for one, other in (("gpus", "gres"), ("gres", "gpus")):
            if one in values:
                values.setdefault(other, None)
        return dataclasses.replace(self, **values)

    def for_job(self, kind: str, name: str) -> "Site":
        """The settings of one job: `jobs` may have other values for its kind, and for its name."""
        return self.replaced(self.jobs.get(kind, {})).replaced(self.jobs.get(name, {}))

    def options(self) -> list[str]:
        """Options for the command line of sbatch, which go before those in the script."""
        gres = self.gres
        if self.gpus is not None:
            gres = "none" if self.gpus.rpartition(":")[2].strip("0") == "" else f"gpu:{self.gpus}"
        values = {
            "account": self.account, "partition": self.partition, "qos": self.qos, "gres": gres,
            "cpus-per-task": self.cpus_per_task, "mem": self.memory, "time": self.time, "constraint": self.constraint,
            "reservation": self.reservation, "signal": f"B:USR1@{self.signal_seconds}",
        }  # fmt: skip
        chosen = [f"--{option}={value}" for option, value in values.items() if value is not None]
        return [*chosen, *(word for option in self.extra for word in shlex.split(option))]

    def variables(self) -> dict[str, str]:
        """Variables for the environment of a job."""
        stop_seconds = int(self.signal_seconds) * 5 // 6  # the rest is for the notebook, and to queue again
        own = {"ATTEMPTS": self.attempts_without_progress, "STOP_SECONDS": str(max(stop_seconds, 1))}
        return {**own, "LMCORE_SETUP": "\n".join(self.setup), **self.environment}

    def folder(self, project: Path) -> Path:
        """Folder in which runs/ lies: `scratch`, else the project's. Raises `UserError` on a variable that is unset."""
        path = os.path.expandvars(os.path.expanduser(self.scratch or ""))
        require("$" not in path, f"The scratch folder {self.scratch} names a variable that is not set.")
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
        site = Site().replaced(values)
        for name, changes in site.jobs.items():
            known = names is None or name in KINDS or name in names
            require(known, f"jobs: there is no job {name!r}; there are {', '.join([*KINDS, *(names or ())])}.")
            require(isinstance(changes, dict), f"jobs: {name} must be a mapping of settings, {{}} for none.")
            for key in ("jobs", "scratch"):
                require(key not in changes, f"jobs: {name} cannot have its own {key}.")
            site.replaced(changes)
    except UserError as error:
        raise UserError(f"{file}: {error}") from None
    return site
