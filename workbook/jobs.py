"""`workbook submit`: a job of Slurm for each notebook, and one for the writeup.

The scripts in papermill_jobs/ are submitted as they stand. What a site changes goes on the command line of sbatch,
before which a script's own options give way; what a job is to do goes into its variables.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lmcore.errors import require
from workbook.parameters import find_notebooks, find_project, locate, parse_overrides, read_mapping, resolve_parameters
from workbook.record import plan
from workbook.run import run

NEEDS = {"03_generate": "02_train"}
"""Notebooks that build on what another one made; all others run side by side."""

OURS = ("setup", "environment", "jobs")
"""A site's settings that are ours; every other one is an option of sbatch by its own name."""

OF_A_JOB, KEPT = ("SLURM_", "MASTER_"), ("SLURM_CONF", "SLURM_CLUSTERS")
"""How variables begin that a job around this process has set, and those that are the cluster's all the same."""


def submit(
    scale: str = "smoke",
    data: str = "embedded",
    out: Path | None = None,
    notebooks: tuple[str, ...] = (),
    parameters: tuple[str, ...] = (),
    writeup: bool = True,
    site: Path | None = None,
    dry_run: bool = False,
    local: bool = False,
) -> int:
    """Submit the workbook: a job for each notebook, then one for the writeup, also when a notebook failed.

    Notebooks run side by side, but 03_generate after 02_train. A job waits for earlier ones of its name, which is that
    of its notebook and its folder. Exit codes: 0 submitted, 2 refused, nothing is left in the queue.

    Args:
        scale: smoke, laptop or gpu: a folder in papermill_jobs/parameters/.
        data: embedded, a corpus to download (tinystories, ...), or a text file, a folder of text, a prepared corpus.
        out: Folder for everything that is made (default: runs/<scale>).
        notebooks: Only these, by number or name.
        parameters: Parameters of the notebooks that are to have other values: workers=2.
        writeup: Make the writeup, too.
        site: What your cluster wants (default: papermill_jobs/site.yaml).
        dry_run: Only show how the jobs would be submitted.
        local: Run the notebooks here, one after the other, keeping those that are done.
    """
    if local:
        return run(scale, data, out, notebooks, parameters, resume=True, writeup=writeup)
    project, data = find_project(), locate(data)
    out = (out or project / "runs" / scale).resolve()
    file = site or project / "papermill_jobs" / "site.yaml"
    wishes = load_site(file) if site or file.is_file() else {}
    common = {"scale": scale, "data": data, "out": str(out)}
    paths = find_notebooks(project, notebooks)
    resolved = resolve_parameters(project, paths, scale, parse_overrides(parameters), common)
    task = {"SCALE": scale, "DATA": data, "OUT": str(out)}
    jobs = []
    for name, known in resolved.items():
        own = [pair for pair in parameters if pair.partition("=")[0] in known]
        arguments = ["--no-writeup", *(["--parameters", *own] if own else [])]
        after = f",afterok:<{NEEDS[name]}>" if NEEDS.get(name) in resolved else ""
        jobs.append(job(name, "workbook", arguments, after, wishes, task | {"NOTEBOOKS": name}))
    if writeup:
        after = f",afterany:{':'.join(f'<{name}>' for name in resolved)}"
        jobs.append(job("writeup", "writeup", [], after, wishes, task | {"NOTEBOOKS": ""}))
    if dry_run:
        print(f"cd {shlex.quote(str(project))}", *(each.described() for each in jobs), sep="\n\n")
        return 0
    require(shutil.which("sbatch") is not None, "There is no sbatch here; without Slurm, --local runs the notebooks.")
    (out / "jobs").mkdir(parents=True, exist_ok=True)  # for their logs
    plan(out, scale, data, [*resolved])  # a writeup names them all
    ids = dict[str, str]()
    try:
        for each in jobs:
            ids[each.name] = each.submit(project, ids)
    except BaseException:  # no half of a chain stays, also after Ctrl-C
        if ids:
            subprocess.run(["scancel", *ids.values()], check=False)
        raise
    print("\n".join(f"{id}  {name}" for name, id in ids.items()))
    print(f"Their logs are in {out / 'jobs'}. To watch them: squeue --me")
    return 0


@dataclass(frozen=True)
class Job:
    """A job to be: the arguments of sbatch, in which a job that it waits for is <its name>, and what is exported."""

    name: str
    words: list[str]
    variables: dict[str, str]

    def described(self) -> str:
        """The command that submits it, as one would type it."""
        values = [f"{name}={shlex.quote(value)}" for name, value in self.variables.items() if value]
        return f"{' '.join(values)} sbatch {shlex.join(self.words)}"

    def submit(self, project: Path, ids: Mapping[str, str]) -> str:
        """Submits it from the project's folder and returns its id; `ids` are those of the jobs before it.

        It inherits this process's environment but what a job around it has set. Raises `UserError` with Slurm's words.
        """
        first, *others = self.words
        words = ["sbatch", "--parsable", re.sub("<(.*?)>", lambda name: ids[name[1]], first), *others]
        own = {name: value for name, value in os.environ.items() if name in KEPT or not name.startswith(OF_A_JOB)}
        own["PATH"] = f"{Path(sys.executable).parent}:{own['PATH']}"  # the `workbook` of this process is the job's
        done = subprocess.run(words, cwd=project, env=own | self.variables, capture_output=True, text=True, check=False)
        said = " ".join(line.removeprefix("sbatch: error: ").rstrip(".") for line in done.stderr.splitlines())
        require(done.returncode == 0, f"sbatch: {said}. What your cluster wants goes into papermill_jobs/site.yaml.")
        found = re.search(r"^(?:Submitted batch job )?(\d+)(?:;\S*)?\s*$", done.stdout, re.MULTILINE)  # sites add lines
        require(found is not None, f"sbatch gave no job id, but {done.stdout.strip()!r}.")
        return found[1]


def job(
    name: str, script: str, arguments: Sequence[str], after: str, site: Mapping[str, Any], task: Mapping[str, str]
) -> Job:
    """The job that runs papermill_jobs/<script>.sbatch as the site wants it, `after` others.

    It also waits for earlier jobs of its name (singleton), and is cancelled when it can never start any more.
    """
    wish = {**site, **site.get("jobs", {}).get(script, {}), **site.get("jobs", {}).get(name, {})}
    log = f"{task['OUT']}/jobs/{name}".replace("%", "%%") + "-%j.log"
    words = [f"--dependency=singleton{after}", "--kill-on-invalid-dep=yes"]
    words += [f"--job-name={name}.{Path(task['OUT']).name}", f"--output={log}", "--export=ALL"]
    words += [f"--{option}={value}" for option, value in wish.items() if value and option not in OURS]
    variables = {**wish.get("environment", {}), "LMCORE_SETUP": wish.get("setup", ""), **task}
    return Job(name, [*words, f"papermill_jobs/{script}.sbatch", *arguments], variables)


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
