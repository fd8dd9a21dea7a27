import dataclasses
import errno
import fcntl
import json
import os
import stat
import threading
from pathlib import Path

import pytest

from lmcore.config import TrainConfig, replace
from lmcore.errors import UserError
from lmcore.files import atomic_write
from lmcore.run import RunFolder, flatten


def line(step: int) -> dict:
    return {"step": step, "train_loss": 1.0 / step, "seconds": float(step)}


def test_metrics_survive_a_last_line_that_was_cut_off(tmp_path):
    run = RunFolder(tmp_path)
    assert {"step", "train_loss", "valid_loss"} <= set(run.metrics().columns), "even when empty"
    for step in (1, 2, 3):
        run.append_metrics(line(step))
    run.metrics_file.write_text(run.metrics_file.read_text()[:-7])
    assert run.metrics_lines() == [line(1), line(2)]


def test_metrics_are_cut_back_to_what_a_checkpoint_notes(tmp_path, capsys):
    run = RunFolder(tmp_path)
    lengths = [run.metrics_bytes()]
    for step in (1, 2, 3):
        run.append_metrics(line(step))
        lengths.append(run.metrics_bytes())
    run.cut_metrics(lengths[2])
    assert run.metrics_lines() == [line(1), line(2)]
    assert capsys.readouterr().out == ""
    run.cut_metrics(lengths[3])
    assert "metrics.jsonl has lost lines" in capsys.readouterr().out
    run.cut_metrics(0)
    assert run.metrics_lines() == []


@pytest.mark.parametrize("damaged", ["{x", "3", "[1]", '{"train_loss": 1.0}'])
def test_a_damaged_line_in_the_middle_is_named(tmp_path, damaged):
    run = RunFolder(tmp_path)
    run.metrics_file.write_text(f"{json.dumps(line(1))}\n{damaged}\n{json.dumps(line(3))}\n")
    with pytest.raises(UserError, match=r"metrics\.jsonl line 2 is damaged"):
        run.metrics_lines()


def test_a_status_can_be_read(tmp_path):
    run = RunFolder(tmp_path)
    assert run.status() == {"state": "new", "step": 0}
    assert not run.is_busy()
    run.write_status("complete", 12, valid_loss=2.25, folder=Path("x"))
    assert (run.status()["valid_loss"], run.last_known()) == (2.25, ("complete", 12))


@pytest.mark.parametrize("change", ["another value", "a field less", "a field more"])
def test_a_config_that_was_changed_or_is_of_another_version_is_refused(tmp_path, change):
    run = RunFolder(tmp_path)
    run.begin(TrainConfig(steps=7), {"data_fingerprint": "a"})
    saved = json.loads(run.config_file.read_text())
    if change == "another value":
        saved["steps"] = 3
    elif change == "a field less":
        del saved["ops"]
        run.environment_file.write_text(json.dumps([{"config": saved}]))
    else:
        saved["new"] = 1
    run.config_file.write_text(json.dumps(saved))
    sentence = "has no field new" if change == "a field more" else "not the configuration that the run began with"
    with pytest.raises(UserError, match=sentence):
        run.config()


def test_leftovers_of_killed_writers_are_removed(tmp_path):
    run = RunFolder(tmp_path)
    run.checkpoint_folder.mkdir()
    left = [tmp_path / ".status.json.12-ab.tmp", run.checkpoint_folder / ".step_00000003.pt.12-ab.tmp"]
    others = [tmp_path / ".requested.json.12-ab.tmp", tmp_path / "notes.tmp"]
    for path in left + others:
        path.touch()
    run.remove_leftovers()
    assert not any(path.exists() for path in left)
    assert all(path.exists() for path in others)


def test_two_writers_of_one_file_do_not_share_a_temporary_one(tmp_path):
    with atomic_write(tmp_path / "a") as one, atomic_write(tmp_path / "a") as other:
        assert one.name != other.name
        one.write(b"1")
        other.write(b"2")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_content_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """Else a crash after the rename could leave an empty file where the old one was."""
    path, order = tmp_path / "a", []

    def noted(name, call):
        def note(*arguments):
            is_folder = name == "fsync" and stat.S_ISDIR(os.fstat(arguments[0]).st_mode)
            order.append((f"{name} folder" if is_folder else name, path.exists()))
            return call(*arguments)

        return note

    for name in ("fsync", "replace"):
        monkeypatch.setattr(os, name, noted(name, getattr(os, name)))
    with atomic_write(path) as file:
        file.write(b"1")
    assert order == [("fsync", False), ("replace", False), ("fsync folder", True)]


