"""The fault suite: a bench with one undisturbed run, and what became of the faults that were tried on others."""

import os
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from fault_bench import Bench

FAULT = "fault"
"""Name of a fault's kind and outcome in a test's report: so those of all of pytest-xdist's workers come together."""
OUTCOMES = ("survived", "refused_in_words", "lost")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--faults-report", type=Path, help="JSON file for the figures of the fault suite")


def pytest_configure(config: pytest.Config) -> None:
    """Not in the workers of pytest-xdist, which report to the process that adds up, nor for all of tests/."""
    if hasattr(config.option, "faults_report") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Report(config.option.faults_report))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("faults")


@pytest.fixture(scope="session")
def tries(request) -> Callable[[int], int]:
    """Of so many random faults of a kind, how many are tried: all for a report, else a tenth of them."""
    reported = request.config.getoption("--faults-report") is not None
    return lambda count: count if reported else -(-count // 10)


@pytest.fixture
def rng(request) -> random.Random:
    """A generator of its own for each test."""
    return random.Random(f"0 {request.node.name}")


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
def fault(request) -> Callable:
    """`with fault(kind) as it` counts a fault: lost if the block fails, else refused if `it.refused`, else survived."""

    @contextmanager
    def fault(kind: str) -> Iterator[SimpleNamespace]:
        outcome, it = "lost", SimpleNamespace(refused=False)
        try:
            yield it
            outcome = "refused_in_words" if it.refused else "survived"
        finally:
            request.node.user_properties.append((FAULT, [kind, outcome]))

    return fault


class Report:
    """Adds up the faults of all tests; writes them to `file` when the last one has ended."""

    def __init__(self, file: Path | None):
        self.file, self.tried = file, []
        if file is not None:
            from lmcore.provenance import environment

            self.provenance = environment()  # of the code that is tried: minutes later there may be another

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            self.tried += [(report.location, *found) for name, found in report.user_properties if name == FAULT]

    def pytest_terminal_summary(self, terminalreporter) -> None:
        counts = Counter(outcome for *_, outcome in self.tried)
        words = ", ".join(f"{counts[outcome]:,} {outcome}" for outcome in OUTCOMES)
        terminalreporter.write_line(f"faults: {len(self.tried):,} tried, {words}")

    def pytest_sessionfinish(self) -> None:
        if self.file is None:
            return
        from lmcore.files import write_json

        kinds: dict[str, Counter] = {}
        for _, kind, outcome in sorted(self.tried):  # in the order of the tests, whoever ran them
            kinds.setdefault(kind, Counter()).update(("tried", outcome))
        counted = {kind: {name: counts[name] for name in ("tried", *OUTCOMES)} for kind, counts in kinds.items()}
        rows = [{"kind": kind} | numbers for kind, numbers in counted.items()]
        write_json(self.file, {"provenance": self.provenance, "faults": rows})
