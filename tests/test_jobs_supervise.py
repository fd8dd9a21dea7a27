"""papermill_jobs/job.sh: signals reach the command, and a job asks to be queued again only where it should."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from job_projects import job_project, states

from lmcore.workbook.jobs.log import read_lines

SECONDS = 60

SAVES = """
import pathlib, signal, sys, time

def stop(number, frame):
    with open(out / "signals", "a") as file:
        print(signal.Signals(number).name, file=file)
    saved = out / "run" / "checkpoints" / f"step_{time.time_ns()}.pt"
    saved.parent.mkdir(parents=True, exist_ok=True)
    saved.touch()
    sys.exit(75)

out = pathlib.Path(sys.argv[1])
for number in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(number, stop)
(out / "ready").touch()
time.sleep(60)
"""
"""A command that saves itself at a signal, as lmcore does."""


class JobUnderTest:
    """One job of job.sh that runs in the background."""

    def __init__(self, project: Path, command: str, **variables: str):
        self.out = project / "out"
        script = project / "job.bash"
        script.write_text(f"set -euo pipefail\n. papermill_jobs/job.sh\nsupervise {command}\n")
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM", "MASTER"))}
        environment |= {
            "PATH": path,
            "OUT": str(self.out),
            "LMCORE_JOB_ID": "local-1",
            "LMCORE_JOB_NAME": "job",
            **variables,
        }
        self.process = subprocess.Popen(
            ["bash", str(script)], cwd=project, env=environment | variables, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
            # bash cannot trap what it was started to ignore, as by nohup or &
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip

    def wait_for(self, name: str) -> None:
        """Until the command has made this file."""
        end = time.monotonic() + SECONDS
        while not (self.out / name).exists():
            assert self.process.poll() is None, self.process.communicate()[0]
            assert time.monotonic() < end, f"there is no {name}"
            time.sleep(0.02)

    def send(self, *numbers: int) -> None:
        """Signals to the script alone."""
        for number in numbers:
            self.process.send_signal(number)

    def end(self) -> tuple[int, str]:
        """Exit code and output."""
        said = self.process.communicate(timeout=SECONDS)[0]
        return self.process.returncode, said

    def states(self) -> list[str]:
        """What it said of itself."""
        return states(self.out, "local-1")


@pytest.fixture
def project(tmp_path) -> Path:
    made = job_project(tmp_path / "project")
    (made / "saves.py").write_text(SAVES)
    return made


@pytest.fixture
def saving(project):
    """Starts a job whose command saves itself at a signal, and waits until it is ready for one."""

    def start(**variables: str) -> JobUnderTest:
        job = JobUnderTest(project, f"{sys.executable} saves.py out", **variables)
        job.wait_for("ready")
        return job

    return start


@pytest.mark.parametrize("code", [0, 1, 2, 75])
def test_the_exit_code_is_the_commands(project, code):
    job = JobUnderTest(project, f"bash -c 'exit {code}'")
    assert job.end() == (code, "")
    running, exit = read_lines(job.out)
    assert (running.id, running.name, running.state, running.values["restart"]) == ("local-1", "job", "running", "0")
    assert (exit.state, exit.values) == ("exit", {"code": str(code)})


def test_usr1_lets_the_command_save_itself_and_queues_the_job_again(saving):
    job = saving(SLURM_RESTART_COUNT="2")
    job.send(signal.SIGUSR1)
    code, said = job.end()
    assert (code, job.states()) == (75, ["running", "requeued"])
    assert read_lines(job.out)[0].values["restart"] == "2"
    assert (job.out / "signals").read_text() == "SIGUSR1\n"
    assert said == "Stopped by a signal: queued again, to go on from what is saved.\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_job_that_is_cancelled_saves_itself_and_is_not_queued_again(saving, number):
    job = saving()
    job.send(number)
    assert job.end() == (75, "")
    assert job.states() == ["running", "stopping", "exit"]
    assert (job.out / "signals").read_text() == "SIGTERM\n"


@pytest.mark.parametrize(("shown", "expected"), [("2026-11-21T16:51:17", "requeued"), ("None", "exit")])
def test_term_is_a_preemption_where_slurm_says_so(saving, tmp_path, monkeypatch, shown, expected):
    """Where preempted jobs are given time they may get TERM alone, as cancelled ones do."""
    program = tmp_path / "scontrol"
    program.write_text(f"#!/bin/bash\necho '   PreemptEligibleTime=2026-11-21T16:51:14 PreemptTime={shown}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    job = saving(SLURM_JOB_ID="local-1", MASTER_PORT="1")
    job.send(signal.SIGTERM)
    assert job.end()[0] == 75
    assert job.states() == ["running", "stopping", expected]


def test_who_cancels_a_job_that_saves_itself_is_obeyed(project):
    """USR1, then TERM while the command still saves."""
    slow = "trap 'touch out/told; sleep 2; exit 75' USR1; trap '' TERM; touch out/ready; while :; do sleep 0.1; done"
    job = JobUnderTest(project, f'bash -c "{slow}"')
    job.wait_for("ready")
    job.send(signal.SIGUSR1)
    job.wait_for("told")
    job.send(signal.SIGTERM)
    assert job.end() == (75, "")
    assert job.states() == ["running", "stopping", "exit"]


def test_signals_that_come_twice_do_no_harm(project):
    """Slurm may signal the command itself as well, and the script passes its own one on."""
    counting = "trap 'touch out/told' USR1; touch out/ready; for i in {1..30}; do sleep 0.1; done; exit 75"
    job = JobUnderTest(project, f'bash -c "{counting}"')
    job.wait_for("ready")
    os.killpg(job.process.pid, signal.SIGUSR1)
    job.wait_for("told")
    job.send(signal.SIGUSR1, signal.SIGUSR1)
    assert job.end()[0] == 75
    assert job.states() == ["running", "requeued"]


def test_a_command_that_was_still_starting_is_queued_again(project):
    """It has no handler yet, so the signal ends it."""
    job = JobUnderTest(project, "bash -c 'touch out/ready; exec sleep 60'")
    job.wait_for("ready")
    job.send(signal.SIGUSR1)
    assert job.end()[0] == 75
    assert job.states() == ["running", "requeued"]


def test_a_signal_before_the_command_is_not_lost(project):
    """The command is not even started: the signal comes while the site's setup runs."""
    job = JobUnderTest(project, "touch out/started", LMCORE_SETUP="kill -USR1 $$")
    assert job.end()[0] == 75
    assert job.states() == ["running", "requeued"]
    assert not (job.out / "started").exists()


