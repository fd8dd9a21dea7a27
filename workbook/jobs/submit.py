"""`workbook submit`: a job of Slurm for each notebook, and one for the writeup.

The scripts in papermill_jobs/ are submitted as they stand. What a site changes goes on the command line of sbatch,
before which a script's own options give way; what a job is to do goes into its variables.
"""

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    """One job to be: a script with its arguments, and the jobs that it waits for, by name."""

    name: str
    script: str
    """papermill_jobs/<script>.sbatch."""
    arguments: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    even_if_failed: bool = False
    """Whether it runs, too, when one of these jobs has failed."""

    @property
    def notebook(self) -> str:
        """The notebook that it executes, if it does."""
        return self.name if self.script == "workbook" else ""


@dataclass(frozen=True)
class Chain:
    """The jobs of a workbook, each after those that it waits for, with what they have in common."""

    project: Path
    out: Path
    scale: str
    data: str
    jobs: Sequence[Job]
    site: Mapping[str, Any]
    options: tuple[str, ...] = ()
    """Options of sbatch for all of them, in place of the site's."""

    def settings(self, job: Job) -> dict[str, Any]:
        """What the site wants for this job."""
        special = self.site.get("jobs", {})
        return {**self.site, **special.get(job.script, {}), **special.get(job.name, {})}

    def words(self, job: Job, ids: Mapping[str, str]) -> list[str]:
        """The arguments of sbatch; a job that can never start any more is cancelled."""
        log = f"{self.out}/jobs/{job.name}".replace("%", "%%") + "-%j.log"
        words = [f"--job-name={job.name}", f"--output={log}", "--export=ALL"]
        words += [f"--{name}={value}" for name, value in self.settings(job).items() if value and name not in OURS]
        words += self.options
        if job.after:
            how = "afterany" if job.even_if_failed else "afterok"
            words.append(f"--dependency={how}:{':'.join(ids[name] for name in job.after)}")
            words.append("--kill-on-invalid-dep=yes")
        return [*words, f"papermill_jobs/{job.script}.sbatch", *job.arguments]

    def variables(self, job: Job) -> dict[str, str]:
        """What is added to the environment of sbatch."""
        settings = self.settings(job)
        task = {"SCALE": self.scale, "DATA": self.data, "OUT": str(self.out), "NOTEBOOKS": job.notebook}
        return settings.get("environment", {}) | {"LMCORE_SETUP": settings.get("setup", "")} | task

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
        before = [earlier[job.name] for job in self.jobs if job.name in earlier]
        active = [id for id in slurm.call("squeue", "--me", "--noheader", "--format=%A").split() if id in before]
        still = f"Jobs of {self.out} are still queued or running ({', '.join(active)})"
        require(not active, f"{still}: wait for them, or cancel them with scancel.")
        # the `workbook` of this process is the jobs' too
        environment = slurm.outside_of_jobs() | {"PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"}
        try:
            write_json(self.out / SUBMITTED, earlier)  # the folder of their logs
            # a writeup names them all
            plan(self.out, self.scale, self.data, [job.notebook for job in self.jobs if job.notebook])
            for job in self.jobs:
                ids[job.name] = slurm.sbatch(self.words(job, ids), self.project, environment | self.variables(job))
            write_json(self.out / SUBMITTED, earlier | ids)
        except BaseException:  # no half of a chain stays, also after Ctrl-C
            if ids:
                slurm.call("scancel", *ids.values())
            raise
        return ids


def chain(
    out: Path, scale: str, data: str, notebooks: Sequence[str], parameters: Sequence[str], writeup: bool, **how: Any
) -> Chain:
    """One job for each notebook, and the writeup last, also when one failed; `how` is the chain's `site` and `options`.

    Each notebook gets those of the `parameters` that it declares. Raises `UserError` on unknown notebooks, scales and
    parameters, and on data that is not there.
    """
    project, data = find_project(), locate(data)
    paths = find_notebooks(project, notebooks)
    common = {"scale": scale, "data": data, "out": str(out)}
    resolved = resolve_parameters(project, paths, scale, parse_overrides(parameters), common)
    names, jobs = tuple(path.stem for path in paths), []
    for name in names:
        own = [pair for pair in parameters if pair.partition("=")[0] in resolved[name]]
        words = ["--no-writeup", *(["--parameters", *own] if own else [])]
        after = tuple(other for other in names if other == NEEDS.get(name))
        jobs.append(Job(name, "workbook", tuple(words), after))
    if writeup:
        jobs.append(Job("writeup", "writeup", after=names, even_if_failed=True))
    return Chain(project, out, scale, data, jobs, **how)


def submitted(out: Path) -> dict[str, str]:
    """The id of the latest job of each name that was submitted for an output folder."""
    return read_json(out / SUBMITTED) if (out / SUBMITTED).exists() else {}
