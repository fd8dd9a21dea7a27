"""Which step a configuration trains with, and that both lead to the same weights."""

import os
import signal
from functools import partialmethod

import pytest
import torch

from lmcore.checkpoint import digest, read_checkpoint, read_weights
from lmcore.config import ModelConfig, TrainConfig, replace
from lmcore.data import CorpusConfig, prepare
from lmcore.errors import UserError
from lmcore.fused.step import FusedStep
from lmcore.model import TransformerLM
from lmcore.profiling.workload import Workload, WorkloadConfig
from lmcore.recipes import RECIPES, fast
from lmcore.run import RunFolder
from lmcore.train import AsyncMetrics, PlainStep, train, training_step

MODEL = ModelConfig(vocab_size=300, context_length=16, d_model=32, num_layers=2, num_heads=2, d_ff=40)


@pytest.fixture
def config(embedded_data) -> TrainConfig:
    return TrainConfig(
        model=MODEL,
        data=str(embedded_data),
        batch_size=4,
        steps=12,
        log_interval=3,
        eval_interval=6,
        checkpoint_interval=6,
        device="cpu",
    )


def lines(run: RunFolder) -> list[dict]:
    clocks = ("seconds", "tokens_per_second", "mfu", "peak_memory_bytes")
    return [{key: value for key, value in line.items() if key not in clocks} for line in run.metrics_lines()]


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "muon"])
@pytest.mark.parametrize("tied", [False, True])
def test_fused_training_is_plain_training(tmp_path, config, optimizer, tied):
    config = replace(config, optimizer__name=optimizer, model__tie_embeddings=tied, optimizer__warmup_steps=2)
    config = replace(config, optimizer__max_grad_norm=None if tied else 0.5)
    plain, fused = RunFolder(tmp_path / "plain"), RunFolder(tmp_path / "fused")
    train(config, plain)
    train(fast(config), fused)
    assert len(lines(plain)) == 4
    for one, other in zip(lines(plain), lines(fused), strict=True):
        assert one == pytest.approx(other, rel=1e-5)


def test_on_real_stories_the_losses_are_the_plain_ones(tmp_path, config, shared_data):
    """The curve of a small model that learns for 300 steps, in float32."""
    text = shared_data / "tinystories" / "valid.txt"
    data = prepare(str(text), "bpe:300", tmp_path / "data", CorpusConfig(num_documents=300), progress=False).folder
    config = replace(config, data=str(data), steps=300, batch_size=16, log_interval=20, eval_interval=150)
    runs = [RunFolder(tmp_path / name) for name in ("plain", "fused")]
    for run, settings in zip(runs, (config, fast(config)), strict=True):
        train(settings, run)
    plain, fused = map(lines, runs)
    assert plain[-1]["train_loss"] < plain[0]["train_loss"] - 1
    assert [line["train_loss"] for line in fused] == pytest.approx([line["train_loss"] for line in plain], rel=1e-3)


