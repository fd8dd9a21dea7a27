"""`lmcore submit` and `lmcore requeue`: the workbook, a notebook or a sweep as jobs of Slurm, or the same here."""

import functools
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from lmcore.cli.arguments import Flag, Names, OptionalFile, OptionalFolder, OptionalNumber, OptionalTime, Pairs
from lmcore.errors import EXIT_FAILURE

if TYPE_CHECKING:
    from lmcore.workbook.jobs.ledger import JobRecord
    from lmcore.workbook.jobs.plan import Job
    from lmcore.workbook.jobs.site import Site


def workbook(
    scale: str = "smoke",
    data: str = "embedded",
    out: OptionalFolder = None,
    notebooks: Names = (),
    parameters: Pairs = (),
    one_job: Flag = False,
    site: OptionalFile = None,
    time: OptionalTime = None,
    dry_run: Flag = False,
    local: Flag = False,
    again: Flag = False,
) -> int:
    """Submit the workbook: a job for each notebook, then one for the writeup, also when a notebook failed.

    Notebooks run side by side, but 03_generate after 02_train. Where there is no Slurm the same jobs run here, one
    after another. Exit codes: 0 submitted, 2 refused, nothing is left in the queue; without Slurm 0 done, 1 a job
    failed, 75 stopped.

    Args:
        scale: smoke, laptop or gpu: a folder in papermill_jobs/parameters/.
        data: embedded, a corpus to download (tinystories, ...), or a text file, a folder of text, a prepared corpus.
        out: Folder for everything that is made (default: runs/<scale>, in the site's scratch folder if it has one).
        notebooks: Only these, by number or name.
        parameters: Parameters of the notebooks that are to have other values: workers=2.
        one_job: All notebooks and the writeup in one job.
        site: What your cluster wants (default: papermill_jobs/site.yaml).
        time: Limit of each job, in place of the site's; a job that needs longer goes on in the next one.
        dry_run: Only show the scripts and how they would be submitted.
        local: Run the jobs here, without Slurm.
        again: Submit although jobs of the same folder are still queued or running.
    """
    from lmcore.workbook.jobs.plan import plan_workbook
    from lmcore.workbook.parameters import find_project

    project = find_project()
    settings = settings_of(project, site)
    folder = folder_of(out, settings, project, Path("runs") / scale)
    jobs = plan_workbook(project, scale, data, folder, notebooks, parameters, one_job)
    return carry_out(project, jobs, settings, folder, time, dry_run, local, again)


def notebook(
    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NOTEBOOK")],
    scale: str = "smoke",
    data: str = "embedded",
    out: OptionalFolder = None,
    parameters: Pairs = (),
    site: OptionalFile = None,
    time: OptionalTime = None,
    dry_run: Flag = False,
    local: Flag = False,
    again: Flag = False,
) -> int:
    """Submit one notebook, without a writeup: `lmcore writeup OUT` makes it afterwards.

    Args:
        name: Its number or name: 02, 02_train.
        scale: smoke, laptop or gpu: a folder in papermill_jobs/parameters/.
        data: embedded, a corpus to download (tinystories, ...), or a text file, a folder of text, a prepared corpus.
        out: Folder for everything that is made (default: runs/<scale>, in the site's scratch folder if it has one).
        parameters: Parameters of the notebooks that are to have other values: workers=2.
        site: What your cluster wants (default: papermill_jobs/site.yaml).
        time: The job's limit, in place of the site's.
        dry_run: Only show the script and how it would be submitted.
        local: Run the job here, without Slurm.
        again: Submit although jobs of the same folder are still queued or running.
    """
    from lmcore.workbook.jobs.plan import plan_notebook
    from lmcore.workbook.parameters import find_project

    project = find_project()
    settings = settings_of(project, site)
    folder = folder_of(out, settings, project, Path("runs") / scale)
    jobs = plan_notebook(project, scale, data, folder, name, parameters)
    return carry_out(project, jobs, settings, folder, time, dry_run, local, again)


