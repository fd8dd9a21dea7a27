"""The fault suite: a bench with one undisturbed run, and a tally of what was tried against others like it."""

import os
import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fault_bench import COLUMNS, Bench, Tally

TALLY = "tally of faults"
"""Name of a test's tally in its report."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--faults-report", type=Path, help="JSON file for the figures of the fault suite")
    parser.addoption("--faults-seed", type=int, default=0, help="seed of the random moments and positions")


def pytest_configure(config: pytest.Config) -> None:
    """Not in the workers of pytest-xdist, which report to the process that adds up, nor for all of tests/."""
    if hasattr(config.option, "faults_report") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(SumOfTallies(config.option.faults_report, config.option.faults_seed))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("faults")


@pytest.fixture(scope="session")
def seed(request) -> int:
    return request.config.getoption("--faults-seed")


@pytest.fixture(scope="session")
def tries(request) -> Callable[[int], int]:
    """Of so many random faults of a kind, how many are tried: all for a report, else a sixth of them."""
    reported = request.config.getoption("--faults-report") is not None
    return lambda count: count if reported else -(-count // 6)


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


@pytest.fixture
def tally(request) -> Iterator[Tally]:
    """The tally of one test. It travels with the test's report, so that `SumOfTallies` has those of all workers."""
    tally = Tally()
    yield tally
    request.node.user_properties.append((TALLY, [request.session.items.index(request.node), tally.outcomes]))


class SumOfTallies:
    """Adds up the tallies of all tests; writes them to `report` when the last one has ended."""

    def __init__(self, report: Path | None, seed: int):
        self.report, self.seed = report, seed
        self.tallies: dict[int, list] = {}
        if report is not None:
            from lmcore.provenance import environment

            self.provenance = environment()  # of the code that is tried: minutes later there may be another

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            self.tallies |= {place: outcomes for name, (place, outcomes) in report.user_properties if name == TALLY}

    def rows(self) -> list[dict]:
        """One row for each kind of fault, in the order of the tests, whoever ran them."""
        return Tally([outcome for _, outcomes in sorted(self.tallies.items()) for outcome in outcomes]).rows(self.seed)

    def pytest_terminal_summary(self, terminalreporter) -> None:
        totals = {column: sum(row[column] for row in self.rows()) for column in COLUMNS}
        terminalreporter.write_line("faults: " + ", ".join(f"{totals[column]:,} {column}" for column in COLUMNS))

    def pytest_sessionfinish(self) -> None:
        if self.report is not None:
            from lmcore.files import write_json

            write_json(self.report, {"provenance": self.provenance, "faults": self.rows()})
