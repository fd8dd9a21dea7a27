"""`workbook submit`, `status` and `requeue`: notebooks or a training run as Slurm jobs."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from lmcore.config import TrainConfig, replace
from lmcore.errors import require
from workbook.parameters import find_project

Folders = Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[OUT ...]", help_behavior_hint="")]


@dataclass(frozen=True)
class Submission:
    """How jobs are submitted."""

    site: Path | None = None
    """What your cluster wants (default: papermill_jobs/site.yaml)."""
    time: str | None = None
    """Limit of each job, in place of the site's; a job that needs longer resumes in the next one."""
    dry_run: bool = False
    """Only show how the jobs would be submitted."""

    def carry_out(self, out: Path, jobs: Sequence[Any]) -> int:
        """Shows or submits the jobs; the exit code."""
        from workbook.jobs.site import load_site
        from workbook.jobs.submit import Chain

        project = find_project()
        file = self.site or project / "papermill_jobs" / "site.yaml"
        site = load_site(file) if self.site or file.is_file() else {}
        chain = Chain(project, out, site, jobs, (f"--time={self.time}",) if self.time else ())
        if self.dry_run:
            print(chain.described())
            return 0
        without = (
            "There is no sbatch here; without Slurm, `workbook run` and `lmcore train` do the same on this machine."
        )
        require(shutil.which("sbatch") is not None, without)
        print("\n".join(f"{id}  {name}" for name, id in chain.submit().items()))
        print(f"Their logs are in {out / 'jobs'}. To watch them: workbook status")
        return 0


How = Annotated[Submission, tyro.conf.arg(name="")]


def notebooks(
    scale: str = "smoke",
    data: str = "embedded",
    out: Path | None = None,
    notebooks: tuple[str, ...] = (),
    parameters: tuple[str, ...] = (),
    writeup: bool = True,
    how: How = Submission(),
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
        how: How they are submitted.
    """
    from workbook.jobs.submit import notebook_jobs

    out = (out or find_project() / "runs" / scale).resolve()
    return how.carry_out(out, notebook_jobs(out, scale, data, notebooks, parameters, writeup))


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

        At the time limit it saves itself and goes on in the next job.

        Args:
            run: Run folder; the job's log goes there, too.
            settings: What is trained, on what, how long.
            gpus: GPUs of each node, each with a process; with --device cpu processes alone.
            nodes: Number of nodes.
            preset: Named settings to start from.
            config: JSON file of settings to start from, such as a run's config.json.
            how: How it is submitted.
        """
        from workbook.jobs.submit import train_job

        given = replace(settings, data=str(Path(settings.data).resolve()))  # jobs start in the project's folder
        return how.carry_out(run.resolve(), [train_job(run.resolve(), given, gpus, nodes)])

    return train


def status(outs: Folders = ()) -> int:
    """Show the jobs of output folders: squeue's lines, what they printed last, and step and loss of training.

    Args:
        outs: Output folders (default: all in runs/ that have jobs).
    """
    from workbook.jobs.status import status

    runs = find_project() / "runs"
    folders = list(outs) or sorted(file.parents[1] for file in runs.rglob("jobs/submitted.json"))
    print(status(folders) or "No jobs were submitted. To submit the workbook: workbook submit notebooks")
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
