"""The jobs that can be found from here: in which folders, what they were submitted as, and whether they are alive."""

import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from filelock import FileLock, Timeout

from lmcore.errors import UserError
from lmcore.workbook.jobs.ledger import JobRecord, StateLine, jobs_folder, natural, read_job, read_states, record_files
from lmcore.workbook.jobs.queue import whole
from lmcore.workbook.jobs.site import load_site

LOCAL_LOCK = ".local.lock"
"""File in OUT/jobs/ that is locked while local jobs run."""


@dataclass(frozen=True)
class Job:
    """A job of the ledger, or one that was submitted by hand and wrote a state file."""

    id: str
    out: Path
    record: JobRecord | None
    lines: dict[str, list[StateLine]]
    """What it, or each task of the array, said of itself, by its id."""

    @property
    def is_local(self) -> bool:
        """Whether Slurm has nothing to do with it."""
        return not self.id[:1].isdigit() or (self.record is not None and self.record.scheduler == "local")

    @property
    def submitted(self) -> str:
        """When it was submitted, or first said something, as far as it is known."""
        times = [lines[0].time_utc for lines in self.lines.values() if lines]
        return self.record.submitted_utc if self.record else min(times, default="")


def runs_folders() -> list[Path]:
    """Folders in which output folders lie by default: runs/ of the project, and of the site's scratch folder.

    Outside of a project it is lmcore's checkout, to which `lmcore submit` submits from there.
    """
    here = Path.cwd()
    project = next((folder for folder in (here, *here.parents) if (folder / "papermill_jobs").is_dir()), None)
    if project is None and not (here / "runs").is_dir():
        from lmcore.workbook.parameters import (
            find_project,  # which reads notebooks, by a package that is slow to import
        )

        with suppress(UserError):
            project = find_project()
    project = project or here
    found = [project / "runs"]
    with suppress(UserError):  # what `lmcore submit` refuses, it has not submitted with
        found.append(load_site(project / "papermill_jobs" / "site.yaml", None).folder(project) / "runs")
    return [Path(os.path.relpath(path)) if path.is_relative_to(here) else path for path in dict.fromkeys(found)]


def folders_with_jobs(runs: Path) -> list[Path]:
    """The folders in runs/ and runs/sweeps/ that jobs were submitted for."""
    places = [*sorted(runs.glob("*/jobs")), *sorted((runs / "sweeps").glob("*/jobs"))]
    return [place.parent for place in places if place.is_dir() and place.parent.name != "sweeps"]


def read_ledger(out: Path) -> tuple[list[Job], dict[str, str]]:
    """The jobs of a folder, the first submitted first, and by its id what is wrong with each damaged record."""
    lines: dict[str, dict[str, list[StateLine]]] = {}
    for path in sorted(jobs_folder(out).glob("*.state")):
        with suppress(UserError):
            lines.setdefault(whole(path.stem), {})[path.stem] = read_states(path)
    records, damaged = [], {}
    for path in sorted(record_files(out), key=lambda path: natural(path.stem)):
        try:
            records.append(read_job(path))
        except UserError as error:
            damaged[path.stem] = str(error)
    jobs = [Job(record.id, out, record, lines.pop(record.id, {})) for record in records]
    jobs += [Job(id, out, None, own) for id, own in lines.items() if id not in damaged]
    return sorted(jobs, key=lambda job: (job.submitted, natural(job.id))), damaged


def this_attempt(lines: Sequence[StateLine]) -> list[str]:
    """What the job said since it was last started."""
    words = [line.state for line in lines]
    return words[len(words) - words[::-1].index("running") :] if "running" in words else words


def local_jobs_run(out: Path) -> bool:
    """Whether the process that runs the local jobs of this folder, one after another, is there."""
    lock = FileLock(jobs_folder(out) / LOCAL_LOCK)
    try:
        with lock.acquire(timeout=0):
            return False
    except Timeout:
        return True
    except OSError:  # a folder that can only be read
        return False


def is_gone(id: str, host: str | None) -> bool:
    """Whether a local job has no process any more; unknown, thus not, on another host than this."""
    if host not in (socket.gethostname(), socket.gethostname().split(".")[0]):
        return False
    for process in psutil.process_iter():
        try:
            if process.environ().get("LMCORE_JOB_ID") == id and process.status() != psutil.STATUS_ZOMBIE:
                return False
        except (psutil.Error, OSError):
            continue
    return True