def test_a_command_that_is_done_in_spite_of_the_signal_is_done(project):
    job = JobUnderTest(project, 'bash -c "trap : USR1; touch out/ready; for i in {1..10}; do sleep 0.1; done"')
    job.wait_for("ready")
    job.send(signal.SIGUSR1)
    assert job.end() == (0, "")
    assert job.states() == ["running", "exit"]


def test_a_command_that_fails_after_the_signal_has_failed(project):
    """A notebook that fails is to be mended, not run again."""
    job = JobUnderTest(project, "bash -c \"trap 'exit 1' USR1; touch out/ready; while :; do sleep 0.1; done\"")
    job.wait_for("ready")
    job.send(signal.SIGUSR1)
    assert job.end() == (1, "")
    assert job.states() == ["running", "exit"]


def test_a_job_that_gets_nowhere_gives_up(project):
    for attempt, expected in enumerate(("requeued", "requeued", "gave-up")):
        job = JobUnderTest(project, "bash -c 'touch out/ready; exec sleep 60'", ATTEMPTS="3")
        job.wait_for("ready")
        job.send(signal.SIGUSR1)
        code, said = job.end()
        assert code == 75
        assert job.states()[2 * attempt + 1] == expected
        (job.out / "ready").unlink()
    assert job.states()[-1] == "exit"
    assert said.endswith("give it a longer --time, or let it save more often (checkpoint_interval).\n")
    assert "stopped 3 times in a row with nothing new saved" in said


