"""Finding and killing what a private Slurm cluster has started: daemons, slurmstepds, the processes of jobs."""

import contextlib
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil


def cluster_processes(folder: Path, node: str = "*") -> Iterator[psutil.Process]:
    """Processes of the cluster in `folder`, or of one of its nodes, known by their environment or by their open log.

    Two variables name the cluster and the node: LMCORE_TEST_CLUSTER and SLURMD_NODENAME. A slurmstepd writes its
    title over its environment, but holds the log of its node open.
    """
    logs = {str(path) for path in folder.glob(f"{node}.log")}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.name().startswith("slurmstepd"):
                found = any(each.path in logs for each in process.open_files())
            else:
                variables = process.environ()
                found = variables.get("LMCORE_TEST_CLUSTER") == str(folder)
                found = found and node in ("*", variables.get("SLURMD_NODENAME"))
            if found:
                yield process


def kill(processes: Iterable[psutil.Process]) -> None:
    """SIGKILL to the processes, and waits until they have ended (a zombie has, whoever its parent is)."""
    found = {process for process in processes if process.pid != os.getpid()}
    for process in list(found):  # a job may have emptied its environment: it is known as a slurmstepd's child
        with contextlib.suppress(psutil.NoSuchProcess):
            found.update(process.children(recursive=True))
    # Suspended first: a slurmstepd that outlives its job, if only for a moment, reports that the job has failed.
    for step in (psutil.Process.suspend, psutil.Process.kill):
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                step(process)
    end = time.monotonic() + 10
    while any(_alive(process) for process in found) and time.monotonic() < end:
        time.sleep(0.02)


def _alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
