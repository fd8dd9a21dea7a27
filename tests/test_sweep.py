import math

import pytest

from lmcore.config import OptimizerConfig, TrainConfig, model_config, replace
from lmcore.errors import UserError
from lmcore.run import RunFolder
from lmcore.sweep import run_or_reuse, run_sweep, work


@pytest.fixture
def config(embedded_data) -> TrainConfig:
    return TrainConfig(
        model=model_config("smoke", vocab_size=300, context_length=16, d_model=16, num_heads=2, d_ff=24),
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=0, max_grad_norm=None),
        data=str(embedded_data),
        batch_size=4,
        steps=6,
        log_interval=1,
        eval_interval=6,
        checkpoint_interval=6,
        device="cpu",
    )


def test_run_is_followed_to_its_end_and_reused(tmp_path, config, capsys):
    run = run_or_reuse(config, tmp_path / "run")
    assert run.status()["state"] == "complete"
    assert "step 6/6" in capsys.readouterr().out
    written = run.metrics_file.stat().st_mtime_ns
    run_or_reuse(config, tmp_path / "run")
    assert "reused, complete at step 6" in capsys.readouterr().out
    assert run.metrics_file.stat().st_mtime_ns == written
    with pytest.raises(UserError, match="made with other settings"):
        run_or_reuse(replace(config, seed=1), tmp_path / "run")


def test_a_child_that_fails_speaks_through_the_parent(tmp_path, config):
    with pytest.raises(UserError, match=r"ended with code 2: lmcore: .*set model\.vocab_size"):
        run_or_reuse(replace(config, model__vocab_size=20), tmp_path / "run")


def test_sweep_with_a_diverging_run(tmp_path, config, capsys):
    runs = {"good": config, "bad": replace(config, optimizer__name="sgd", optimizer__learning_rate=1e30)}
    folders = run_sweep(runs, tmp_path, workers=2)
    assert folders["good"].status()["state"] == "complete"
    assert folders["bad"].status()["state"] == "diverged"
    assert math.isfinite(folders["good"].status()["valid_loss"])
    run_sweep(runs, tmp_path, workers=2)
    assert "all 2 runs reused" in capsys.readouterr().out


def test_a_sweep_that_is_no_mapping_is_refused(tmp_path):
    (tmp_path / "sweep.json").write_text("[1]")
    with pytest.raises(UserError, match=r"sweep\.json must be a mapping"):
        work(tmp_path)


def test_a_run_in_other_hands_is_left_to_them(tmp_path, config):
    from lmcore.files import write_json

    write_json(tmp_path / "sweep.json", {"taken": {"data": config.data}})
    taken = RunFolder(tmp_path / "taken")
    with taken.lock():
        work(tmp_path)
    assert taken.status()["state"] == "new"
