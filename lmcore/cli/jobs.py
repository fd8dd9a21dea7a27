"""`lmcore submit`, `jobs` and `requeue`: the workbook, a notebook or a sweep as jobs of Slurm, or the same here."""

import shlex
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from lmcore.cli.arguments import Flag, Names, OptionalFile, OptionalFolder, OptionalNumber, OptionalTime, Pairs
from lmcore.errors import EXIT_FAILURE

if TYPE_CHECKING:
    from lmcore.workbook.jobs.dependencies import Chain
    from lmcore.workbook.jobs.site import Site

Folders = Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[OUT ...]", help_behavior_hint="")]


@dataclass(frozen=True)
class Submission:
    """How jobs are submitted."""

    out: OptionalFolder = None
    """Folder for everything that is made (default: runs/<scale> or runs/sweeps/<name>, in the site's scratch folder if
    it has one)."""
    site: OptionalFile = None
    """What your cluster wants (default: papermill_jobs/site.yaml)."""
    time: OptionalTime = None
    """Limit of each job, in place of the site's; a job that needs longer goes on in the next one."""
    dry_run: Flag = False
    """Only show how the jobs would be submitted."""
    local: Flag = False
    """Run the jobs here, without Slurm."""
    again: Flag = False
    """Submit although jobs of the same folder are still queued or running."""

    def settings(self, project: Path) -> "Site":
        """The site's settings: of the file that was named, else of the project's, which may be missing."""
        from lmcore.workbook.jobs.site import Site, load_site

        default = project / "papermill_jobs" / "site.yaml"
        if self.site is None and not default.is_file():
            return Site()
        sweeps = sorted(path.stem for path in (project / "papermill_jobs" / "sweeps").glob("*.yaml"))
        notebooks = sorted(path.stem for path in (project / "notebooks").glob("[0-9][0-9]_*.ipynb"))
        return load_site(self.site or default, [*notebooks, *sweeps])

    def folder(self, project: Path, default: Path) -> Path:
        """The output folder in full: the one that was named, else the default in the site's folder for results."""
        return (self.settings(project).folder(project) / default if self.out is None else self.out).resolve()


How = Annotated[Submission, tyro.conf.arg(name="")]


def workbook(
    scale: str = "smoke",
    data: str = "embedded",
    notebooks: Names = (),
    parameters: Pairs = (),
    one_job: Flag = False,
    how: How = Submission(),
) -> int:
    """Submit the workbook: a job for each notebook, then one for the writeup, also when a notebook failed.

    Notebooks run side by side, but 03_generate after 02_train. Where there is no Slurm the same jobs run here, one
    after another. Exit codes: 0 submitted, 2 refused, nothing is left in the queue; without Slurm 0 done, 1 a job
    failed, 75 stopped.

    Args:
        scale: smoke, laptop or gpu: a folder in papermill_jobs/parameters/.
        data: embedded, a corpus to download (tinystories, ...), or a text file, a folder of text, a prepared corpus.
        notebooks: Only these, by number or name.
        parameters: Parameters of the notebooks that are to have other values: workers=2.
        one_job: All notebooks and the writeup in one job.
        how: How they are submitted.
    """
    from lmcore.workbook.jobs.dependencies import Chain, notebook_jobs
    from lmcore.workbook.parameters import find_project

    project = find_project()
    out = how.folder(project, Path("runs") / scale)
    jobs = notebook_jobs(project, scale, data, out, notebooks, parameters, one_job)
    return carry_out(Chain(project, out, how.settings(project), jobs), how)


def notebook(
    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NOTEBOOK")],
    scale: str = "smoke",
    data: str = "embedded",
    parameters: Pairs = (),
    how: How = Submission(),
) -> int:
    """Submit one notebook, without a writeup: `lmcore writeup OUT` makes it afterwards.

    Args:
        name: Its number or name: 02, 02_train.
        scale: smoke, laptop or gpu: a folder in papermill_jobs/parameters/.
        data: embedded, a corpus to download (tinystories, ...), or a text file, a folder of text, a prepared corpus.
        parameters: Parameters of the notebook that are to have other values: workers=2.
        how: How it is submitted.
    """
    from lmcore.errors import require
    from lmcore.workbook.jobs.dependencies import Chain, notebook_jobs
    from lmcore.workbook.parameters import find_project

    project = find_project()
    out = how.folder(project, Path("runs") / scale)
    jobs = notebook_jobs(project, scale, data, out, [name], parameters, writeup=False)
    require(len(jobs) == 1, f"{name!r} names {len(jobs)} notebooks: {', '.join(job.name for job in jobs)}.")
    return carry_out(Chain(project, out, how.settings(project), jobs), how)


