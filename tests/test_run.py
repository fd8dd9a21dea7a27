import json
from pathlib import Path

import pytest

from lmcore.config import TrainConfig, replace
from lmcore.errors import UserError
from lmcore.run import RunFolder, flatten


def line(step: int) -> dict:
    return {"step": step, "train_loss": 1.0 / step, "seconds": float(step)}


def test_metrics_survive_a_last_line_that_was_cut_off(tmp_path):
    run = RunFolder(tmp_path)
    for step in (1, 2, 3):
        run.append_metrics(line(step))
    text = run.metrics_file.read_text()
    run.metrics_file.write_text(text[:-7])
    assert [entry["step"] for entry in run.metrics_lines()] == [1, 2]
    run.metrics_log.keep_until(1)
    assert run.metrics_lines() == [line(1)]
    assert run.metrics_file.read_text() == text.splitlines(keepends=True)[0]


@pytest.mark.parametrize("damaged", ["{x", "3", "[1]", '{"train_loss": 1.0}'])
def test_a_damaged_line_in_the_middle_is_named(tmp_path, damaged):
    run = RunFolder(tmp_path)
    run.metrics_file.write_text(f"{json.dumps(line(1))}\n{damaged}\n{json.dumps(line(3))}\n")
    with pytest.raises(UserError, match=r"metrics\.jsonl line 2 is damaged"):
        run.metrics_lines()


def test_damaged_files_are_named(tmp_path):
    run = RunFolder(tmp_path)
    for content in ("[]", "{}", "{"):
        run.status_file.write_text(content)
        with pytest.raises(UserError, match=r"status\.json"):
            run.status()
    for content in ("{}", "[3]"):
        run.environment_file.write_text(content)
        with pytest.raises(UserError, match=r"environment\.json is damaged"):
            run.data_fingerprint()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_is_one_sentence(tmp_path):
    run = RunFolder(tmp_path)
    run.metrics_file.symlink_to("/dev/full")
    with pytest.raises(UserError, match=r"Cannot write .*metrics\.jsonl: No space left"):
        run.append_metrics(line(1))


def test_metrics_table_has_its_columns_even_when_empty(tmp_path):
    assert {"step", "train_loss", "valid_loss"} <= set(RunFolder(tmp_path).metrics().columns)


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


def test_status_of_a_new_folder(tmp_path):
    run = RunFolder(tmp_path / "absent")
    assert run.status() == {"state": "new", "step": 0}
    assert not run.is_busy()


def test_checkpoints_come_newest_first(tmp_path):
    run = RunFolder(tmp_path)
    run.checkpoint_folder.mkdir()
    for step in (9, 100, 10):
        run.checkpoint_file(step).touch()
    assert [path.name for path in run.checkpoints()] == ["step_00000100.pt", "step_00000010.pt", "step_00000009.pt"]


def test_flatten():
    assert flatten({"a": {"b": (1, 2), "c": {"d": 3}}, "e": 4}) == {"a.b": [1, 2], "a.c.d": 3, "e": 4}
