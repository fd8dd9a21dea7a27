"""The run folder: which files it has, what they say when they are damaged, and with what a run may resume."""

import dataclasses
import json
from pathlib import Path

import pytest

from lmcore.config import TrainConfig, replace
from lmcore.errors import UserError
from lmcore.run import RunFolder


def line(step: int) -> dict:
    return {"step": step, "train_loss": 1.0 / step, "seconds": float(step)}


@pytest.fixture
def run(tmp_path) -> RunFolder:
    return RunFolder(tmp_path)


def test_metrics_are_cut_back_to_what_a_checkpoint_notes(run, capsys):
    assert {"step", "train_loss", "valid_loss"} <= set(run.metrics().columns), "even when empty"
    lengths = [run.metrics_bytes()]
    for step in (1, 2, 3):
        run.append_metrics(line(step))
        lengths.append(run.metrics_bytes())
    run.metrics_file.write_bytes(run.metrics_file.read_bytes()[:-7])  # a crash cut the last line off
    assert run.metrics_lines() == [line(1), line(2)]
    run.cut_metrics(lengths[2])
    assert run.metrics_lines() == [line(1), line(2)]
    assert capsys.readouterr().out == ""
    run.cut_metrics(lengths[3])
    assert "metrics.jsonl has lost lines" in capsys.readouterr().out
    run.cut_metrics(0)
    assert run.metrics_lines() == []


@pytest.mark.parametrize("damaged", ["{x", "3", "[1]", '{"train_loss": 1.0}'])
def test_a_damaged_line_in_the_middle_is_named(run, damaged):
    run.metrics_file.write_text(f"{json.dumps(line(1))}\n{damaged}\n{json.dumps(line(3))}\n")
    with pytest.raises(UserError, match=r"metrics\.jsonl line 2 is damaged"):
        run.metrics_lines()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [({"steps": 3}, "not the configuration that the run began with"), ({"new": 1}, "has no field new")],
)
def test_a_config_that_was_changed_or_is_of_another_version_is_refused(run, changes, sentence):
    run.begin(TrainConfig(steps=7), {"data_fingerprint": "a"})
    run.config_file.write_text(json.dumps(json.loads(run.config_file.read_text()) | changes))
    with pytest.raises(UserError, match=sentence):
        run.config()


@pytest.mark.parametrize("content", ["[3]", "{}", "{"])
def test_damaged_files_are_named(run, content):
    for path, read in ((run.status_file, run.status), (run.environment_file, run.first_start)):
        path.write_text(content)
        with pytest.raises(UserError, match=rf"{path.stem}\.json (is damaged|cannot be read)"):
            read()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_is_one_sentence(run):
    run.metrics_file.symlink_to("/dev/full")
    with pytest.raises(UserError, match=r"Cannot write .*metrics\.jsonl: No space left"):
        run.append_metrics(line(1))


def test_begin_keeps_every_start_and_the_first_config_and_removes_leftovers(run):
    config = TrainConfig(steps=7)
    run.checkpoint_folder.mkdir()
    (run.checkpoint_folder / ".step_00000003.pt.12-ab.tmp").touch()
    (other := run.path / ".sweep.json.12-ab.tmp").touch()
    assert run.begin(config, {"data_fingerprint": "a", "torch": "1"}) is None
    assert not any(run.checkpoint_folder.iterdir())
    assert other.exists()
    run.begin(replace(config, device="cpu"), {"data_fingerprint": "a", "torch": "2"})
    assert run.config() == config
    assert (run.environment()["torch"], run.first_start()["data_fingerprint"]) == ("2", "a")
    with pytest.raises(UserError, match=r"optimizer\.learning_rate \(0\.001 there, 0\.5 here\)"):
        run.begin(replace(config, optimizer__learning_rate=0.5), {"data_fingerprint": "a"})
    with pytest.raises(UserError, match=r"data fingerprint \(a there, b here\)"):
        run.begin(config, {"data_fingerprint": "b"})


CHANGES = {
    "init_from": "elsewhere", "teacher": "elsewhere", "teacher_share": 0.1,
    "eval_details": True, "evaluate_on": "dev", "z_loss": 1e-4, "keep_weights": False,
    "model__d_model": 256, "model__tie_embeddings": True, "optimizer__learning_rate": 0.5, "optimizer__eps": 1e-6,
    "batch_size": 7, "steps": 7, "sampling": "epoch", "seed": 7, "log_interval": 7, "eval_interval": 7,
    "eval_batch_size": 7, "eval_tokens": 1000, "precision": "bf16", "ops": "fused", "compile": True,
    "deterministic": True,
}  # fmt: skip
FREE = {
    "data": "elsewhere", "device": "cpu", "keep_checkpoints": 7, "checkpoint_interval": 7,
    "checkpoints": "sharded", "strategy": "fsdp", "tracker": "wandb",
}  # fmt: skip


def test_a_run_may_resume_with_other_settings_only_where_they_change_no_number(run):
    config = TrainConfig()
    run.begin(config, {})
    for key, value in CHANGES.items():
        words = run.differences(replace(config, **{key: value}), None)
        assert words.split()[0] == key.replace("__", ".")
    for key, value in FREE.items():
        assert run.differences(replace(config, **{key: value}), None) == ""
    tried = {key.partition("__")[0] for key in (*CHANGES, *FREE)}
    assert tried == {field.name for field in dataclasses.fields(TrainConfig)}, "say which a new setting is"


def test_checkpoints_come_newest_first(run):
    run.checkpoint_folder.mkdir()
    for step in (9, 100, 10):
        run.checkpoint_file(step).touch()
    assert [path.name for path in run.checkpoints()] == ["step_00000100.pt", "step_00000010.pt", "step_00000009.pt"]