@pytest.fixture
def pipelined():
    """Fused steps leave their update to the next call, as on a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FusedStep, "__init__", partialmethod(FusedStep.__init__, pipelined=True))
        yield


def test_training_with_updates_due_is_training_without(tmp_path, config, request):
    ended, due = RunFolder(tmp_path / "ended"), RunFolder(tmp_path / "due")
    train(fast(config), ended)
    request.getfixturevalue("pipelined")
    train(fast(config), due)
    assert lines(ended) == lines(due)
    for weights in ("last_weights", "best_weights"):
        assert digest(read_weights(getattr(ended, weights))[0]) == digest(read_weights(getattr(due, weights))[0])


def test_a_checkpoint_holds_the_update_that_was_due(tmp_path, config, request):
    """At a step that nothing but the checkpoint falls on: an evaluation would take the update, too."""
    config = fast(replace(config, checkpoint_interval=5, keep_checkpoints=3))
    assert 5 % config.eval_interval
    ended, due = RunFolder(tmp_path / "ended"), RunFolder(tmp_path / "due")
    train(config, ended)
    request.getfixturevalue("pipelined")
    train(config, due)
    saved = [read_checkpoint(run.checkpoint_file(5)) for run in (ended, due)]
    for part in ("model", "optimizer"):
        assert digest(saved[0][part]) == digest(saved[1][part])


def test_a_run_that_is_interrupted_saves_the_update_that_is_due(tmp_path, config, monkeypatch, pipelined):
    whole, cut = RunFolder(tmp_path / "whole"), RunFolder(tmp_path / "cut")
    train(fast(replace(config, checkpoint_interval=5, keep_checkpoints=3)), whole)
    original = AsyncMetrics.push

    def interrupted(self, step, *values):
        original(self, step, *values)
        if step == 5:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(AsyncMetrics, "push", interrupted)
    result = train(fast(config), cut)
    assert (result.state, result.step) == ("interrupted", 5)
    saved = [read_checkpoint(run.checkpoint_file(5)) for run in (whole, cut)]
    for part in ("model", "optimizer"):
        assert digest(saved[0][part]) == digest(saved[1][part])


@pytest.mark.parametrize("ops", ["plain", "fused", "pipelined"])
def test_resuming_gives_the_run_that_was_never_stopped(tmp_path, config, monkeypatch, request, ops):
    if ops == "pipelined":
        request.getfixturevalue("pipelined")
    config = replace(config, ops="plain" if ops == "plain" else "fused")
    whole, cut = RunFolder(tmp_path / "whole"), RunFolder(tmp_path / "cut")
    train(config, whole)
    original = AsyncMetrics.push

    def broken(self, step, *values):
        original(self, step, *values)
        if step == 8:
            raise RuntimeError("stopped here")

    monkeypatch.setattr(AsyncMetrics, "push", broken)
    with pytest.raises(RuntimeError, match="stopped here"):
        train(config, cut)
    monkeypatch.undo()
    train(config, cut)
    assert lines(whole) == lines(cut)
    assert digest(read_weights(whole.last_weights)[0]) == digest(read_weights(cut.last_weights)[0])


@pytest.mark.parametrize(
    ("switches", "reason"),
    [({"norm": "post"}, "norm=post"), ({"ffn": "silu"}, "ffn=silu"), ({"dropout": 0.1}, "dropout=0.1")],
)
def test_a_model_that_the_fused_step_does_not_cover_trains_plainly(tmp_path, config, capsys, switches, reason):
    config = replace(config, steps=2, eval_interval=2, **{f"model__{key}": value for key, value in switches.items()})
    assert train(fast(config), tmp_path / "run").state == "complete"
    assert f"run: plain operations, as the fused step does not cover {reason}." in capsys.readouterr().out


def test_which_step(config):
    cpu = torch.device("cpu")
    for ops, kind in {"plain": PlainStep, "fused": FusedStep}.items():
        step, reason = training_step(TransformerLM(MODEL), replace(config, ops=ops), cpu)
        assert isinstance(step, kind)
        assert reason is None
    step, reason = training_step(TransformerLM(MODEL), replace(config, ops="fused", precision="fp16"), cpu)
    assert isinstance(step, PlainStep)
    assert reason == "precision=fp16"


def test_the_gpu_recipes_are_fast():
    assert all((c.ops, c.model.attention) == ("fused", "flash") for c in RECIPES.values() if c.precision == "bf16")
    assert (RECIPES["smoke"].ops, RECIPES["smoke"].model.attention) == ("plain", "plain")


@pytest.mark.parametrize("passes", ["forward", "forward_backward", "train_step"])
def test_a_fused_workload_has_the_plain_loss(passes):
    cell = WorkloadConfig(model=MODEL, batch_size=2, passes=passes, device="cpu")
    plain = Workload(replace(cell, passes="forward_backward")).step()
    assert Workload(replace(cell, ops="fused")).step() == pytest.approx(plain.item(), rel=1e-5)


def test_a_fused_workload_measures_nothing_else():
    cell = WorkloadConfig(
        model=replace(MODEL, norm="post"), batch_size=2, passes="train_step", ops="fused", device="cpu"
    )
    with pytest.raises(UserError, match="does not cover norm=post; measure this case with ops plain"):
        Workload(cell)
