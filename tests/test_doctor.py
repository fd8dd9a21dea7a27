"""lmcore doctor: what it reports must agree with the machine it runs on."""

import sys

import pytest
import torch

from lmcore.cli import doctor
from lmcore.data import open_data
from lmcore.device import select_device


def test_facts_are_this_machine(tmp_path, embedded_data):
    (tmp_path / "data" / "broken").mkdir(parents=True)
    (tmp_path / "data" / "broken" / "manifest.json").write_text("{")
    facts, (device, reason) = doctor.examine(tmp_path), select_device()
    assert facts["Python"].startswith(f"{sys.version_info.major}.{sys.version_info.minor}.")
    assert facts["torch"].startswith(torch.__version__)
    assert facts["Device"].startswith(f"{device.type} (")
    assert facts["Device"].endswith(f", because {reason}")
    assert "manifest.json" in facts[str(tmp_path / "data" / "broken")]
    tokens = f"{len(open_data(embedded_data).train):,} training and "
    assert doctor.prepared_corpora(embedded_data.parent)[str(embedded_data)].startswith(tokens)


def test_what_is_missing_is_said_with_what_to_do(monkeypatch, tmp_path, shared_data):
    import pooch

    monkeypatch.setenv("LMCORE_GPT2", str(shared_data / "gpt2"))
    assert doctor.examine(tmp_path)["GPT-2 tokenizer"] == "present"
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LMCORE_GPT2")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("NSYS", "off")
    monkeypatch.setattr(pooch, "retrieve", lambda *_, **__: pytest.fail("it tried to download"))
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    facts = doctor.examine(tmp_path)
    assert facts["pyarrow"] == "missing: pip install pyarrow — for WikiText-103, which comes as Parquet"
    assert "LMCORE_GPT2" in facts["GPT-2 tokenizer"]
    assert "NSYS=off" in facts["nsys"]
    assert "lmcore data prepare" in facts["Corpora"]