def failing(number: int):
    """Stands for a system call that ends with this error."""

    def fail(*_):
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_refused(tmp_path, monkeypatch, number):
    monkeypatch.setattr(fcntl, "flock", failing(number))
    with pytest.raises(UserError, match="cannot lock files"), RunFolder(tmp_path / "run").lock():
        pass


def test_a_folder_held_for_an_instant_is_waited_for(tmp_path):
    run, held = RunFolder(tmp_path), threading.Event()

    def hold():
        with RunFolder(tmp_path).lock():
            held.set()
            threading.Event().wait(0.1)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    with run.lock(seconds=60):
        assert RunFolder(tmp_path).is_busy()
    thread.join()


@pytest.mark.parametrize("content", ["[3]", "{}", "{"])
def test_damaged_files_are_named(tmp_path, content):
    run = RunFolder(tmp_path)
    for path, read in ((run.status_file, run.status), (run.environment_file, run.data_fingerprint)):
        path.write_text(content)
        with pytest.raises(UserError, match=rf"{path.stem}\.json (is damaged|cannot be read)"):
            read()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_is_one_sentence(tmp_path):
    run = RunFolder(tmp_path)
    run.metrics_file.symlink_to("/dev/full")
    with pytest.raises(UserError, match=r"Cannot write .*metrics\.jsonl: No space left"):
        run.append_metrics(line(1))


def test_begin_keeps_every_start_and_the_first_config(tmp_path):
    run, config = RunFolder(tmp_path), TrainConfig(steps=7)
    run.begin(config, {"data_fingerprint": "a", "torch": "1"})
    run.begin(replace(config, device="cpu"), {"data_fingerprint": "a", "torch": "2"})
    assert run.config() == config
    assert run.environment()["torch"] == "2"
    assert run.data_fingerprint() == "a"
    with pytest.raises(UserError, match=r"optimizer\.learning_rate \(0\.001 there, 0\.5 here\)"):
        run.begin(replace(config, optimizer__learning_rate=0.5), {"data_fingerprint": "a"})
    with pytest.raises(UserError, match="the data"):
        run.begin(config, {"data_fingerprint": "b"})


CHANGES = {
    "eval_details": True,
    "evaluate_on": "dev",
    "z_loss": 1e-4,
    "keep_weights": False,
    "model__d_model": 256, "model__tie_embeddings": True, "optimizer__learning_rate": 0.5, "optimizer__eps": 1e-6,
    "batch_size": 7, "steps": 7, "sampling": "epoch", "seed": 7, "log_interval": 7, "eval_interval": 7,
    "eval_batch_size": 7, "precision": "bf16", "ops": "fused", "compile": True, "deterministic": True,
}  # fmt: skip
FREE = {
    "data": "elsewhere", "device": "cpu", "trackers": ("wandb",), "keep_checkpoints": 7, "checkpoint_interval": 7,
    "checkpoints": "sharded", "strategy": "fsdp",
}  # fmt: skip


def test_a_run_may_resume_with_other_settings_only_where_they_change_no_number(tmp_path):
    run, config = RunFolder(tmp_path), TrainConfig()
    run.begin(config, {})
    for key, value in CHANGES.items():
        assert [words.split()[0] for words in run.differences(replace(config, **{key: value}), None)] == [
            key.replace("__", ".")
        ]
    for key, value in FREE.items():
        assert run.differences(replace(config, **{key: value}), None) == []
    tried = {key.partition("__")[0] for key in (*CHANGES, *FREE)}
    assert tried == {field.name for field in dataclasses.fields(TrainConfig)}, "say which a new setting is"


def test_checkpoints_come_newest_first(tmp_path):
    run = RunFolder(tmp_path)
    run.checkpoint_folder.mkdir()
    for step in (9, 100, 10):
        run.checkpoint_file(step).touch()
    assert [path.name for path in run.checkpoints()] == ["step_00000100.pt", "step_00000010.pt", "step_00000009.pt"]


def test_flatten():
    assert flatten({"a": {"b": (1, 2), "c": {"d": 3}}, "e": 4}) == {"a.b": [1, 2], "a.c.d": 3, "e": 4}
