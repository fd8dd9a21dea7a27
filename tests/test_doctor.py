"""lmcore doctor: what it reports agrees with the machine it runs on; what is missing is said with what to do."""

import subprocess
import sys

import pooch
import pytest
import torch

from lmcore import cli, speed
from lmcore.cli import doctor
from lmcore.data import open_data
from lmcore.device import select_device


def test_facts_are_this_machine(tmp_path, embedded_data, monkeypatch):
    kernels = speed.kernels(select_device()[0])  # remembers whether Triton is here, which is hidden below
    (tmp_path / "data" / "broken").mkdir(parents=True)
    (tmp_path / "data" / "broken" / "manifest.json").write_text("{")
    (tmp_path / "data" / "whole").symlink_to(embedded_data)
    monkeypatch.setenv("NSYS", "off")
    monkeypatch.delenv("LMCORE_GPT2", raising=False)
    monkeypatch.setattr(pooch, "os_cache", lambda _: tmp_path)
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    facts, (device, reason) = dict(doctor.examine(tmp_path)), select_device()
    assert facts["Python"].startswith(f"{sys.version_info.major}.{sys.version_info.minor}.")
    assert facts["torch"].startswith(torch.__version__)
    assert facts["Device"].startswith(f"{device.type} (")
    assert facts["Device"].endswith(f", because {reason}")
    assert facts["Kernels"] == kernels
    assert facts["pyarrow"] == "missing, for Parquet files, as which WikiText-103 comes, too: pip install pyarrow"
    assert f"There is no tokenizer in {tmp_path / 'gpt2'}" in facts["GPT-2 tokenizer"]
    assert "NSYS=off" in facts["nsys"]
    assert "manifest.json" in facts[str(tmp_path / "data" / "broken")]
    assert facts[str(tmp_path / "data" / "whole")] == f"{len(open_data(embedded_data).train):,} training tokens"


def test_it_does_not_wait_for_pandas():
    source = "import sys; from lmcore.cli.doctor import examine; dict(examine()); sys.exit('pandas' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", source], check=False).returncode == 0


@pytest.mark.parametrize(("major", "found"), [(0, "plain operations"), (8, "portable"), (9, "Hopper's")])
def test_kernels_and_why(major, found, monkeypatch):
    monkeypatch.setattr(speed.dispatch, "runs_triton", lambda device: major > 0)
    monkeypatch.setattr(speed.dispatch, "is_hopper", lambda device: major == 9)
    monkeypatch.setattr(speed.attention, "hopper_kernels", lambda: speed)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
    assert speed.kernels(torch.device("cuda")).startswith(found)


def test_measure_trains_what_suits_a_cpu(monkeypatch, capsys):
    monkeypatch.setattr("lmcore.device.select_device", lambda: (torch.device("cpu"), "it is tested"))
    monkeypatch.setattr(doctor, "RECIPES", {name: doctor.RECIPES[name] for name in ("smoke", "handout")})
    assert cli.main(["doctor", "--measure"]) == 0
    name, rate = capsys.readouterr().out.splitlines()[-1].split()[:2]
    assert (name, float(rate.replace(",", "")) > 0) == ("smoke", True)
