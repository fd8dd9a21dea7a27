"""Fixtures shared by all tests."""

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder of real corpora and tokenizer files (tinystories/, gpt2/, …); the test is skipped where there is none."""
    folder = Path(os.environ.get("LMCORE_TEST_DATA", Path(__file__).parents[2] / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip("no real corpora here: set LMCORE_TEST_DATA to a folder with tinystories/ and gpt2/")
    return folder


@pytest.fixture(scope="session")
def embedded_data(tmp_path_factory) -> Path:
    """A small prepared corpus of the embedded stories with a vocabulary of at most 300."""
    from lmcore.data import CorpusConfig, prepare

    folder = tmp_path_factory.mktemp("embedded")
    return prepare("embedded", "bpe:300", folder, CorpusConfig(num_documents=200), progress=False).folder
