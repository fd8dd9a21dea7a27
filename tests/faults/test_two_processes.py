"""Several processes on one run folder: one trains, the others wait or are refused."""

import signal
from concurrent.futures import ThreadPoolExecutor

import torch
from fault_bench import SECONDS, AtSteps, Bench, ended, wait_until

from lmcore.config import to_dict
from lmcore.errors import EXIT_USER_ERROR
from lmcore.files import write_json
from lmcore.run import RunFolder
from workbook.sweep import run_sweep, work


def test_several_train_at_once(bench: Bench, fault, tries):
    for _ in range(tries(6)):
        run = bench.new()
        with fault("two processes train in one folder"):
            processes = [bench.start(run) for _ in range(3)]
            codes = [ended(process) for process in processes]
            assert set(codes) <= {0, EXIT_USER_ERROR}, bench.said(run)
            assert codes.count(0) >= 1
            if EXIT_USER_ERROR in codes:
                assert "Another process is using the run folder" in bench.said(run)
            bench.require_same(run)


def test_a_sweep_goes_on_when_another_ones_worker_is_killed(bench: Bench, fault):
    sweep, config = bench.new(), bench.config
    first, second = RunFolder(sweep.path / "first"), sweep.path / "second"
    with fault("another sweep's worker is killed"), ThreadPoolExecutor() as threads:
        write_json(sweep.path / "sweep.json", {"first": to_dict(config)})
        worker = bench.processes.Process(target=slow_worker, args=(sweep.path,))
        worker.start()
        wait_until(first.is_busy, "the worker has the first run")
        following = threads.submit(run_sweep, {"first": config, "second": config}, sweep.path)
        wait_until(lambda: second.exists() or following.done(), "the other sweep's worker has taken the second run")
        assert second.exists(), following.result()
        worker.kill()
        assert ended(worker) == -signal.SIGKILL, "the worker was to be killed in the first run"
        for run in following.result(SECONDS).values():
            bench.require_same(run)


def slow_worker(folder) -> None:
    torch.set_num_threads(1)
    AtSteps(seconds=1.0)()
    work(folder)
