"""The fault suite: a bench with one undisturbed run, and a tally of what was tried against others like it."""

import json
import os
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, also in the processes that are started

from fault_bench import Bench, Tally


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--faults-report", type=Path, help="JSON file for the figures of the fault suite")
    parser.addoption("--faults-seed", type=int, default=0, help="seed of the random moments and positions")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("faults")


@pytest.fixture(scope="session")
def seed(request) -> int:
    return request.config.getoption("--faults-seed")


@pytest.fixture
def rng(seed, request) -> random.Random:
    """A generator of its own for each test; its seed is shown where a test fails."""
    print(f"--faults-seed {seed}")
    return random.Random(f"{seed} {request.node.name}")


@pytest.fixture(scope="session")
def bench(tmp_path_factory) -> Iterator[Bench]:
    """The runs lie in memory where that can be: hundreds of saves would mostly wait for fsync."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield Bench(tmp_path_factory.mktemp("faults"))
        return
    with tempfile.TemporaryDirectory(dir=memory, prefix="lmcore-faults-") as folder:
        yield Bench(Path(folder))


@pytest.fixture(scope="session")
def tally(request, seed) -> Iterator[Tally]:
    from lmcore.provenance import environment

    tally, provenance = Tally(seed), environment()  # of the code that is tried: minutes later there may be another
    yield tally
    if report := request.config.getoption("--faults-report"):
        from lmcore.files import write_json

        write_json(report, {"provenance": provenance, "faults": tally.rows()})
    print(json.dumps(tally.rows(), indent=2))
