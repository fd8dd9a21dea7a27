"""`workbook submit`: which Slurm jobs a workbook or a training run is.

The scripts in papermill_jobs/ run as they stand. What a site changes goes on the command line of sbatch, before which a
script's own options give way; what a job is to do goes into its variables.
"""

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lmcore.config import TrainConfig, to_dict
from lmcore.errors import require
from lmcore.files import read_json, write_json
from workbook.jobs import slurm
from workbook.jobs.site import OURS
from workbook.parameters import find_notebooks, find_project, locate, parse_overrides, resolve_parameters
from workbook.record import plan

NEEDS = {"03_generate": "02_train"}
"""Notebooks that build on what another one made; all others run side by side."""

SUBMITTED = Path("jobs") / "submitted.json"
"""In an output folder: its jobs, see `submitted`."""


@dataclass(frozen=True)
class Job:
    """One job to be: a script with its variables and arguments, and the jobs that it waits for, by name."""

    name: str
    script: str
    """papermill_jobs/<script>.sbatch."""
    variables: dict[str, str]
    arguments: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    even_if_failed: bool = False
    """Whether it runs, too, when one of these jobs has failed."""
    gpus: int | None = None
    """GPUs of each node; None: as the site has it."""
    options: tuple[str, ...] = ()
    """More options of sbatch."""
    files: Mapping[Path, Any] = field(default_factory=dict)
    """What it reads, as JSON, written when it is submitted."""


def notebook_jobs(
    out: Path, scale: str, data: str, notebooks: Sequence[str], parameters: Sequence[str], writeup: bool
) -> list[Job]:
    """One job for each notebook, and the writeup last, also when one failed.

    Each notebook gets those of the `parameters` that it declares. Raises `UserError` on unknown notebooks, scales and
    parameters, and on data that is not there.
    """
    project = find_project()
    paths = find_notebooks(project, notebooks)
    shared = {"SCALE": scale, "DATA": locate(data)}
    common = {"scale": scale, "data": shared["DATA"], "out": str(out)}
    resolved = resolve_parameters(project, paths, scale, parse_overrides(parameters), common)
    names, jobs = tuple(path.stem for path in paths), []
    for path in paths:
        own = [pair for pair in parameters if pair.partition("=")[0] in resolved[path.stem]]
        words = ["--no-writeup", *(["--parameters", *own] if own else [])]
        after = tuple(name for name in names if name == NEEDS.get(path.stem))
        jobs.append(Job(path.stem, "workbook", shared | {"NOTEBOOKS": path.stem}, tuple(words), after))
    return [*jobs, *([Job("writeup", "writeup", shared, after=names, even_if_failed=True)] if writeup else [])]


def train_job(run: Path, config: TrainConfig, gpus: int, nodes: int) -> Job:
    """One training run with `gpus` processes on each of `nodes` nodes, whose settings are run/jobs/config.json.

    Raises `UserError` for settings that so many processes cannot train with.
    """
    ranks = gpus * nodes
    divided = f"{ranks} processes need a way to divide the work: add --strategy ddp, zero1 or fsdp."
    require(gpus >= 1 and nodes >= 1, "--gpus and --nodes must be at least 1.")
    require(ranks == 1 or config.strategy != "none", divided)
    require(config.batch_size % ranks == 0, f"batch_size ({config.batch_size}) must divide by {ranks} processes.")
    file, size = run / "jobs" / "config.json", (f"--nodes={nodes}", f"--ntasks-per-node={gpus}")
    variables = {"RUN": str(run), "CONFIG": str(file), "GPUS": str(gpus)}
    gpus = 0 if config.device == "cpu" else gpus
    return Job(run.name, "train", variables, gpus=gpus, options=size, files={file: to_dict(config)})