def sweep(
    definition: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SWEEP")],
    out: OptionalFolder = None,
    concurrency: OptionalNumber = None,
    set: Pairs = (),
    site: OptionalFile = None,
    time: OptionalTime = None,
    dry_run: Flag = False,
    local: Flag = False,
    again: Flag = False,
) -> int:
    """Submit the cells of a sweep that are not finished as an array, and the table of all cells after them.

    Args:
        definition: A name in papermill_jobs/sweeps/, or a file.
        out: The sweep's folder (default: runs/sweeps/<name>, in the site's scratch folder if it has one).
        concurrency: At most so many cells at a time.
        set: Settings of the definition that are to have other values: steps=20 context_length=128,256.
        site: What your cluster wants (default: papermill_jobs/site.yaml).
        time: Limit of each cell's job, in place of the site's.
        dry_run: Only show the scripts and how they would be submitted.
        local: Run the jobs here, without Slurm.
        again: Submit although jobs of the same folder are still queued or running.
    """
    from lmcore.workbook.jobs.plan import plan_sweep
    from lmcore.workbook.jobs.sweep_definition import freeze
    from lmcore.workbook.jobs.sweeps import load_definition, remember, sweep_folder
    from lmcore.workbook.parameters import find_project

    project = find_project()
    settings = settings_of(project, site)
    changed = load_definition(definition, set)
    folder = folder_of(out, settings, project, sweep_folder(changed))
    jobs = plan_sweep(definition, folder, set, concurrency)
    if not jobs:
        print(f"All cells in {folder} are finished; lmcore sweep table {shlex.quote(str(folder))} makes their table.")
        return 0

    def prepare() -> None:
        freeze(changed, folder)
        remember(changed, folder)

    return carry_out(project, jobs, settings, folder, time, dry_run, local, again, prepare)


def settings_of(project: Path, file: Path | None) -> "Site":
    """The site's settings: of this file, else of the project's, which may be missing."""
    from lmcore.workbook.jobs.site import Site, load_site

    default = project / "papermill_jobs" / "site.yaml"
    if file is None and not default.is_file():
        return Site()
    sweeps = sorted(path.stem for path in (project / "papermill_jobs" / "sweeps").glob("*.yaml"))
    notebooks = sorted(path.stem for path in (project / "notebooks").glob("[0-9][0-9]_*.ipynb"))
    return load_site(file or default, [*notebooks, *sweeps])


def folder_of(out: Path | None, site: "Site", project: Path, default: Path) -> Path:
    """The output folder in full: the one that was named, else the default in the site's folder for results."""
    return (site.folder(project) / default if out is None else out).resolve()


def carry_out(
    project: Path,
    jobs: "Sequence[Job]",
    site: "Site",
    out: Path,
    time: str | None,
    dry_run: bool,
    local: bool,
    again: bool,
    prepare: Callable[[], None] = lambda: None,
) -> int:
    """Shows, submits or runs the jobs; returns the exit code."""
    from lmcore.workbook.jobs.scheduler import has_slurm
    from lmcore.workbook.jobs.submission import described, run_locally, scripts_of, submit_to_slurm

    scripts = scripts_of(project, jobs, site, out, time)
    announce = functools.partial(announce_notebooks, project, jobs, out)
    if dry_run:
        print(described(jobs, scripts, out))
        return 0
    if local or not has_slurm():
        if not local:
            print("There is no sbatch on this machine: the jobs run here, one after another.", flush=True)
        return run_locally(project, jobs, scripts, out, again, announce, prepare)
    print(listed(submit_to_slurm(project, jobs, scripts, out, again, announce, prepare)))
    print(f"To watch them: lmcore jobs {shlex.quote(str(out))}")
    return 0


def announce_notebooks(project: Path, jobs: "Sequence[Job]", out: Path) -> None:
    """Adds the notebooks of the jobs to the plan of the folder, so that a writeup names those that never ran, too."""
    from lmcore.workbook.parameters import find_notebooks
    from lmcore.workbook.record import update_plan

    names = [name for job in jobs if job.kind in ("workbook", "notebook") for name in job.notebooks]
    if names:
        known = [path.stem for path in find_notebooks(project)]
        update_plan(out, jobs[0].variables["SCALE"], jobs[0].variables["DATA"], names, known)


def listed(records: "Sequence[JobRecord]") -> str:
    """A line for each job: id, name, what it waits for, log."""
    width = max(len(record.name) for record in records)
    lines = []
    for record in records:
        cells = "" if record.tasks is None else f", {len(record.tasks)} cells"
        after = f", after {', '.join(record.after)}" if record.after else ""
        lines.append(f"{record.id}  {record.name:<{width}}  {record.log_file()}{cells}{after}")
    return "\n".join(lines)


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


def submit_commands(wrap: Callable) -> tyro.extras.SubcommandApp:
    """lmcore submit ...; `wrap` is applied to each command."""
    app = tyro.extras.SubcommandApp()
    for command in (workbook, notebook, sweep):
        app.command(wrap(command))
    return app
