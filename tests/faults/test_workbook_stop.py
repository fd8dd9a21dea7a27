"""Stop signals that hit a running workbook: real processes, real signals, real training."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from notebook_projects import answered, code, make_project, parameters, results

from lmcore.config import TrainConfig, replace, to_dict
from lmcore.errors import EXIT_INTERRUPTED
from lmcore.run import RunFolder
from lmcore.stopping import SAME_SIGNAL
from lmcore.train import train
from workbook.record import NotebookRecord, read_record, read_records

PATIENCE = 120
"""Seconds after which a condition that has not come true fails the test."""

KERNEL = "ipykernel_launcher"
ONE_THREAD = os.environ | {"OMP_NUM_THREADS": "1"}
"""Environment of processes that do not slow each other down."""

KEPT = code("'an output to keep'")


def training(*names: str):
    """A cell that trains runs of these names side by side, with seeds 0, 1 and so on."""
    return code(f"""import json
from lmcore.config import TrainConfig, from_dict, replace
from workbook.sweep import run_sweep
config = from_dict(TrainConfig, json.load(open("../config.json")))
runs = {{name: replace(config, seed=seed) for seed, name in enumerate({names})}}
[run.status()["state"] for run in run_sweep(runs, f"{{out}}/runs", workers=2).values()]""")


@pytest.fixture(scope="module")
def config(bench) -> TrainConfig:
    return replace(bench.config, steps=1200, log_interval=5, eval_interval=600, checkpoint_interval=100)


@pytest.fixture
def endless(config) -> TrainConfig:
    """More steps than any test waits for: whatever else keeps the processors busy, a signal comes before the end."""
    return replace(config, steps=1_000_000, eval_interval=1_000_000)


@pytest.fixture(scope="module")
def undisturbed(bench, config) -> RunFolder:
    """The run that nobody stops."""
    run = bench.new()
    train(config, run)
    return run


class Workbook:
    """`workbook run` in a process of its own, on a toy project."""

    def __init__(self, folder: Path, *cells, config: TrainConfig | None = None, **others):
        self.folder = make_project(folder / "project", _01_toy=["# 01 Toy", parameters(), KEPT, *cells], **others)
        self.out = self.folder / "made"
        if config is not None:
            (self.folder / "config.json").write_text(json.dumps(to_dict(config)))

    def start(self, *options: str) -> "Workbook":
        command = [sys.executable, "-m", "workbook", "run", "--out", str(self.out), "--resume", *options]
        self.process = subprocess.Popen(
            command, cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ONE_THREAD
        )
        return self

    def wait_for(self, condition) -> None:
        """Waits until the condition is true. Fails if the workbook ends before, with what it said."""
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert self.process.poll() is None, self.process.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def wait_for_steps(self, *runs: str) -> None:
        self.wait_for(lambda: all(self.run(name).metrics_lines() for name in runs))

    def end(self, code: int = 0) -> str:
        """What was said up to the end, with this exit code."""
        said, _ = self.process.communicate(timeout=PATIENCE)
        assert self.process.returncode == code, said
        return said

    def run(self, name: str) -> RunFolder:
        return RunFolder(self.out / "runs" / name)

    def record(self) -> NotebookRecord:
        return read_record(self.out, "01_toy")

    def processes(self, word: str = "") -> list[psutil.Process]:
        """All processes that run in the project's folder, or those with this word in their command."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                here = Path(process.cwd()).is_relative_to(self.folder) and process.status() != psutil.STATUS_ZOMBIE
                if here and (not word or word in process.cmdline()):
                    found.append(process)
        return found

    def results(self) -> list[str]:
        """The results of the cells in the executed notebook."""
        return results(self.out / "notebooks" / "01_toy.ipynb")


@pytest.fixture
def workbook(tmp_path):
    """A function that makes a `Workbook`; its processes are ended after the test."""
    made = []

    def make(*cells, **options) -> Workbook:
        made.append(Workbook(tmp_path, *cells, **options))
        return made[-1]

    yield make
    for book in made:
        for process in book.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def require_stopped(book: Workbook, name: str) -> str:
    """The workbook ends as one stopped in its third cell, and no process is left; returns what it said."""
    said = book.end(EXIT_INTERRUPTED)
    assert f"Notebook 01_toy was stopped by {name} at code cell 3. The same command with --resume" in said
    record = book.record()
    assert (record.state, record.cell, record.error) == ("stopped", 3, name)
    assert "'an output to keep'" in book.results()
    assert book.processes() == []
    return said


