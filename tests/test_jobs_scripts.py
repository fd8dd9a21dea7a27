"""The job scripts as they stand: what they ask of Slurm, what a signal does, when a job is queued again."""

import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from job_projects import command, job_project

FOLDER = Path(__file__).parents[1] / "papermill_jobs"
SCRIPTS = sorted(FOLDER.glob("*.sbatch"))
SECONDS = 120
LOOP = "while :; do sleep 0.1; done"
SAVED = "out/checkpoints/step_1"
SAVING = f'for s in USR1 TERM; do trap "echo $s >>heard; touch {SAVED}; exit 75" $s; done; touch ready; {LOOP}'
IN_VAIN = f"trap 'exit 75' USR1; touch ready; {LOOP}"
STARTING = "touch ready; exec sleep 100"
"""A command that was still starting: it has no handler yet, so the signal ends it."""


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_the_scripts_pass_shellcheck():
    scripts = [*SCRIPTS, *FOLDER.rglob("*.sh")]
    assert subprocess.run(["shellcheck", *scripts], check=False).returncode == 0


def test_the_scripts_are_short_and_ready_for_sbatch():
    for script in SCRIPTS:
        text = script.read_text(encoding="utf-8")
        options = dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", text, re.MULTILINE))
        assert os.access(script, os.X_OK), script
        assert text.count("\n") <= 30
        assert options.get("gres") == (None if script.stem == "writeup" else "gpu:1")
        if script.stem != "papermill":
            assert (options["requeue"], options["open-mode"], options["signal"]) == ("", "append", "B:USR1@120")
        first = next(index for index, line in enumerate(text.splitlines()) if not line.startswith("#") and line)
        assert all(not line.startswith("#SBATCH") for line in text.splitlines()[first:])  # sbatch would not see it
    assert (FOLDER / "job.sh").read_text(encoding="utf-8").count("\n") <= 90


