"""Which jobs a workbook, a notebook or a sweep is, which waits for which, and how each is submitted.

The scripts in papermill_jobs/ run as they stand. What a site changes goes on the command line of sbatch, before which a
script's own options give way; what a job is to do goes into its variables.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lmcore.errors import require
from lmcore.workbook.jobs.log import output_file, ranges
from lmcore.workbook.jobs.site import Site, seconds_of_limit
from lmcore.workbook.jobs.sweep_definition import SweepDefinition, frozen_file
from lmcore.workbook.notebook import declared_parameters, read_notebook
from lmcore.workbook.parameters import find_notebooks, parse_overrides, resolve_parameters
from lmcore.workbook.record import RECORD, read_plan

NEEDS = {"generate": "train"}
"""Notebooks that build on what another one made, by their names without the number; all others run side by side."""


@dataclass(frozen=True)
class Job:
    """One job to be: a script with its variables and arguments, and the jobs that it waits for, by name."""

    name: str
    kind: str
    """The script: papermill_jobs/<kind>.sbatch."""
    variables: dict[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    after_ok: tuple[str, ...] = ()
    """Jobs that must have succeeded."""
    after_any: tuple[str, ...] = ()
    """Jobs that must have ended, however they did."""
    tasks: tuple[int, ...] = ()
    """Indices of an array; none: not an array."""
    concurrency: int | None = None
    """How many tasks of the array run at a time; None: as many as the cluster lets."""

    @property
    def script(self) -> str:
        """Path of the script in the project."""
        return f"papermill_jobs/{self.kind}.sbatch"


@dataclass(frozen=True)
class Chain:
    """Jobs in an order in which each comes after those that it waits for, and where they run."""

    project: Path
    out: Path
    site: Site
    jobs: tuple[Job, ...]
    definition: SweepDefinition | None = None
    """The sweep, if it is one."""
    time: str | None = None
    """A time limit that goes before every one of the site."""

    def variables(self, job: Job) -> dict[str, str]:
        """What a job is to do and what the site says, for its environment."""
        return self.site_of(job).variables() | job.variables

    def site_of(self, job: Job) -> Site:
        """The site's settings for a job."""
        return self.site.for_job(job.kind, job.name).replaced({} if self.time is None else {"time": self.time})

    def options(self, job: Job) -> list[str]:
        """The job's own options of sbatch. Raises `UserError` on a time limit that is over at once."""
        site = self.site_of(job)
        script = (self.project / job.script).read_text(encoding="utf-8")
        default = re.search(r"^#SBATCH --time=(\S+)", script, re.MULTILINE)
        limit = site.time or (default[1] if default else None)
        require(
            limit is None or seconds_of_limit(limit) > site.signal_seconds,
            f"{job.name}: a time limit of {limit} is over before the warning {site.signal_seconds} s ahead of it is of "
            "use; give a longer --time, or set a smaller signal_seconds in site.yaml.",
        )
        log = output_file(str(self.out).replace("%", "%%"), job.name, "%A_%a" if job.tasks else "%j")
        array = f"--array={ranges(job.tasks)}" + (f"%{job.concurrency}" if job.concurrency else "")
        return [f"--job-name={job.name}", f"--output={log}", *([array] if job.tasks else [])]

    def dependency(self, job: Job, ids: Mapping[str, str]) -> list[str]:
        """The option of sbatch that makes it wait; a job that can never start any more is cancelled."""
        waits = [("ok", job.after_ok), ("any", job.after_any)]
        words = [f"after{how}:{':'.join(ids[name] for name in names)}" for how, names in waits if names]
        kill = ["--kill-on-invalid-dep=yes"] if job.after_ok else []
        return [f"--dependency={','.join(words)}", *kill] if words else []

    def check(self) -> None:
        """Raises `UserError` if a script is missing, or Slurm could not write the logs, or a limit is too short."""
        for path in (self.project, self.out):  # Slurm takes a backslash in a log's name away
            sentence = f"Slurm cannot write to {str(path)!r}; choose a folder without \\ and line breaks."
            require(not {"\\", "\n"} & set(str(path)), sentence)
        for job in self.jobs:
            script = self.project / job.script
            require(script.is_file(), f"There is no file {script}; take it from the project's repository.")
            self.options(job)

    def described(self) -> str:
        """The commands that submit the jobs, as one would type them, with names in place of ids."""
        options = {job.name: ["--export=ALL", *self.site_of(job).options()] for job in self.jobs}
        variables = {job.name: self.variables(job) for job in self.jobs}
        first, ids = self.jobs[0].name, {job.name: f"<{job.name}>" for job in self.jobs}
        names = [{word.partition("=")[0] for word in words} for words in options.values()]
        common = [word for word in options[first] if all(word.partition("=")[0] in each for each in names)]
        exported = {name: value for name, value in variables[first].items() if value}
        exported = {n: value for n, value in exported.items() if all(v.get(n) == value for v in variables.values())}
        lines = [f"cd {shlex.quote(str(self.project))}", f"export {assignments(exported)}"]
        lines.append(f"common=({shlex.join(common)})")
        for job in self.jobs:
            own = {name: value for name, value in variables[job.name].items() if value and name not in exported}
            words = [*self.dependency(job, ids), *self.options(job)]  # what comes later goes before what is common
            words += [*(word for word in options[job.name] if word not in common), job.script, *job.arguments]
            lines.append(f'{assignments(own)} sbatch "${{common[@]}}" {shlex.join(words)}'.strip())
            if shlex.quote(str(self.out)) == str(self.out):
                lines[-1] = lines[-1].replace(f"={self.out}/", "=$OUT/")
        return "\n".join(lines)


