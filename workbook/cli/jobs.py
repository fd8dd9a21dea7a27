"""`workbook submit`, `status` and `requeue`: the notebooks as Slurm jobs."""

import shutil
from pathlib import Path
from typing import Annotated

import tyro

from lmcore.errors import require
from workbook.parameters import find_project
from workbook.run import run

Folders = Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[OUT ...]", help_behavior_hint="")]


def submit(
    scale: str = "smoke",
    data: str = "embedded",
    out: Path | None = None,
    notebooks: tuple[str, ...] = (),
    parameters: tuple[str, ...] = (),
    writeup: bool = True,
    site: Path | None = None,
    time: str | None = None,
    dry_run: bool = False,
    local: bool = False,
) -> int:
    """Submit the workbook: a job for each notebook, then one for the writeup, also when a notebook failed.

    Notebooks run side by side, but 03_generate after 02_train. Exit codes: 0 submitted, 2 refused, nothing is left in
    the queue.

    Args:
        scale: smoke, laptop or gpu: a folder in papermill_jobs/parameters/.
        data: embedded, a corpus to download (tinystories, ...), or a text file, a folder of text, a prepared corpus.
        out: Folder for everything that is made (default: runs/<scale>).
        notebooks: Only these, by number or name.
        parameters: Parameters of the notebooks that are to have other values: workers=2.
        writeup: Make the writeup, too.
        site: What your cluster wants (default: papermill_jobs/site.yaml).
        time: Limit of each job, in place of the site's; a job that needs longer resumes in the next one.
        dry_run: Only show how the jobs would be submitted.
        local: Run the notebooks here, one after the other, keeping those that are done.
    """
    if local:
        return run(scale, data, out, notebooks, parameters, resume=True, writeup=writeup)
    from workbook.jobs.site import load_site
    from workbook.jobs.submit import chain

    out = (out or find_project() / "runs" / scale).resolve()
    file = site or find_project() / "papermill_jobs" / "site.yaml"
    how = {
        "site": load_site(file) if site or file.is_file() else {},
        "options": (f"--time={time}",) if time else (),
    }
    jobs = chain(out, scale, data, notebooks, parameters, writeup, **how)
    if dry_run:
        print(jobs.described())
        return 0
    require(shutil.which("sbatch") is not None, "There is no sbatch here; without Slurm, --local runs the notebooks.")
    print("\n".join(f"{id}  {name}" for name, id in jobs.submit().items()))
    print(f"Their logs are in {out / 'jobs'}. To watch them: workbook status")
    return 0


def status(outs: Folders = ()) -> int:
    """Show the jobs of output folders: squeue's lines, and what they printed last, such as step and loss of training.

    Args:
        outs: Output folders (default: all in runs/ that have jobs).
    """
    from workbook.jobs.status import status

    runs = find_project() / "runs"
    folders = list(outs) or sorted(file.parents[1] for file in runs.rglob("jobs/submitted.json"))
    print(status(folders) or "No jobs were submitted. To submit the workbook: workbook submit")
    return 0


def requeue(out: Annotated[Path, tyro.conf.Positional], job: str, attempts: int = 3) -> int:
    """For a job that was stopped after saving: queue itself again, unless it gets nowhere. job.sh calls this.

    Args:
        out: The job's output folder.
        job: Slurm's id of the job, or of the task of an array.
        attempts: After so many stops in a row without anything new saved, the job is not queued again.
    """
    from workbook.jobs.requeue import requeue as queue_again

    queue_again(out, job, attempts)
    print("Stopped by a signal: queued again, to resume from what is saved.")
    return 0
