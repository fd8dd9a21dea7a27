"""lmcore doctor: what it finds must agree with the machine it runs on."""

import shutil
import sys

import pytest
import torch

from lmcore.device import select_device
from lmcore.workbook import doctor


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
    assert 0 < facts["disk_free_bytes"] <= shutil.disk_usage("/").total * 1000
    (broken,) = facts["data"]["prepared"]
    assert "manifest.json" in broken["error"]


def test_optional_parts_say_what_they_are_for(monkeypatch):
    wanted = {"json": ("a", "b"), "no_such_module": ("dreams", "sleep"), "sh": ("more", "get it")}
    monkeypatch.setattr(doctor, "OPTIONAL_PARTS", wanted)
    parts = {part["name"]: part for part in doctor.optional_parts()}
    assert [part["present"] for part in parts.values()] == [True, False, True]
    assert parts["no_such_module"]["purpose"] == "dreams"


def test_text_names_what_is_missing(facts):
    part = {"name": "nsys", "present": False, "purpose": "profiling", "remedy": "install it"}
    corpus = {"folder": "data/a", "train_tokens": 12345, "valid_tokens": 67, "error": None}
    corpora = [corpus, {"folder": "data/b", "error": "data/b/train.bin is too short."}]
    data = {"prepared": corpora, "gpt2_tokenizer": {"present": False, "error": "it is not here"}}
    text = doctor.as_text(facts | {"optional": [part], "data": data, "driver": "550.1"})
    assert "missing; to get it: install it — for profiling" in text
    assert "12,345 training and 67 validation tokens" in text
    assert "data/b/train.bin is too short." in text
    assert "missing: it is not here" in text
    assert "driver 550.1" in text


def test_gpt2_tokenizer_is_looked_for_without_a_download(tmp_path, monkeypatch):
    import pooch

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LMCORE_GPT2", raising=False)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(pooch, "retrieve", lambda *_, **__: pytest.fail("it tried to download"))
    found = doctor.gpt2_tokenizer()
    assert found == {"present": False, "error": found["error"]}
    assert "LMCORE_GPT2" in found["error"]


def test_gpt2_tokenizer_is_found(shared_data, monkeypatch):
    monkeypatch.setenv("LMCORE_GPT2", str(shared_data / "gpt2"))
    assert doctor.gpt2_tokenizer() == {"present": True, "error": None}


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """Makes programs that print what they are told; no others are found."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin" if shutil.which("sbatch") is None else str(tmp_path))

    def add(name, text, code=0):
        words = f"printf '%s\\n' '{text}' >&{1 if code == 0 else 2}"
        (tmp_path / name).write_text(f"#!/bin/sh\n{words}\nexit {code}\n")
        (tmp_path / name).chmod(0o755)

    return add


def test_slurm_is_not_there(programs):
    part = doctor.slurm()
    assert part["present"] is False
    assert "front end" in part["remedy"]


@pytest.mark.parametrize(
    ("sbatch", "sinfo", "code", "detail"),
    [
        (
            "slurm-wlm 22.05.8",
            "main|gpu:a40:8(S:0-1),ssd:1\nmain|gpu:h200:4\ncompute|(null)\nspot|gpu:2",
            0,
            "22.05.8, 3 partitions, GPUs in main (gpu:a40:8 or gpu:h200:4) and spot (gpu:2)",
        ),
        ("slurm-wlm 22.05.8", "compute|(null)", 0, "22.05.8, 1 partition, no partition with GPUs"),
        ("slurm 24.11.0", "unable to contact it", 1, "24.11.0; its controller does not answer (unable to contact it)"),
    ],
)
def test_slurm_tells_of_partitions_with_gpus(programs, sbatch, sinfo, code, detail):
    programs("sbatch", sbatch)
    programs("sinfo", sinfo, code)
    assert (doctor.slurm()["present"], doctor.slurm()["detail"]) == (True, detail)