def sweep(
    definition: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SWEEP")],
    concurrency: OptionalNumber = None,
    set: Pairs = (),
    how: How = Submission(),
) -> int:
    """Submit what is unfinished of a sweep as an array of jobs, and the table of all of it after them.

    Args:
        definition: A name in papermill_jobs/sweeps/, or a file.
        concurrency: At most so many tasks at a time.
        set: Settings of the definition that are to have other values: steps=20 context_length=128,256.
        how: How they are submitted.
    """
    from lmcore.workbook.jobs.dependencies import Chain, sweep_jobs
    from lmcore.workbook.jobs.sweeps import load_definition, sweep_folder
    from lmcore.workbook.parameters import find_project

    project = find_project()
    changed = load_definition(definition, set)
    out = how.folder(project, sweep_folder(changed))
    jobs = sweep_jobs(changed, out, concurrency)
    if not jobs:
        print(f"All of {out} is finished; lmcore sweep table {shlex.quote(str(out))} makes its table.")
        return 0
    return carry_out(Chain(project, out, how.settings(project), jobs, changed), how)


def carry_out(chain: "Chain", how: Submission) -> int:
    """Shows, submits or runs the jobs; returns the exit code."""
    import dataclasses

    from lmcore.workbook.jobs.log import output_file
    from lmcore.workbook.jobs.slurm import has_slurm
    from lmcore.workbook.jobs.submit import run_here, submit

    chain = dataclasses.replace(chain, time=how.time)
    chain.check()
    if how.dry_run:
        print(chain.described())
        return 0
    if how.local or not has_slurm():
        if not how.local:
            print("There is no sbatch on this machine: the jobs run here, one after another.", flush=True)
        return run_here(chain, how.again)
    ids = submit(chain, how.again)
    width = max(len(name) for name in ids)
    for job in chain.jobs:
        after = ", ".join(ids[name] for name in (*job.after_ok, *job.after_any))
        log = output_file(chain.out, job.name, f"{ids[job.name]}_*" if job.tasks else ids[job.name])
        tasks = f", {len(job.tasks)} tasks" if job.tasks else ""
        print(f"{ids[job.name]}  {job.name:<{width}}  {log}{tasks}{f', after {after}' if after else ''}")
    print(f"To watch them: lmcore jobs {shlex.quote(str(chain.out))}")
    return 0


def jobs(outs: Folders = (), tail: OptionalNumber = None, json: Flag = False) -> int:
    """Show the jobs of output folders: state, attempts, what they are doing, time left, why they wait, and logs.

    The time left is that of the training run or the array at hand, from the rate of the present attempt.

    Args:
        outs: Output folders (default: all in runs/ and runs/sweeps/ that have jobs, here and in the scratch folder).
        tail: Show so many last lines of each log (default: one of those that failed).
        json: Print it as JSON.
    """
    from lmcore.workbook.jobs.status import as_json, as_text, folders_with_jobs, runs_folders, status_of

    folders = list(outs) or [folder for runs in runs_folders() for folder in folders_with_jobs(runs)]
    rows, fault = status_of(folders, tail)
    if not rows and not json:
        places = " or ".join(f"{place}/" for place in outs or runs_folders())
        print(f"No jobs: none was submitted for a folder in {places}. To submit the workbook: lmcore submit workbook")
        return 0
    print((as_json if json else as_text)(rows, fault))
    return 0


def requeue(out: Annotated[Path, tyro.conf.Positional], attempts: int = 3) -> int:
    """For a job that was stopped after saving: queue itself again, unless it gets nowhere. job.sh calls this.

    Args:
        out: The job's output folder.
        attempts: After so many stops in a row without anything new saved, the job is not queued again.
    """
    from lmcore.workbook.jobs.requeue import requeue as queue_again

    # Slurm ends the processes of a job that it queues again, and job.sh is to hear that this was done
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if queue_again(out, attempts):
        print("Stopped by a signal: queued again, to go on from what is saved.")
        return 0
    print(
        f"lmcore: This job was stopped {attempts} times in a row with nothing new saved, so it is not queued "
        "again: give it a longer --time, or let it save more often (checkpoint_interval).",
        file=sys.stderr,
    )
    return EXIT_FAILURE
