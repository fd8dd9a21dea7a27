"""lmcore doctor: what it reports must agree with the machine it runs on."""

import shutil
import sys

import pytest
import torch

from lmcore import doctor
from lmcore.device import select_device


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
    here = tmp_path_factory.mktemp("here")
    (here / "data" / "broken").mkdir(parents=True)
    (here / "data" / "broken" / "manifest.json").write_text("{")
    return doctor.examine(here)


def test_facts_are_this_machine(facts):
    device, reason = select_device()
    assert facts["python"]["version"].startswith(f"{sys.version_info.major}.{sys.version_info.minor}.")
    assert facts["torch"]["version"] == torch.__version__
    assert (facts["device"]["type"], facts["device"]["reason"]) == (device.type, reason)
    (broken,) = facts["data"]["prepared"]
    assert "manifest.json" in broken["error"]


def test_text_names_what_is_missing(facts):
    part = {"name": "nsys", "present": False, "purpose": "profiling", "remedy": "install it"}
    corpus = {"folder": "data/a", "train_tokens": 12345, "valid_tokens": 67, "error": None}
    corpora = [corpus, {"folder": "data/b", "error": "data/b/train.bin is too short."}]
    data = {"prepared": corpora, "gpt2_tokenizer": {"present": False, "error": "it is not here"}}
    text = doctor.as_text(facts | {"optional": [part], "data": data, "driver": "550.1"})
    assert "missing: install it — for profiling" in text
    assert "12,345 training and 67 validation tokens" in text
    assert "data/b/train.bin is too short." in text
    assert "missing: it is not here" in text
    assert "driver 550.1" in text


def test_gpt2_tokenizer_is_looked_for_without_a_download(tmp_path, shared_data, monkeypatch):
    import pooch

    monkeypatch.setenv("LMCORE_GPT2", str(shared_data / "gpt2"))
    assert doctor.gpt2_tokenizer() == {"present": True, "error": None}
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LMCORE_GPT2")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(pooch, "retrieve", lambda *_, **__: pytest.fail("it tried to download"))
    assert "LMCORE_GPT2" in doctor.gpt2_tokenizer()["error"]


@pytest.mark.parametrize(
    ("sinfo", "detail"),
    [
        ("echo main gpu:a40:8; echo compute '(null)'; echo main gpu:a40:8", "GPUs in main (gpu:a40:8)"),
        ("echo compute '(null)'", "no partition with GPUs"),
        ("exit 1", "does not answer"),
    ],
)
def test_slurm_tells_of_partitions_with_gpus(tmp_path, monkeypatch, sinfo, detail):
    for name in ("sbatch", "sinfo"):
        (tmp_path / name).write_text(f"#!/bin/sh\n{sinfo}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    part = doctor.slurm()
    assert part["present"]
    assert detail in part["detail"]


@pytest.mark.skipif(shutil.which("sbatch") is not None, reason="there is Slurm here")
def test_slurm_is_not_there():
    assert "front end" in doctor.slurm()["remedy"]
