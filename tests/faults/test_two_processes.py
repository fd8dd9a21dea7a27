"""Several processes on one run folder, and signals that stop them: one trains, the others wait or are refused."""

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from fault_bench import SECONDS, Bench, Tally, ended, wait_until
from file_faults import AtSteps

from lmcore.config import to_dict
from lmcore.errors import EXIT_INTERRUPTED, EXIT_USER_ERROR
from lmcore.files import write_json
from lmcore.run import RunFolder
from workbook.sweep import run_or_reuse, run_sweep, work


def test_two_train_at_once(bench: Bench, tally: Tally, tries):
    for _ in range(tries(6)):
        run = bench.new()
        with tally.fault("two processes train in one folder"):
            processes = [bench.start(run) for _ in range(3)]
            codes = [ended(process) for process in processes]
            assert set(codes) <= {0, EXIT_USER_ERROR}, bench.said(run)
            assert codes.count(0) >= 1
            if EXIT_USER_ERROR in codes:
                assert "Another process is using the run folder" in bench.said(run)
            bench.require_same(run)


def test_two_notebooks_want_one_run(bench: Bench, tally: Tally):
    run = bench.new()
    with tally.fault("two notebooks want one run"), ThreadPoolExecutor() as threads:
        for other in [threads.submit(run_or_reuse, bench.config, run.path) for _ in range(2)]:
            assert other.result(SECONDS).status()["state"] == "complete"
        bench.require_same(run)


def test_a_notebook_goes_on_when_the_process_it_follows_is_killed(bench: Bench, tally: Tally):
    run = bench.new()
    with tally.fault("the followed process is killed"), ThreadPoolExecutor() as threads:
        process = bench.start(run, AtSteps(seconds=0.2))
        wait_until(run.is_busy, "the process has the folder")
        following = threads.submit(run_or_reuse, bench.config, run.path)
        wait_until(run.metrics_lines, "the process has written metrics")
        process.kill()
        assert ended(process) == -signal.SIGKILL
        following.result(SECONDS)
        bench.require_same(run)


def test_a_sweep_goes_on_when_another_ones_worker_is_killed(bench: Bench, tally: Tally):
    sweep = bench.new()
    config = bench.config
    first = RunFolder(sweep.path / "first")
    with tally.fault("another sweep's worker is killed"), ThreadPoolExecutor() as threads:
        write_json(sweep.path / "sweep.json", {"first": to_dict(config)})
        worker = bench.processes.Process(target=slow_worker, args=(sweep.path,))
        worker.start()
        wait_until(first.is_busy, "the worker has the first run")
        following = threads.submit(run_sweep, {"first": config, "second": config}, sweep.path)
        second = sweep.path / "second"
        wait_until(lambda: second.exists() or following.done(), "the other sweep's worker has taken the second run")
        assert second.exists(), following.result()
        worker.kill()
        assert ended(worker) == -signal.SIGKILL, "the worker was to be killed in the first run"
        for run in following.result(SECONDS).values():
            bench.require_same(run)


def slow_worker(folder) -> None:
    import torch

    torch.set_num_threads(1)
    AtSteps(seconds=1.0)()
    work(folder)


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_stop_signals_at_random_moments(bench: Bench, tally: Tally, rng: random.Random, tries, number: signal.Signals):
    """From the first moment at which the worker listens, also between two runs."""
    names = ("a", "b", "c")
    for _ in range(tries(10)):
        sweep = bench.new()
        write_json(sweep.path / "sweep.json", {name: to_dict(bench.config) for name in names})
        with tally.fault(f"{number.name} at a random moment of a sweep's worker"):
            stops = 0
            while True:
                ready, listens = multiprocessing.Pipe()
                worker = bench.processes.Process(target=listening_worker, args=(sweep.path, listens))
                worker.start()
                assert ready.poll(SECONDS), "the worker has not begun"
                ready.recv()
                if stops < 4:
                    time.sleep(rng.uniform(0, 0.4))
                    with suppress(ProcessLookupError):  # it has ended
                        os.kill(worker.pid, number)
                code = ended(worker)
                stops += 1
                assert code in (0, EXIT_INTERRUPTED), code
                if code == 0:
                    break
            for name in names:
                bench.require_same(RunFolder(sweep.path / name))
        bench.forget(sweep)


def listening_worker(folder, listens) -> None:
    import torch

    from lmcore.stopping import STOP_SIGNALS, stop_signals

    torch.set_num_threads(1)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # after the work: a signal would end a process that has only to exit
    with stop_signals():
        listens.send("listens")
        work(folder)


def test_a_command_stopped_while_it_starts(bench: Bench, tally: Tally, tmp_path):
    """The signal comes while torch is imported, long before training."""
    run, file = bench.new(), tmp_path / "config.json"
    write_json(file, to_dict(bench.config))
    with tally.fault("SIGUSR1 while the command starts"):
        command = [sys.executable, "-X", "importtime", "-m", "lmcore", "train", "--config", file, "--run", run.path]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        next(line for line in child.stderr if line.rstrip().endswith("torch.types"))
        child.send_signal(signal.SIGUSR1)
        said, _ = child.communicate(timeout=SECONDS)
        assert child.returncode == EXIT_INTERRUPTED
        assert "stopped; the same command resumes" in said
        bench.finish(run)
        bench.require_same(run)