class Script:
    """A job of job.sh that runs a line of bash, after one that saved, with a stand-in for `scontrol`."""

    def __init__(self, folder: Path, line: str, **variables: str):
        self.folder = job_project(folder / "project")
        (self.folder / SAVED).parent.mkdir(parents=True)
        (self.folder / SAVED).with_name("step_0").touch()
        os.utime((self.folder / SAVED).with_name("step_0"), (1e9, 1e9))
        command(folder, "workbook", "")
        record = 'echo "   PreemptEligibleTime=2026-11-21T16:51:14 PreemptTime=$PREEMPTED"'
        self.scontrol = command(folder, "scontrol", record)
        (self.folder / "job.bash").write_text('set -euo pipefail\n. papermill_jobs/job.sh\nsupervise bash -c "$LINE"\n')
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM", "MASTER"))}
        clean |= {"PATH": f"{folder}:/usr/bin:/bin", "OUT": "out", "SLURM_JOB_ID": "7", "PREEMPTED": "None"}
        self.process = subprocess.Popen(
            ["bash", "job.bash"], cwd=self.folder, env=clean | variables | {"LINE": line}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
            # bash cannot trap what it was started to ignore, as by nohup or &
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip

    def send(self, number: int, after: str = "ready") -> None:
        """A signal to the script alone, once the command has made this file."""
        end = time.monotonic() + SECONDS
        while not (self.folder / after).exists():
            assert self.process.poll() is None, self.process.communicate()[0]
            assert time.monotonic() < end, f"there is no {after}"
            time.sleep(0.02)
        self.process.send_signal(number)

    def end(self) -> tuple[int, bool]:
        """The exit code, and whether it was asked to queue the job again."""
        self.said = self.process.communicate(timeout=SECONDS)[0]
        self.called = self.scontrol.read_text() if self.scontrol.exists() else ""
        return self.process.returncode, "requeue" in self.called


TASK = {"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"}
STOPS = {
    "saved at the time limit": (SAVING, signal.SIGUSR1, 75, True, {}),
    "a task of an array": (SAVING, signal.SIGUSR1, 75, True, TASK),
    "with nothing new saved": (IN_VAIN, signal.SIGUSR1, 75, False, {}),
    "still starting": (STARTING, signal.SIGUSR1, 128 + signal.SIGUSR1, False, {}),
    "still starting, preempted": (STARTING, signal.SIGUSR1, 75, True, {"PREEMPTED": "2026-11-21T16:51:17"}),
    "cancelled": (SAVING, signal.SIGTERM, 75, False, {}),
    "hung up": (SAVING, signal.SIGHUP, 75, False, {}),
    "preempted": (SAVING, signal.SIGTERM, 75, True, {"PREEMPTED": "2026-11-21T16:51:17"}),
    "done in spite of it": ("trap : USR1; touch ready; sleep 1; exit 0", signal.SIGUSR1, 0, False, {}),
    # a notebook that fails is to be repaired, not run again
    "failed after it": (f"trap 'exit 1' USR1; touch ready; {LOOP}", signal.SIGUSR1, 1, False, {}),
    "started by hand": (SAVING, signal.SIGUSR1, 75, False, {"SLURM_JOB_ID": ""}),
}


@pytest.mark.parametrize(("line", "number", "code", "requeued", "variables"), STOPS.values(), ids=STOPS)
def test_what_a_signal_does(tmp_path, line, number, code, requeued, variables):
    job = Script(tmp_path, line, **variables)
    job.send(number)
    assert job.end() == (code, requeued)
    if line == SAVING:
        heard = "USR1\n" if number == signal.SIGUSR1 else "TERM\n"
        assert (job.folder / "heard").read_text() == heard
    if variables == TASK:
        assert job.called.endswith("requeue 7_2\n")
    in_vain = line in (IN_VAIN, STARTING) and not requeued
    assert ("stopped with nothing new saved" in job.said) == in_vain


def test_a_script_away_from_the_project_or_without_workbook_says_so(tmp_path):
    project = job_project(tmp_path / "project")
    for folder, sentence in ((tmp_path, "There is no papermill_jobs/job.sh"), (project, "It is not installed here")):
        words = ["bash", project / "papermill_jobs" / "workbook.sbatch"]
        done = subprocess.run(words, cwd=folder, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith(f"lmcore: {sentence}")


def test_who_cancels_a_job_that_saves_itself_is_obeyed(tmp_path):
    """USR1, then TERM while the command still saves."""
    job = Script(tmp_path, f"trap 'touch told {SAVED}; sleep 2; exit 75' USR1; trap '' TERM; touch ready; {LOOP}")
    job.send(signal.SIGUSR1)
    job.send(signal.SIGTERM, after="told")
    assert job.end() == (75, False)


def test_a_signal_during_the_sites_setup_is_not_lost(tmp_path):
    assert Script(tmp_path, STARTING, LMCORE_SETUP=f"touch {SAVED}; kill -USR1 $$").end() == (75, True)


def test_the_command_hears_ctrl_c(tmp_path):
    """bash would let a command in the background ignore SIGINT, by which nbclient interrupts a cell."""
    ignored = "sigs=$(grep SigIgn /proc/$$/status | cut -f2); exit $((0x$sigs >> 1 & 1))"
    assert Script(tmp_path, ignored).end() == (0, False)


COMPUTED = ["SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_GPUS_ON_NODE", "SLURM_NODEID"]
COMPUTED += ["SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES", "SLURM_NNODES"]


@pytest.mark.fault("value with which bash would compute", "refused_in_words")
@pytest.mark.parametrize(
    ("name", "value"), [*((name, "HOME[$(touch ran)0]") for name in COMPUTED), ("SLURM_NTASKS", "08")]
)
def test_a_value_that_bash_computes_with_is_a_number(tmp_path, name, value):
    """bash runs commands in an arithmetic expression, also where a variable's value is one."""
    words = ["bash", "-c", "set -eu; . papermill_jobs/job.sh; export_rendezvous; touch began"]
    done = subprocess.run(
        words, cwd=job_project(tmp_path), env={name: value, "PATH": "/usr/bin:/bin"}, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(rf"lmcore: {name} must be a whole number, not [^\n]+\.\n", done.stderr)
    assert {"ran", "began"}.isdisjoint(path.name for path in tmp_path.iterdir())


def slurm(id: int, nodes: int, tasks: int, gpus: int, rank: int = 0, local: int = 0, node: int = 0) -> dict[str, str]:
    """The variables of a task of a job."""
    names = ("JOB_ID", "JOB_NUM_NODES", "NTASKS", "GPUS_ON_NODE", "PROCID", "LOCALID", "NODEID")
    values = (id, nodes, tasks, gpus, rank, local, node)
    return {f"SLURM_{name}": str(value) for name, value in zip(names, values, strict=True)}


STEP = {"SLURM_JOB_NODELIST": "n[1-4]", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "n[3-4]"}
RENDEZVOUS = {
    "alone": ({}, "nodes 1/0 processes 1 rank 0/1 local 0 at 127.0.0.1:20000"),
    "two nodes, a task on each, torchrun for its four GPUs": (
        slurm(5, 2, 2, 4, 1, 0, 1) | {"MASTER_ADDR": "n1"}, "nodes 2/1 processes 4 rank 4/8 local 0 at n1:20005"
    ),
    "two nodes with two tasks each": (
        slurm(5, 2, 4, 2, 3, 1, 1) | {"MASTER_ADDR": "n1", "MASTER_PORT": "9"},
        "nodes 2/1 processes 2 rank 3/4 local 1 at n1:9",
    ),
    "a step of two nodes in a job of four": (
        slurm(5, 4, 2, 1, 1, 0, 1) | STEP, "nodes 2/1 processes 1 rank 1/2 local 0 at n3:20005"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("variables", "expected"), RENDEZVOUS.values(), ids=RENDEZVOUS)
def test_what_torchrun_reads_comes_from_slurms_variables(tmp_path, variables, expected):
    command(tmp_path, "scontrol", '[[ $* == "show hostnames n[3-4]" ]] && printf "n3\\nn4\\n"')
    shown = "nodes $NNODES/$NODE_RANK processes $NPROC_PER_NODE rank $RANK/$WORLD_SIZE local $LOCAL_RANK"
    shown = f"set -eu; . papermill_jobs/job.sh; export_rendezvous; echo {shown} at $MASTER_ADDR:$MASTER_PORT"
    given = {"PATH": f"{tmp_path}:/usr/bin:/bin"} | variables
    done = subprocess.run(["bash", "-c", shown], cwd=FOLDER.parent, env=given, capture_output=True, text=True)
    assert done.stdout == f"{expected}\n"
