"""Which jobs a workbook, a notebook or a sweep is, which waits for which, and how each is submitted.

The scripts in papermill_jobs/ run as they stand. What a site changes goes on the command line of sbatch, before which a
script's own options give way; what a job is to do goes into its variables.
"""

import hashlib
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from lmcore.config import TrainConfig, to_dict
from lmcore.errors import require
from lmcore.workbook.jobs.log import output_file, ranges
from lmcore.workbook.jobs.site import Site, seconds_of_limit
from lmcore.workbook.jobs.sweep_definition import SweepDefinition, frozen_file
from lmcore.workbook.notebook import declared_parameters, read_notebook
from lmcore.workbook.parameters import find_notebooks, locate, parse_overrides, resolve_parameters
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
    after: tuple[str, ...] = ()
    """Jobs that must have succeeded or, with `whatever_happens`, have ended."""
    whatever_happens: bool = False
    tasks: tuple[int, ...] = ()
    """Indices of an array; none: not an array."""
    concurrency: int | None = None
    """How many tasks of the array run at a time; None: as many as the cluster lets."""
    processes: tuple[int, int] | None = None
    """Nodes, and processes on each of them; None: as the script has it."""
    gpus: bool = True
    """Whether each of these processes has a GPU."""
    settings: dict[str, Any] | None = None
    """Of a training run, as they are when it is submitted; the variable CONFIG names their file."""
    options: tuple[str, ...] = ()
    """Those of sbatch, but for the dependency."""

    @property
    def script(self) -> str:
        """Path of the script in the project."""
        return f"papermill_jobs/{self.kind}.sbatch"

    def dependency(self, ids: Mapping[str, str]) -> list[str]:
        """Options of sbatch that make it wait; a job that can never start any more is cancelled."""
        how, kill = ("any", []) if self.whatever_happens else ("ok", ["--kill-on-invalid-dep=yes"])
        waits = f"--dependency=after{how}:{':'.join(ids[name] for name in self.after)}"
        return [waits, *kill] if self.after else []


class Chain(NamedTuple):
    """Jobs in an order in which each comes after those that it waits for, and where they run."""

    project: Path
    out: Path
    jobs: Sequence[Job]
    definition: SweepDefinition | None = None
    """The sweep, if it is one."""


def chain_of(
    project: Path,
    out: Path,
    jobs: Sequence[Job],
    site: Site,
    definition: SweepDefinition | None = None,
    time: str | None = None,
) -> Chain:
    """The jobs with the site's options and variables; `time` goes before its time limits.

    Raises `UserError` if a script is missing, or Slurm could not write the logs, or a limit is too short.
    """
    for path in (project, out):  # Slurm takes a backslash in a log's name away
        sentence = f"Slurm cannot write to {str(path)!r}; choose a folder without \\ and line breaks."
        require(not {"\\", "\n"} & set(str(path)), sentence)
    ready = []
    for job in jobs:
        own, script = site.for_job(job.kind, job.name, **({} if time is None else {"time": time})), project / job.script
        if job.processes is not None:
            kind = own.get("gpus", "").rpartition(":")[0]
            own = own.for_job(gpus=f"{kind}:{job.processes[1]}".lstrip(":") if job.gpus else "0")
        require(script.is_file(), f"There is no file {script}; take it from the project's repository.")
        default = re.search(r"^#SBATCH --time=(\S+)", script.read_text(encoding="utf-8"), re.MULTILINE)
        limit = own.get("time") or (default and default[1])
        require(
            not limit or seconds_of_limit(limit) > own.signal_seconds,
            f"{job.name}: a time limit of {limit} is over before the warning {own.signal_seconds} s ahead of it is of "
            "use; give a longer --time, or set a smaller signal_seconds in site.yaml.",
        )
        log = output_file(str(out).replace("%", "%%"), job.name, "%A_%a" if job.tasks else "%j")
        options = ["--export=ALL", *own.options(), f"--job-name={job.name}", f"--output={log}"]
        if job.tasks:
            options.append(f"--array={ranges(job.tasks)}" + (f"%{job.concurrency}" if job.concurrency else ""))
        if job.processes is not None:
            options += [f"--nodes={job.processes[0]}", f"--ntasks-per-node={job.processes[1]}"]
        ready.append(replace(job, options=tuple(options), variables=own.variables() | job.variables))
    return Chain(project, out, ready, definition)


def described(chain: Chain) -> str:
    """The commands that submit the jobs, as one would type them, with names in place of ids."""
    jobs, out, ids = chain.jobs, str(chain.out), {job.name: f"<{job.name}>" for job in chain.jobs}
    values = jobs[0].variables.items()
    exported = {n: value for n, value in values if value and all(job.variables.get(n) == value for job in jobs)}
    everywhere = set.intersection(*({word.partition("=")[0] for word in job.options} for job in jobs))
    everywhere -= {"--job-name", "--output", "--array"}
    common = [word for word in jobs[0].options if word.partition("=")[0] in everywhere]
    lines = [f"cd {shlex.quote(str(chain.project))}", f"export {assignments(exported)}"]
    lines.append(f"common=({shlex.join(common)})")
    for job in jobs:
        own = [word for word in job.options if word not in common]  # what comes later goes before what is common
        words = shlex.join([*own, *job.dependency(ids), job.script, *job.arguments])
        before = assignments({n: value for n, value in job.variables.items() if value and n not in exported})
        lines.append(f'{before} sbatch "${{common[@]}}" {words}'.strip())
    if shlex.quote(out) == out:
        lines[3:] = [line.replace(f"={out}/", "=$OUT/") for line in lines[3:]]
    return "\n".join(lines)


