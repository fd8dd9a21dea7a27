"""lmcore doctor: what it reports agrees with the machine it runs on; what is missing is said with what to do."""

import subprocess
import sys

import pooch
import torch

from lmcore.cli import doctor
from lmcore.data import open_data
from lmcore.device import select_device


def test_facts_are_this_machine(tmp_path, embedded_data, monkeypatch):
    (tmp_path / "data" / "broken").mkdir(parents=True)
    (tmp_path / "data" / "broken" / "manifest.json").write_text("{")
    (tmp_path / "data" / "whole").symlink_to(embedded_data)
    monkeypatch.setenv("NSYS", "off")
    monkeypatch.delenv("LMCORE_GPT2", raising=False)
    monkeypatch.setattr(pooch, "os_cache", lambda _: tmp_path)
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    facts, (device, reason) = doctor.examine(tmp_path), select_device()
    assert facts["Python"].startswith(f"{sys.version_info.major}.{sys.version_info.minor}.")
    assert facts["torch"].startswith(torch.__version__)
    assert facts["Device"].startswith(f"{device.type} (")
    assert facts["Device"].endswith(f", because {reason}")
    assert facts["pyarrow"] == "missing, for Parquet files, as which WikiText-103 comes, too: pip install pyarrow"
    assert f"There is no tokenizer in {tmp_path / 'gpt2'}" in facts["GPT-2 tokenizer"]
    assert "NSYS=off" in facts["nsys"]
    assert "manifest.json" in facts[str(tmp_path / "data" / "broken")]
    assert facts[str(tmp_path / "data" / "whole")] == f"{len(open_data(embedded_data).train):,} training tokens"


def test_it_does_not_wait_for_pandas():
    source = "import sys; from lmcore.cli.doctor import examine; examine(); sys.exit('pandas' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", source], check=False).returncode == 0
