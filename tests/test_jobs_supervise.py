"""papermill_jobs/job.sh: signals reach the command, and a job asks to be queued again only where it should."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from job_projects import command, job_project, states

from lmcore.workbook.jobs.log import read_lines

SECONDS = 60
LOOP = "while :; do sleep 0.1; done"
SAVES = "mkdir -p out/run/checkpoints; touch out/run/checkpoints/step_$RANDOM$RANDOM.pt; exit 75"
"""What lmcore does at a signal."""


def heard(name: str) -> str:
    """Notes a signal in out/signals, and saves."""
    return f"trap 'echo {name} >>out/signals; {SAVES}' {name}"


SAVING = f"{heard('USR1')}; {heard('TERM')}; touch out/ready; {LOOP}"
STARTING = "touch out/ready; exec sleep 60"
"""A command that was still starting: it has no handler yet, so the signal ends it."""


class JobUnderTest:
    """One job of job.sh that runs a line of bash in the background."""

    def __init__(self, project: Path, line: str, **variables: str):
        self.out = project / "out"
        script = project / "job.bash"
        script.write_text('set -euo pipefail\n. papermill_jobs/job.sh\nsupervise bash -c "$LINE"\n')
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM", "MASTER"))}
        environment |= {"PATH": path, "OUT": str(self.out), "LMCORE_JOB_ID": "local-1", "LMCORE_JOB_NAME": "job"}
        self.process = subprocess.Popen(
            ["bash", str(script)], cwd=project, env=environment | variables | {"LINE": line}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
            # bash cannot trap what it was started to ignore, as by nohup or &
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip

    def send(self, *numbers: int, after: str = "ready", group: bool = False) -> None:
        """Signals to the script alone, or to all its processes, once the command has made this file."""
        end = time.monotonic() + SECONDS
        while not (self.out / after).exists():
            assert self.process.poll() is None, self.process.communicate()[0]
            assert time.monotonic() < end, f"there is no {after}"
            time.sleep(0.02)
        for number in numbers:
            os.killpg(self.process.pid, number) if group else self.process.send_signal(number)

    def end(self) -> tuple[int, str]:
        """Exit code and output."""
        said = self.process.communicate(timeout=SECONDS)[0]
        return self.process.returncode, said

    def states(self) -> list[str]:
        """What it said of itself."""
        return states(self.out, "local-1")


@pytest.fixture
def project(tmp_path) -> Path:
    return job_project(tmp_path / "project")


@pytest.mark.parametrize("code", [0, 1, 2, 75])
def test_the_exit_code_is_the_commands(project, code):
    job = JobUnderTest(project, f"exit {code}")
    assert job.end() == (code, "")
    running, exit = read_lines(job.out)
    assert (running.id, running.name, running.state, running.values["restart"]) == ("local-1", "job", "running", "0")
    assert (exit.state, exit.values) == ("exit", {"code": str(code)})


STOPS = {
    "saved at the time limit": (SAVING, signal.SIGUSR1, 75, ["requeued"]),
    "cancelled": (SAVING, signal.SIGTERM, 75, ["stopping", "exit"]),
    "hung up": (SAVING, signal.SIGHUP, 75, ["stopping", "exit"]),
    "interrupted": (SAVING, signal.SIGINT, 75, ["stopping", "exit"]),
    "still starting": (STARTING, signal.SIGUSR1, 75, ["requeued"]),
    "done in spite of it": ("trap : USR1; touch out/ready; sleep 1; exit 0", signal.SIGUSR1, 0, ["exit"]),
    # a notebook that fails is to be repaired, not run again
    "failed after it": (f"trap 'exit 1' USR1; touch out/ready; {LOOP}", signal.SIGUSR1, 1, ["exit"]),
}


@pytest.mark.parametrize(("line", "number", "code", "expected"), STOPS.values(), ids=STOPS)
def test_what_a_signal_does(project, line, number, code, expected):
    job = JobUnderTest(project, line, SLURM_RESTART_COUNT="2")
    job.send(number)
    assert job.end() == (
        code,
        "Stopped by a signal: queued again, to resume from what is saved.\n" if expected == ["requeued"] else "",
    )
    assert job.states() == ["running", *expected]
    assert read_lines(job.out)[0].values["restart"] == "2"
    if line == SAVING:
        heard = "USR1\n" if number == signal.SIGUSR1 else "TERM\n"
        assert (job.out / "signals").read_text() == heard


@pytest.mark.parametrize(("shown", "expected"), [("2026-11-21T16:51:17", "requeued"), ("None", "exit")])
def test_term_is_a_preemption_where_slurm_says_so(project, tmp_path, monkeypatch, shown, expected):
    """Where preempted jobs are given time they may get TERM alone, as cancelled ones do."""
    command(tmp_path, "scontrol", f"echo '   PreemptEligibleTime=2026-11-21T16:51:14 PreemptTime={shown}'")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    job = JobUnderTest(project, SAVING, SLURM_JOB_ID="1")
    job.send(signal.SIGTERM)
    assert job.end()[0] == 75
    assert states(job.out, "1") == ["running", "stopping", expected]


def test_who_cancels_a_job_that_saves_itself_is_obeyed(project):
    """USR1, then TERM while the command still saves."""
    line = f"trap 'touch out/told; sleep 2; exit 75' USR1; trap '' TERM; touch out/ready; {LOOP}"
    job = JobUnderTest(project, line)
    job.send(signal.SIGUSR1)
    job.send(signal.SIGTERM, after="told")
    assert job.end() == (75, "")
    assert job.states() == ["running", "stopping", "exit"]


def test_signals_that_come_twice_do_no_harm(project):
    """Slurm may signal the command itself as well, and the script passes its own one on."""
    line = "trap 'touch out/told' USR1; touch out/ready; for i in {1..30}; do sleep 0.1; done; exit 75"
    job = JobUnderTest(project, line)
    job.send(signal.SIGUSR1, group=True)
    job.send(signal.SIGUSR1, signal.SIGUSR1, after="told")
    assert job.end()[0] == 75
    assert job.states() == ["running", "requeued"]


def test_a_signal_before_the_command_is_not_lost(project):
    """The command is not even started: the signal comes while the site's setup runs."""
    job = JobUnderTest(project, "touch out/started", LMCORE_SETUP="kill -USR1 $$")
    assert job.end()[0] == 75
    assert job.states() == ["running", "requeued"]
    assert not (job.out / "started").exists()


