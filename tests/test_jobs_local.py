"""The same jobs without Slurm: order, failures, arrays, restarts, and an orderly end."""

import json
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from job_projects import job_project, touching
from notebook_projects import code

from lmcore.cli import main
from lmcore.errors import UserError
from lmcore.workbook.jobs.dependencies import Job, chain_of
from lmcore.workbook.jobs.log import local_jobs_run, read_lines, read_log
from lmcore.workbook.jobs.site import Site
from lmcore.workbook.jobs.submit import require_idle, run_here

SECONDS = 60


class Project:
    """A project whose jobs are a line of shell each."""

    def __init__(self, folder: Path):
        self.folder = job_project(folder / "a project")
        self.out = self.folder / "runs" / "it's out"

    def job(self, name: str, line: str, **fields: object) -> Job:
        """A job that runs this line under `supervise`."""
        plain = (self.folder / "papermill_jobs" / "writeup.sbatch").read_text()
        script = self.folder / "papermill_jobs" / f"{name}.sbatch"
        supervised = f"supervise bash -c {shlex.quote(line)}"
        script.write_text(plain.replace('supervise lmcore writeup "$OUT" "$@"', supervised))
        return Job(name, name, {"OUT": str(self.out)}, **fields)

    def run(self, *jobs: Job, attempts: int = 3) -> int:
        """Runs them; returns the exit code."""
        return run_here(chain_of(self.folder, self.out, jobs, Site(attempts_without_progress=str(attempts))))

    def states(self) -> dict[str, list[str]]:
        """What the last job of each name said of itself, or of an array its tasks."""
        return {job.name: [line.state for lines in job.lines.values() for line in lines] for job in read_log(self.out)}

    def codes(self) -> list[str]:
        """The exit codes in the order in which jobs ended."""
        return [line.values["code"] for line in read_lines(self.out) if line.state == "exit"]


@pytest.fixture
def project(tmp_path) -> Project:
    return Project(tmp_path)


def test_jobs_run_in_their_order_with_a_log_each(project, capfd):
    first = project.job("first", 'echo "of $LMCORE_JOB_ID"; echo 1 >> order')
    second = project.job("second", "echo 2 >> order", after=("first",))
    assert project.run(first, second) == 0
    assert (project.folder / "order").read_text() == "1\n2\n"
    assert (project.out / "jobs" / "first-local-1.log").read_text() == "of local-1\n"
    assert [(job.id, job.after) for job in read_log(project.out)] == [("local-1", []), ("local-2", ["local-1"])]
    said = capfd.readouterr().out.splitlines()
    assert [line.split(", see ")[0] for line in said] == [
        "local-1 first: runs", "local-1 first: done", "local-2 second: runs", "local-2 second: done",
    ]  # fmt: skip


def test_a_failure_cancels_what_needs_it_and_nothing_else(project, capfd):
    jobs = [
        project.job("train", "echo no luck; exit 1"),
        project.job("generate", "touch generated", after=("train",)),
        project.job("judge", "touch judged", after=("generate",)),
        project.job("benchmark", "true"),
        project.job("writeup", "true", after=("train", "generate", "judge", "benchmark"), whatever_happens=True),
    ]
    assert project.run(*jobs) == 1
    assert project.states() == {
        "train": ["running", "exit"],
        "generate": ["cancelled"],
        "judge": ["cancelled"],
        "benchmark": ["running", "exit"],
        "writeup": ["running", "exit"],
    }
    assert not (project.folder / "generated").exists()
    said = capfd.readouterr().out
    assert "local-1 train: ended with code 1: no luck\n" in said
    assert "local-2 generate: not run, because train did not succeed\n" in said


def test_the_tasks_of_an_array_run_one_after_another(project, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "99")  # a session of Slurm's around it is no business of these jobs
    line = 'echo "$SLURM_ARRAY_TASK_ID of $LMCORE_JOB_ID ${SLURM_JOB_ID:-alone}"; [[ $SLURM_ARRAY_TASK_ID != 3 ]]'
    array = project.job("array", line, tasks=(0, 3, 4))
    table = project.job("table", "true", after=("array",), whatever_happens=True)
    assert project.run(array, table) == 1
    logs = {path.name: path.read_text() for path in sorted((project.out / "jobs").glob("array-*.log"))}
    assert logs == {f"array-local-1_{task}.log": f"{task} of local-1_{task} alone\n" for task in (0, 3, 4)}
    assert project.codes() == ["0", "1", "0", "0"]
    assert project.states()["table"] == ["running", "exit"]


