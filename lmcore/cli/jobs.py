"""`lmcore submit`, `jobs` and `requeue`: the workbook, a notebook or a sweep as jobs of Slurm, or the same here."""

import shlex
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import tyro

from lmcore.cli.arguments import Flag, Names, OptionalFile, OptionalFolder, OptionalNumber, OptionalTime, Pairs
from lmcore.config import TrainConfig, replace
from lmcore.errors import EXIT_FAILURE, require

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
    """Limit of each job, in place of the site's; a job that needs longer resumes in the next one."""
    dry_run: Flag = False
    """Only show how the jobs would be submitted."""
    local: Flag = False
    """Run the jobs here, without Slurm."""
    again: Flag = False
    """Submit although jobs of the same folder are still queued or running."""

    def carry_out(self, default: str | Path, jobs_of: Callable[[Path, Path], tuple], sweep: Any = None) -> int:
        """Shows, submits or runs the jobs that `jobs_of` makes for a project and an output folder; the exit code.

        The output folder is the one that was named, else `default` in the site's folder for results.
        """
        from lmcore.workbook.jobs.dependencies import chain_of, described
        from lmcore.workbook.jobs.log import output_file
        from lmcore.workbook.jobs.site import Site, load_site
        from lmcore.workbook.jobs.submit import run_here, submit
        from lmcore.workbook.parameters import find_project

        project = find_project()
        settings, site = project / "papermill_jobs" / "site.yaml", Site()
        if self.site is not None or settings.is_file():
            files = (*project.glob("notebooks/[0-9][0-9]_*.ipynb"), *project.glob("papermill_jobs/sweeps/*.yaml"))
            site = load_site(self.site or settings, sorted(file.stem for file in files))
        out = (site.folder(project) / default if self.out is None else self.out).resolve()
        jobs = jobs_of(project, out)
        if not jobs:
            print(f"All of {out} is finished; lmcore sweep table {shlex.quote(str(out))} makes its table.")
            return 0
        chain = chain_of(project, out, jobs, site, sweep, self.time)
        if self.dry_run:
            print(described(chain))
            return 0
        if self.local or not shutil.which("sbatch"):
            if not self.local:
                print("There is no sbatch on this machine: the jobs run here, one after another.", flush=True)
            return run_here(chain, self.again)
        ids = submit(chain, self.again)
        for job in jobs:
            log = output_file(out, job.name, f"{ids[job.name]}_*" if job.tasks else ids[job.name])
            words = [str(log), *([f"{len(job.tasks)} tasks"] if job.tasks else [])]
            words += [f"after {', '.join(ids[name] for name in job.after)}"] if job.after else []
            print(f"{ids[job.name]}  {job.name:<{max(map(len, ids))}}  {', '.join(words)}")
        print(f"To watch them: lmcore jobs {shlex.quote(str(out))}")
        return 0


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
    from lmcore.workbook.jobs.dependencies import notebook_jobs

    chosen = {"scale": scale, "data": data, "notebooks": notebooks, "parameters": parameters}
    return how.carry_out(f"runs/{scale}", partial(notebook_jobs, **chosen, one_job=one_job))


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
    from lmcore.workbook.jobs.dependencies import notebook_jobs

    chosen = {"scale": scale, "data": data, "notebooks": [name], "parameters": parameters}
    return how.carry_out(f"runs/{scale}", partial(notebook_jobs, **chosen, writeup=False))


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
    from lmcore.workbook.jobs.dependencies import sweep_jobs
    from lmcore.workbook.jobs.sweeps import load_definition, sweep_folder

    changed = load_definition(definition, set)
    return how.carry_out(sweep_folder(changed), lambda _, out: sweep_jobs(changed, out, concurrency), changed)


def train_command(base: TrainConfig) -> Callable[..., int]:
    """The command that submits a training run, whose options default to `base`."""

    def train(
        run: Path,
        settings: Annotated[TrainConfig, tyro.conf.arg(name="")] = base,
        gpus: int = 1,
        nodes: int = 1,
        preset: str | None = None,
        config: Path | None = None,
        how: How = Submission(),
    ) -> int:
        """Submit one training run, on any number of GPUs and nodes: `lmcore train` with a process for each GPU.

        What may be said of the run is what `lmcore train` takes. At the time limit it saves itself and goes on in the
        next job.

        Args:
            run: Run folder; the job's log goes there, too.
            settings: What is trained, on what, how long.
            gpus: GPUs of each node, each with a process; with --device cpu processes alone.
            nodes: Number of nodes.
            preset: Named settings to start from.
            config: JSON file of settings to start from, such as a run's config.json.
            how: How it is submitted.
        """
        from lmcore.workbook.jobs.dependencies import train_job

        require(how.out is None, "A training run has one folder, --run; --out is for other jobs.")
        data = str(Path(settings.data).resolve())  # jobs start in the project's folder
        return how.carry_out(run, lambda _, out: train_job(out, replace(settings, data=data), gpus, nodes))

    return train


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

    if queue_again(out, attempts):
        print("Stopped by a signal: queued again, to resume from what is saved.")
        return 0
    print(
        f"lmcore: This job was stopped {attempts} times in a row with nothing new saved, so it is not queued "
        "again: give it a longer --time, or let it save more often (checkpoint_interval).",
        file=sys.stderr,
    )
    return EXIT_FAILURE