@dataclass(frozen=True)
class Chain:
    """Jobs, each after those that it waits for, and what the site wants for them."""

    project: Path
    out: Path
    site: Mapping[str, Any]
    jobs: Sequence[Job]
    options: tuple[str, ...] = ()
    """Options of sbatch for all of them, in place of the site's."""

    def settings(self, job: Job) -> dict[str, Any]:
        """What the site wants for this job; of its `gres` the kind of GPU where the job has a number of its own."""
        settings = dict(self.site)
        for name in (job.script, job.name):
            settings |= self.site.get("jobs", {}).get(name, {})
        if job.gpus is not None:
            kind = settings.get("gres", "").rpartition(":")[0] or "gpu"
            settings["gres"] = f"{kind}:{job.gpus}" if job.gpus else "none"
        return settings

    def words(self, job: Job, ids: Mapping[str, str]) -> list[str]:
        """The arguments of sbatch; a job that can never start any more is cancelled."""
        log = f"{self.out}/jobs/{job.name}".replace("%", "%%") + "-%j.log"
        words = [f"--job-name={job.name}", f"--output={log}", "--export=ALL"]
        words += [f"--{name}={value}" for name, value in self.settings(job).items() if value and name not in OURS]
        words += [*self.options, *job.options]
        if job.after:
            how = "afterany" if job.even_if_failed else "afterok"
            words.append(f"--dependency={how}:{':'.join(ids[name] for name in job.after)}")
            words.append("--kill-on-invalid-dep=yes")
        return [*words, f"papermill_jobs/{job.script}.sbatch", *job.arguments]

    def variables(self, job: Job) -> dict[str, str]:
        """What is added to the environment of sbatch."""
        settings = self.settings(job)
        setup = {"LMCORE_SETUP": settings.get("setup", ""), "OUT": str(self.out)}
        return settings.get("environment", {}) | setup | job.variables

    def described(self) -> str:
        """The commands that submit the jobs, as one would type them, with names in place of ids."""
        ids, lines = {job.name: f"<{job.name}>" for job in self.jobs}, [f"cd {shlex.quote(str(self.project))}"]
        for job in self.jobs:
            values = [f"{name}={shlex.quote(value)}" for name, value in self.variables(job).items() if value]
            lines.append(f"{' '.join(values)} sbatch {shlex.join(self.words(job, ids))}")
        return "\n\n".join(lines)

    def submit(self) -> dict[str, str]:
        """Submits the jobs in their order; returns their ids by name.

        Raises `UserError` if jobs of these names and this folder are still queued or running, and if Slurm refuses one:
        those that were submitted before it are then cancelled.
        """
        earlier, ids = submitted(self.out), dict[str, str]()
        # the `workbook` of this process is the jobs' too
        environment = slurm.outside_of_jobs() | {"PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"}
        before = [earlier[job.name] for job in self.jobs if job.name in earlier]
        active = ", ".join(slurm.queue(before, "--noheader", "--format=%i").split())
        busy = f"Jobs of {self.out} are still queued or running ({active}): wait for them, or cancel them with scancel."
        require(not active, busy)
        try:
            write_json(self.out / SUBMITTED, earlier)  # the folder of their logs
            for file, value in (pair for job in self.jobs for pair in job.files.items()):
                write_json(file, value)
            if names := [job.variables["NOTEBOOKS"] for job in self.jobs if "NOTEBOOKS" in job.variables]:
                # a writeup names them all
                plan(self.out, self.jobs[0].variables["SCALE"], self.jobs[0].variables["DATA"], names)
            for job in self.jobs:
                ids[job.name] = slurm.sbatch(self.words(job, ids), self.project, environment | self.variables(job))
            write_json(self.out / SUBMITTED, earlier | ids)
        except BaseException:  # no half of a chain stays, also after Ctrl-C
            if ids:
                slurm.call("scancel", *ids.values())
            raise
        return ids


def submitted(out: Path) -> dict[str, str]:
    """The id of the latest job of each name that was submitted for an output folder."""
    return read_json(out / SUBMITTED) if (out / SUBMITTED).exists() else {}