def test_a_job_that_gets_nowhere_gives_up(project):
    for _ in range(2):
        job = JobUnderTest(project, STARTING, ATTEMPTS="2")
        job.send(signal.SIGUSR1)
        code, said = job.end()
        assert code == 75
        (job.out / "ready").unlink()
    assert job.states() == ["running", "requeued", "running", "gave-up", "exit"]
    assert "stopped 2 times in a row with nothing new saved" in said


def test_the_command_hears_ctrl_c(project):
    """bash would let a command in the background ignore SIGINT, by which nbclient interrupts a cell."""
    program = "import signal; assert signal.getsignal(signal.SIGINT) is signal.default_int_handler"
    assert JobUnderTest(project, f"{sys.executable} -c '{program}'").end() == (0, "")


def test_a_script_that_was_started_by_hand_is_not_said_to_be_queued_again(project):
    job = JobUnderTest(project, SAVING, LMCORE_JOB_ID="")
    job.send(signal.SIGUSR1)
    assert job.end() == (75, "")
    last = read_lines(job.out)[-1]
    assert (last.id.startswith("by-hand-"), last.state, last.values["code"]) == (True, "exit", "75")


def test_an_output_folder_that_cannot_be_made_is_named(project):
    (project / "out").write_text("a file")
    code, said = JobUnderTest(project, "true").end()
    assert code == 2
    assert said == f"lmcore: The folder {project / 'out'} cannot be made (File exists); choose another OUT.\n"


def slurm(id: int, nodes: int, tasks: int, gpus: int, rank: int = 0, local: int = 0, node: int = 0) -> dict[str, str]:
    """The variables of a task of a job."""
    values = {"JOB_ID": id, "JOB_NUM_NODES": nodes, "NTASKS": tasks, "GPUS_ON_NODE": gpus}
    values |= {"PROCID": rank, "LOCALID": local, "NODEID": node}
    return {f"SLURM_{name}": str(value) for name, value in values.items()}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, "nodes 1/0 processes 1 rank 0/1 local 0 at 127.0.0.1:20000"),
        # a task for each of two GPUs
        (slurm(12031, 1, 2, 2, 1, 1), "nodes 1/0 processes 2 rank 1/2 local 1 at 127.0.0.1:20031"),
        # two nodes, a task on each, torchrun for its four GPUs
        (
            slurm(5, 2, 2, 4, 1, 0, 1) | {"MASTER_ADDR": "n1"},
            "nodes 2/1 processes 4 rank 4/8 local 0 at n1:20005",
        ),
        # two nodes with two tasks each
        (
            slurm(5, 2, 4, 2, 3, 1, 1) | {"MASTER_ADDR": "n1", "MASTER_PORT": "9"},
            "nodes 2/1 processes 2 rank 3/4 local 1 at n1:9",
        ),
        # srun --nodes=2 in a job of four, a task on each: a step meets at its own first node
        (
            slurm(5, 4, 2, 1, 1, 0, 1) | {"SLURM_JOB_NODELIST": "n[1-4]", "SLURM_STEP_NUM_NODES": "2",
                                          "SLURM_STEP_NODELIST": "n[3-4]"},
            "nodes 2/1 processes 1 rank 1/2 local 0 at n3:20005",
        ),
    ],
    ids=["alone", "tasks", "two nodes", "two nodes with tasks", "a smaller step"],
)  # fmt: skip
def test_what_torchrun_reads_comes_from_slurms_variables(project, tmp_path, variables, expected):
    command(tmp_path, "scontrol", '[[ $* == "show hostnames n[3-4]" ]] && printf "n3\\nn4\\n"')
    shown = (
        ". papermill_jobs/job.sh && export_rendezvous && echo nodes $NNODES/$NODE_RANK processes $NPROC_PER_NODE "
        "rank $RANK/$WORLD_SIZE local $LOCAL_RANK at $MASTER_ADDR:$MASTER_PORT"
    )
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM", "MASTER"))}
    given = clean | {"PATH": f"{tmp_path}:{os.environ['PATH']}"} | variables
    done = subprocess.run(["bash", "-c", shown], cwd=project, env=given, capture_output=True, text=True, check=True)
    assert done.stdout == f"{expected}\n"
