"""The private Slurm cluster that the tests of this folder share."""

import signal
from collections.abc import Iterator

import pytest
from cluster import Cluster, missing_programs


@pytest.fixture(scope="session")
def cluster(tmp_path_factory) -> Iterator[Cluster]:
    """A running cluster of three nodes; the test is skipped where Slurm is not installed."""
    if missing := missing_programs():
        pytest.skip(
            f"no {', '.join(missing)} here: install Debian's slurmctld slurmd slurm-client munge to run these tests"
        )
    signal.signal(signal.SIGTERM, lambda *_: pytest.exit("ended by SIGTERM", 143))  # stops the cluster, too
    with Cluster(tmp_path_factory.mktemp("slurm")) as running:
        yield running
