"""The private Slurm cluster that the tests of this folder share: each worker of pytest-xdist has its own."""

import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster, missing_programs


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A running cluster of three nodes; the test is skipped where Slurm is not installed."""
    if missing := missing_programs():
        pytest.skip(
            f"no {', '.join(missing)} here: install Debian's slurmctld slurmd slurm-client munge to run these tests"
        )
    signal.signal(signal.SIGTERM, lambda *_: pytest.exit("ended by SIGTERM", 143))  # stops the cluster, too
    # sockets lie in it, whose paths must be short
    with tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp") as folder, Cluster(Path(folder)) as running:
        yield running
