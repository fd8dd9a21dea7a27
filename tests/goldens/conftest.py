"""Fixtures of the goldens. They are compared on one thread: sums in another order have other last digits."""

import os
import shutil
from pathlib import Path

import pytest

os.environ.setdefault("LMCORE_GOLDENS_PROJECT", str(Path(__file__).parents[2]))


LONG_SUITES = pytest.StashKey[list[str]]()
"""Names of the tests of the long suites, as far as this run of pytest has collected them."""


@pytest.hookimpl(tryfirst=True)  # before they are left out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    suites = ("tests/slurm/", "tests/faults/")
    config.stash[LONG_SUITES] = [item.nodeid for item in items if item.nodeid.startswith(suites)]


@pytest.fixture(scope="session")
def collected_here(request) -> list[str]:
    return request.config.stash[LONG_SUITES]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """The committed corpus where it may be written to: opening it notes that it was checked."""
    from golden_runs import CORPUS

    return Path(shutil.copytree(CORPUS, tmp_path_factory.mktemp("goldens") / "corpus"))