def assignments(variables: Mapping[str, str]) -> str:
    """Variables as a shell takes them."""
    return " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())


def notebook_jobs(
    project: Path,
    scale: str,
    data: str,
    out: Path,
    notebooks: Sequence[str] = (),
    parameters: Sequence[str] = (),
    one_job: bool = False,
    writeup: bool = True,
) -> tuple[Job, ...]:
    """One job for each notebook, and the writeup last, also when one failed; or all in one job.

    Each notebook gets those of the `parameters` that it declares. Raises `UserError` on unknown notebooks, scales and
    parameters, and on data that is not there.
    """
    from lmcore.workbook.run import locate

    if (out / RECORD).exists():
        read_plan(out)
    paths = find_notebooks(project, notebooks or None)
    located = locate(data)
    common = {"scale": scale, "data": located, "out": str(out)}
    resolve_parameters(project, paths, scale, parse_overrides(parameters), common)
    variables = {"SCALE": scale, "DATA": located, "OUT": str(out)}
    names = tuple(path.stem for path in paths)
    if one_job:
        chosen = variables | {"NOTEBOOKS": " ".join(names) if notebooks else ""}
        return (Job("workbook", "workbook", chosen, ("--parameters", *parameters) if parameters else ()),)
    jobs = []
    for path in paths:
        declared = declared_parameters(read_notebook(path), path.stem)
        own = [pair for pair in parameters if pair.partition("=")[0] in declared]
        needed = NEEDS.get(path.stem.partition("_")[2])
        after = tuple(name for name in names if needed is not None and name.partition("_")[2] == needed)
        arguments = ("--parameters", *own) if own else ()
        jobs.append(Job(path.stem, "notebook", variables | {"NOTEBOOKS": path.stem}, arguments, after_ok=after))
    return (*jobs, Job("writeup", "writeup", variables, after_any=names)) if writeup else tuple(jobs)


def sweep_jobs(definition: SweepDefinition, out: Path, concurrency: int | None = None) -> tuple[Job, ...]:
    """An array over what is unfinished of a sweep, then the table of all of it; nothing if all is finished.

    The tasks follow a frozen copy of the definition, which may be edited before they start. Raises `UserError` on data
    that is not there and on a concurrency below 1.
    """
    from lmcore.workbook.jobs.sweeps import unfinished
    from lmcore.workbook.run import locate

    require(concurrency is None or concurrency >= 1, f"--concurrency must be at least 1, not {concurrency}.")
    if definition.kind == "train":
        locate(definition.corpus["data"])
    tasks = tuple(unfinished(definition, out))
    if not tasks:
        return ()
    variables = {"OUT": str(out)}
    frozen = {"SWEEP": str(frozen_file(definition, out))}
    array = Job(definition.name, "sweep", variables | frozen, tasks=tasks, concurrency=concurrency)
    return array, Job(f"{definition.name}-table", "sweep-table", variables, after_any=(array.name,))