def assignments(variables: Mapping[str, str]) -> str:
    """Variables as a shell takes them."""
    return " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())


def notebook_jobs(
    project: Path,
    out: Path,
    scale: str,
    data: str,
    notebooks: Sequence[str] = (),
    parameters: Sequence[str] = (),
    one_job: bool = False,
    writeup: bool = True,
) -> tuple[Job, ...]:
    """One job for each notebook, and the writeup last, also when one failed; or all in one job; or one without writeup.

    Each notebook gets those of the `parameters` that it declares. Raises `UserError` on unknown notebooks, scales and
    parameters, and on data that is not there.
    """
    if (out / RECORD).exists():
        read_plan(out)
    paths = find_notebooks(project, notebooks or None)
    variables = {"SCALE": scale, "DATA": locate(data), "OUT": str(out)}
    common = {name.lower(): value for name, value in variables.items()}
    resolve_parameters(project, paths, scale, parse_overrides(parameters), common)
    names = tuple(path.stem for path in paths)
    require(writeup or len(names) == 1, f"{', '.join(notebooks)!r} names {len(names)} notebooks: {', '.join(names)}.")
    if one_job:
        chosen = variables | {"NOTEBOOKS": " ".join(names) if notebooks else ""}
        return (Job("workbook", "workbook", chosen, ("--parameters", *parameters) if parameters else ()),)
    jobs = []
    for path in paths:
        declared = declared_parameters(read_notebook(path), path.stem)
        own = [pair for pair in parameters if pair.partition("=")[0] in declared]
        arguments = ("--parameters", *own) if own else ()
        needed = NEEDS.get(path.stem.partition("_")[2])
        after = tuple(name for name in names if needed is not None and name.partition("_")[2] == needed)
        jobs.append(Job(path.stem, "notebook", variables | {"NOTEBOOKS": path.stem}, arguments, after))
    last = (Job("writeup", "writeup", variables, after=names, whatever_happens=True),) if writeup else ()
    return (*jobs, *last)


def train_job(run: Path, config: TrainConfig, gpus: int, nodes: int) -> tuple[Job, ...]:
    """One training run with `gpus` processes on each of `nodes` nodes; log and settings go into its folder.

    Raises `UserError` for settings that so many processes cannot train with, and for a run of other settings.
    """
    from lmcore.run import RunFolder

    for name, value in {"--gpus": gpus, "--nodes": nodes}.items():
        require(value >= 1, f"{name} must be at least 1, not {value}.")
    ranks, folder, values = gpus * nodes, RunFolder(run), to_dict(config)
    require(
        ranks == 1 or config.parallel != "none",
        f"{ranks} processes need a way to divide the work: add --parallel ddp, zero1 or fsdp.",
    )
    require(config.batch_size % ranks == 0, f"batch_size ({config.batch_size}) must divide by {ranks} processes.")
    if folder.config_file.exists():
        folder.require_same(config, folder.data_fingerprint())
    frozen = run / "jobs" / f"settings-{hashlib.sha256(json.dumps(values).encode()).hexdigest()[:8]}.json"
    variables = {"OUT": str(run), "RUN": str(run), "CONFIG": str(frozen), "GPUS": str(gpus)}
    on_cpu = config.device == "cpu"
    return (Job(run.name, "train", variables, processes=(nodes, gpus), gpus=not on_cpu, settings=values),)


def sweep_jobs(definition: SweepDefinition, out: Path, concurrency: int | None = None) -> tuple[Job, ...]:
    """An array over what is unfinished of a sweep, then the table of all of it; nothing if all is finished.

    The tasks follow a frozen copy of the definition, which may be edited before they start. Raises `UserError` on data
    that is not there and on a concurrency below 1.
    """
    from lmcore.workbook.jobs.sweeps import unfinished

    require(concurrency is None or concurrency >= 1, f"--concurrency must be at least 1, not {concurrency}.")
    if definition.kind == "train":
        locate(definition.corpus["data"])
    tasks = tuple(unfinished(definition, out))
    if not tasks:
        return ()
    variables = {"OUT": str(out)}
    frozen = {"SWEEP": str(frozen_file(definition, out))}
    array = Job(definition.name, "sweep", variables | frozen, tasks=tasks, concurrency=concurrency)
    table = f"{definition.name}-table"
    return array, Job(table, "sweep-table", variables, after=(array.name,), whatever_happens=True)
