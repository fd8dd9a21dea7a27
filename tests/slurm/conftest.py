"""The private Slurm cluster that the tests of this folder share: each worker of pytest-xdist has its own."""

import contextlib
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import LONGEST_PATH, Cluster, missing_programs


@pytest.fixture(scope="session")
def cluster(tmp_path_factory) -> Iterator[Cluster]:
    """A running cluster of three nodes; the test is skipped where Slurm is not installed."""
    with running_cluster(tmp_path_factory) as running:
        yield running


@pytest.fixture
def forgetful(tmp_path_factory) -> Iterator[Cluster]:
    """A cluster of its own that forgets jobs soon after their end, as most do; it has no accounting either."""
    with running_cluster(tmp_path_factory, min_job_age=5) as running:
        yield running


@contextlib.contextmanager
def running_cluster(tmp_path_factory, **options: int) -> Iterator[Cluster]:
    """Starts a cluster in a folder with a short path."""
    if missing := missing_programs():
        pytest.skip(
            f"no {', '.join(missing)} here: install Debian's slurmctld slurmd slurm-client munge to run these tests"
        )
    signal.signal(signal.SIGTERM, lambda *_: pytest.exit("ended by SIGTERM", 143))  # stops the cluster, too
    folder = tmp_path_factory.mktemp("slurm")
    if len(str(folder)) <= LONGEST_PATH:
        with Cluster(folder, **options) as running:
            yield running
        return
    with tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp") as short, Cluster(Path(short), **options) as running:
        yield running