def test_training_is_stopped_and_goes_on_as_if_nothing_had_been(workbook, bench, config, undisturbed):
    names = ("toy", "other")
    book = workbook(training(*names), config=config).start("--no-writeup")
    book.wait_for_steps(*names)
    book.process.send_signal(signal.SIGUSR1)
    book.process.send_signal(signal.SIGUSR1)
    require_stopped(book, "SIGUSR1")
    assert [book.run(name).status()["state"] for name in names] == ["interrupted"] * 2
    assert 0 < book.run("toy").status()["step"] < config.steps
    book.start("--no-writeup").end()
    assert book.results()[-1] == "['complete', 'complete']"
    bench.require_same(book.run("toy"), undisturbed)


def test_a_second_ctrl_c_ends_all_processes_at_once(workbook, endless):
    book = workbook(training("toy"), config=endless).start("--no-writeup")
    book.wait_for_steps("toy")
    (child,) = book.processes("work")
    child.suspend()  # it will not save itself
    book.process.send_signal(signal.SIGINT)
    time.sleep(2 * SAME_SIGNAL)
    assert book.process.poll() is None
    began = time.monotonic()
    book.process.send_signal(signal.SIGINT)
    said = book.end(128 + signal.SIGINT)
    assert time.monotonic() - began < 10
    assert "SIGINT: stopping where nothing is lost; a second signal ends the process at once" in said
    assert said.endswith("lmcore: SIGINT again: ended at once; what was saved stays.\n")
    psutil.wait_procs(book.processes(), timeout=PATIENCE)
    assert book.processes() == []
    assert book.record().state == "stopped"


def test_every_process_gets_the_signal_at_once(workbook, endless):
    book = workbook(training("toy"), config=endless).start("--no-writeup")
    book.wait_for_steps("toy")
    kernels, family = book.processes(KERNEL), book.processes()
    assert kernels
    for process in sorted(family, key=lambda process: process not in kernels):  # the kernel dies first
        process.send_signal(signal.SIGTERM)
    require_stopped(book, "SIGTERM")
    assert book.run("toy").checkpoints()


LOOPS = {
    "a cell that does not listen": (
        "while True:\n    try:\n        time.sleep(9)\n    except KeyboardInterrupt:\n        pass", signal.SIGUSR1
    ),
    "hung up, with a child in a session": (
        "import subprocess; subprocess.Popen(['sleep', '1000'], start_new_session=True)\nwhile True: 1", signal.SIGHUP
    ),
}  # fmt: skip


@pytest.mark.parametrize(("loop", "number"), LOOPS.values(), ids=LOOPS)
def test_a_cell_without_training_is_interrupted(workbook, loop, number):
    book = workbook(code("import time; open('../begun', 'w').close()\n" + loop), code("1")).start("--stop-seconds", "2")
    book.wait_for((book.folder / "begun").exists)
    book.process.send_signal(number)
    assert "Traceback" not in require_stopped(book, number.name)
    assert not (book.out / "writeup").exists()


def test_while_the_kernel_starts(workbook):
    book = workbook().start()
    book.wait_for(lambda: book.processes(KERNEL))
    book.process.send_signal(signal.SIGTERM)
    assert "Notebook 01_toy was stopped by SIGTERM" in book.end(EXIT_INTERRUPTED)
    assert book.record().state == "stopped"
    assert book.processes() == []


def test_between_notebooks_and_while_the_writeup_is_made(workbook):
    stop = code("import os, signal; os.kill(os.getppid(), signal.SIGUSR1)")
    book = workbook(stop, _02_second=["# 02", parameters(), answered("linear", "x")]).start()
    said = book.end(EXIT_INTERRUPTED)
    assert "Notebook 02_second was not run. The same command with --resume resumes from there." in said
    assert [record.state for record in read_records(book.out)] == ["done", "not run"]
    book.start()
    book.wait_for(lambda: read_record(book.out, "02_second").state == "done")
    book.process.send_signal(signal.SIGUSR1)
    assert "01_toy: kept, done before" in book.end()
    assert (book.out / "writeup" / "cs336-a1.pdf").read_bytes().startswith(b"%PDF")


def test_all_but_the_kernel_is_killed(workbook, bench, config, undisturbed):
    book = workbook(training("toy"), config=config).start("--no-writeup")
    book.wait_for(lambda: book.run("toy").checkpoints())
    kernels = book.processes(KERNEL)
    (child,) = book.processes("work")
    book.process.send_signal(signal.SIGKILL)
    child.kill()
    book.end(-signal.SIGKILL)
    assert book.record().state == "stopped"
    assert book.results() == ["'an output to keep'"]
    assert kernels
    assert not psutil.wait_procs(kernels, timeout=PATIENCE)[1]
    book.start("--no-writeup").end()
    assert book.results()[-1] == "['complete']"
    assert len(book.run("toy").starts()) == 2
    bench.require_same(book.run("toy"), undisturbed)
