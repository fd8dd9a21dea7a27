"""`lmcore submit train`: what is asked of Slurm, what is refused, and the same without Slurm."""

import json

import pytest

from lmcore import cli
from lmcore.config import CorpusConfig, TrainConfig, from_dict, to_dict
from lmcore.data import open_or_prepare
from lmcore.files import write_json
from lmcore.run import RunFolder

SMALL = {"vocab-size": 300, "d-model": 16, "d-ff": 24, "num-layers": 1, "num-heads": 2, "context-length": 16}
OPTIONS = [word for name, value in SMALL.items() for word in (f"--model.{name}", str(value))]
OPTIONS += ["--batch-size", "4", "--steps", "6", "--device", "cpu", "--optimizer.warmup-steps", "2"]


def submit(*words: object) -> int:
    return cli.main(["submit", "train", *map(str, words)])


def test_what_is_asked_of_slurm(tmp_path, capsys):
    run, site = tmp_path / "run", tmp_path / "site.yaml"
    site.write_text("gpus: a40:1\nmemory: 32G\njobs: {train: {time: '02:00:00'}}\n")
    words = ["--run", run, "--parallel", "fsdp", "--gpus", 8, "--nodes", 2, "--site", site, "--dry-run"]
    assert submit(*words, "--batch-size", 64, "--preset", "large") == 0
    said = capsys.readouterr().out
    for option in ("--gres=gpu:a40:8", "--nodes=2", "--ntasks-per-node=8", "--mem=32G", "--time=02:00:00"):
        assert option in said
    assert f"RUN={run}" in said
    assert said.rstrip().endswith("papermill_jobs/train.sbatch")
    assert not run.exists()
    assert submit(*words, "--device", "cpu") == 0
    assert "--gres=none" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--gpus", 2), "2 processes need a way to divide the work: add --parallel ddp, zero1 or fsdp."),
        (("--gpus", 2, "--nodes", 3, "--parallel", "ddp"), "batch_size (32) must divide by 6 processes."),
        (("--gpus", 0), "--gpus must be at least 1, not 0."),
        (("--nodes", -1), "--nodes must be at least 1, not -1."),
        (("--parallel", "fsdp", "--compile"), "parallel=fsdp does not cover compile; choose another --parallel."),
        (("--out", "elsewhere"), "A training run has one folder, --run; --out is for other jobs."),
        (("--preset", "huge"), "There is no preset 'huge'"),
    ],
)
def test_bad_input_is_refused_before_anything_is_submitted(tmp_path, capsys, words, sentence):
    assert submit("--run", tmp_path / "run", *words, "--dry-run") == 2
    assert sentence in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_run_of_other_settings_is_refused(tmp_path, capsys):
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    write_json(run.config_file, to_dict(TrainConfig(seed=3)))
    assert submit("--run", run.path, "--dry-run") == 2
    assert "made with other settings: seed (3 there, 0 here)" in capsys.readouterr().err


def test_it_runs_here_where_there_is_no_slurm(tmp_path, monkeypatch, capfd):
    """Two processes under torchrun; the settings are those of the moment of submission."""
    open_or_prepare("embedded", "bpe:300", tmp_path / "data", CorpusConfig(num_documents=60))
    run = RunFolder(tmp_path / "run")
    words = ["--run", run.path, "--data", tmp_path / "data", *OPTIONS, "--gpus", 2, "--parallel", "zero1", "--local"]
    assert submit(*words) == 0, capfd.readouterr()
    assert run.status()["state"] == "complete"
    assert run.starts()[0]["ranks"] == 2
    (frozen,) = (run.path / "jobs").glob("settings-*.json")
    assert from_dict(TrainConfig, json.loads(frozen.read_text())) == run.config()
    assert run.config().data == str(tmp_path / "data")