def test_a_job_that_stops_itself_is_started_again_while_it_gets_somewhere(project):
    """Its own USR1 twice, each time with a checkpoint more."""
    line = (
        "trap 'exit 75' USR1; mkdir -p \"$OUT/run/checkpoints\"; echo $SLURM_RESTART_COUNT; "
        'touch "$OUT/run/checkpoints/step_$SLURM_RESTART_COUNT.pt"; '
        "if [[ $SLURM_RESTART_COUNT != 2 ]]; then kill -USR1 $PPID; while :; do sleep 0.1; done; fi"
    )
    assert project.run(project.job("job", line), attempts=1) == 1  # the step of the first stop is 0: nothing
    assert project.states()["job"] == ["running", "gave-up", "exit"]
    assert project.run(project.job("job", line), attempts=2) == 0
    assert project.codes()[-1] == "0"
    assert project.states()["job"].count("requeued") == 2
    numbers = [line for line in (project.out / "jobs" / "job-local-2.log").read_text().splitlines() if line.isdigit()]
    assert numbers == ["0", "1", "2"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_to_the_submitting_process_stops_the_job_in_order(project, number):
    line = "trap 'touch saved; exit 75' TERM; touch ready; while :; do sleep 0.1; done"
    project.job("first", line)
    project.job("second", "touch second")
    program = (
        "import sys; from pathlib import Path; from lmcore.workbook.jobs.dependencies import Job, chain_of\n"
        "from lmcore.workbook.jobs.site import Site; from lmcore.workbook.jobs.submit import run_here\n"
        "project, out = map(Path, sys.argv[1:])\n"
        "jobs = (Job('first', 'first', {'OUT': str(out)}), Job('second', 'second', {'OUT': str(out)}))\n"
        "sys.exit(run_here(chain_of(project, out, jobs, Site())))\n"
    )
    command = [sys.executable, "-c", program, str(project.folder), str(project.out)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + SECONDS
    while not (project.folder / "ready").exists():
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.05)
    with pytest.raises(UserError, match=r"Local jobs of .* are still running \(up to local-2\)"):
        require_idle(project.out)
    process.send_signal(number)
    said = process.communicate(timeout=SECONDS)[1]
    assert process.returncode == 75
    acknowledged, ended = said.splitlines()
    assert acknowledged.startswith(f"lmcore: {number.name}: stopping where nothing is lost")
    assert ended == "lmcore: stopped; the same command resumes with what is saved."
    assert (project.folder / "saved").exists()
    assert not (project.folder / "second").exists()
    assert project.states() == {"first": ["running", "stopping", "exit"], "second": ["cancelled"]}
    assert not local_jobs_run(project.out)


def test_the_workbook_runs_here_and_its_writeup_names_what_failed(tmp_path, monkeypatch, capfd):
    failing = touching("02_train", "## Where it breaks", code("1 / 0"))
    folder = job_project(tmp_path / "project", _02_train=failing, _03_generate=touching("03_generate"))
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert main(["submit", "workbook", "--local"]) == 1
    said = capfd.readouterr().out
    assert "02_train: ended with code 1: " in said
    assert "03_generate: not run, because 02_train did not succeed" in said
    out = folder / "runs" / "smoke"
    assert json.loads((out / "notebooks" / "02_train.json").read_text())["error"].startswith("ZeroDivisionError")
    page = (out / "writeup" / "answers.html").read_text()
    assert "division by zero" in page
    assert "03_generate" in page


def test_without_sbatch_it_says_that_the_jobs_run_here(project, monkeypatch, capfd):
    bin = project.folder / "bin"
    bin.mkdir()
    for program in ("bash", "env", "hostname", "date", "mkdir", "dirname", "sleep"):
        (bin / program).symlink_to(next(p for p in (Path("/usr/bin") / program, Path("/bin") / program) if p.exists()))
    (bin / "lmcore").write_text("#!/bin/bash\n")
    (bin / "lmcore").chmod(0o755)
    monkeypatch.setenv("PATH", str(bin))
    monkeypatch.chdir(project.folder)
    (project.folder / "papermill_jobs" / "site.yaml").write_text(f"setup:\n  - PATH='{bin}'\n")
    assert main(["submit", "notebook", "02"]) == 0
    assert capfd.readouterr().out.startswith("There is no sbatch on this machine: the jobs run here")