def test_the_command_hears_ctrl_c(project):
    """bash would let a command in the background ignore SIGINT, by which nbclient interrupts a cell."""
    program = "import signal; assert signal.getsignal(signal.SIGINT) is signal.default_int_handler"
    assert JobUnderTest(project, f"{sys.executable} -c '{program}'").end() == (0, "")


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        # no Slurm
        ({}, "nodes 1/0 processes 1 rank 0/1 local 0 at 127.0.0.1:20000"),
        # one task, which starts torchrun for all GPUs of its node
        (
            {"SLURM_JOB_ID": "31", "SLURM_JOB_NUM_NODES": "1", "SLURM_NTASKS": "1", "SLURM_GPUS_ON_NODE": "4"},
            "nodes 1/0 processes 4 rank 0/4 local 0 at 127.0.0.1:20031",
        ),
        # a task for each of two GPUs
        (
            {
                "SLURM_JOB_ID": "12031", "SLURM_JOB_NUM_NODES": "1", "SLURM_NTASKS": "2", "SLURM_GPUS_ON_NODE": "2",
                "SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NODEID": "0",
            },
            "nodes 1/0 processes 2 rank 1/2 local 1 at 127.0.0.1:20031",
        ),
        # two nodes, a task on each, torchrun for its four GPUs
        (
            {
                "SLURM_JOB_ID": "5", "SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS": "2", "SLURM_GPUS_ON_NODE": "4",
                "SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_NODEID": "1", "MASTER_ADDR": "n1",
            },
            "nodes 2/1 processes 4 rank 4/8 local 0 at n1:20005",
        ),
        # two nodes with two tasks each
        (
            {
                "SLURM_JOB_ID": "5", "SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS": "4", "SLURM_GPUS_ON_NODE": "2",
                "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "MASTER_ADDR": "n1", "MASTER_PORT": "9",
            },
            "nodes 2/1 processes 2 rank 3/4 local 1 at n1:9",
        ),
    ],
    ids=["alone", "torchrun", "tasks", "two nodes", "two nodes with tasks"],
)  # fmt: skip
def test_what_torchrun_reads_comes_from_slurms_variables(project, variables, expected):
    shown = (
        "bash -c 'echo nodes $NNODES/$NODE_RANK processes $NPROC_PER_NODE rank $RANK/$WORLD_SIZE local $LOCAL_RANK "
        "at $MASTER_ADDR:$MASTER_PORT'"
    )
    assert JobUnderTest(project, shown, **variables).end() == (0, expected + "\n")


def test_a_step_smaller_than_its_job_meets_at_its_own_first_node(project, tmp_path):
    """srun --nodes=2 in a job of four: a task on each."""
    (tmp_path / "scontrol").write_text('#!/bin/bash\n[[ $* == "show hostnames n[3-4]" ]] && printf "n3\\nn4\\n"\n')
    (tmp_path / "scontrol").chmod(0o755)
    variables = {
        "SLURM_JOB_ID": "5", "SLURM_JOB_NUM_NODES": "4", "SLURM_JOB_NODELIST": "n[1-4]", "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_NODELIST": "n[3-4]", "SLURM_NTASKS": "2", "SLURM_PROCID": "1", "SLURM_NODEID": "1",
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
    }  # fmt: skip
    shown = '. papermill_jobs/job.sh && export_rendezvous && echo "$NNODES/$NODE_RANK $RANK/$WORLD_SIZE $MASTER_ADDR"'
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM", "MASTER"))}
    done = subprocess.run(
        ["bash", "-c", shown], cwd=project, env=clean | variables, capture_output=True, text=True, check=True
    )
    assert done.stdout == "2/1 1/2 n3\n"


def test_a_script_that_was_started_by_hand_is_not_said_to_be_queued_again(saving):
    job = saving(LMCORE_JOB_ID="")
    job.send(signal.SIGUSR1)
    code, said = job.end()
    assert (code, "queued again" in said) == (75, False)
    last = read_lines(job.out)[-1]
    assert (last.id.startswith("by-hand-"), last.state, last.values["code"]) == (True, "exit", "75")


def test_an_output_folder_that_cannot_be_made_is_named(project):
    (project / "out").write_text("a file")
    code, said = JobUnderTest(project, "true").end()
    assert code == 2
    assert said == f"lmcore: The folder {project / 'out'} cannot be made (File exists); choose another OUT.\n"
