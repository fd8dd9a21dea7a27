"""Training: what a run leaves behind, that resuming changes nothing, and that both kinds of step lead to one result."""

import copy
import dataclasses
import itertools
import math
import os
import shutil
import signal
import types
import warnings
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

import lmcore.run
import lmcore.train
from lmcore.checkpoint import digest, load_model, read_checkpoint, read_weights
from lmcore.config import TrainConfig, replace
from lmcore.data import open_data
from lmcore.errors import UserError
from lmcore.evaluate import evaluate
from lmcore.fast.step import FusedStep
from lmcore.files import read_json
from lmcore.functional import soft_cross_entropy
from lmcore.metrics import Meter
from lmcore.model import TransformerLM
from lmcore.profiling.cases import WorkloadConfig
from lmcore.profiling.workload import Workload
from lmcore.recipes import fast
from lmcore.run import RunFolder
from lmcore.train import AsyncMetrics, PlainStep, Trainer, train, training_step
from workbook.sweep import is_finished

TIMES = {"seconds", "tokens_per_second", "mfu", "peak_memory_bytes"}


@pytest.fixture(scope="module")
def config(tiny_run) -> TrainConfig:
    """A run of twelve steps with dropout, so that the state of the generators matters."""
    every = {"log_interval": 3, "eval_interval": 4, "checkpoint_interval": 5}
    return replace(tiny_run, model__dropout=0.1, optimizer__warmup_steps=3, steps=12, eval_batch_size=64, **every)


@pytest.fixture(scope="module", autouse=True)
def short_validation():
    """The first 700 tokens of the validation split are enough here."""

    def opened(folder):
        data = open_data(folder)
        object.__setattr__(data, "valid", data.valid[:700])
        return data

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lmcore.train, "open_data", opened)
        yield


@pytest.fixture
def run(tmp_path) -> RunFolder:
    return RunFolder(tmp_path / "run")


@pytest.fixture(scope="module")
def never_stopped(tmp_path_factory, config) -> RunFolder:
    run = RunFolder(tmp_path_factory.mktemp("straight"))
    assert train(config, run).state == "complete"
    return run


@pytest.fixture
def straight(tmp_path, never_stopped) -> RunFolder:
    """The run of `config`, never stopped."""
    return RunFolder(shutil.copytree(never_stopped.path, tmp_path / "straight"))


def train_until(step: int, config: TrainConfig, run: RunFolder) -> None:
    """Trains until SIGTERM comes at the end of the given step."""
    original = AsyncMetrics.push

    def push(self, number, *values):
        original(self, number, *values)
        if number == step:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AsyncMetrics, "push", push)
        result = train(config, run)
    assert (result.state, run.status()["step"]) == ("interrupted", step)


def with_losses(monkeypatch, *losses: float) -> None:
    """Evaluations find these losses, one after the other."""
    found = iter(losses)
    monkeypatch.setattr(lmcore.train, "validation", lambda *_: {"valid_loss": next(found)})


def weights(run: RunFolder) -> str:
    return digest(load_model(run.last_weights).state_dict())


def lines(run: RunFolder) -> list[dict]:
    """Metrics without times."""
    return [{key: value for key, value in line.items() if key not in TIMES} for line in run.metrics_lines()]


def require_completed(config: TrainConfig, run: RunFolder, straight: RunFolder) -> None:
    """Trains to the end, and finds what the run has that was never stopped."""
    assert train(config, run).state == "complete"
    assert weights(run) == weights(straight)
    assert lines(run) == lines(straight)


# ------------------------------------------------------------------------------------------------ resuming

RUNS = {
    "adamw": {},
    "muon": {"optimizer__name": "muon", "sampling": "epoch"},
    "sgd": {"optimizer__name": "sgd"},
    "fused": {"ops": "fused"},
    "fused muon": {"ops": "fused", "optimizer__name": "muon"},
}


@pytest.mark.parametrize("name", RUNS)
def test_stopped_and_resumed_equals_one_straight_run_bitwise(tmp_path, config, run, name):
    config, straight = replace(config, **RUNS[name]), RunFolder(tmp_path / "straight")
    assert train(config, straight).state == "complete"
    for step in (5, 7):  # at the step of a checkpoint, and where no line of metrics ends
        train_until(step, config, run)
    require_completed(config, run, straight)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(
    "how", [{}, {"compile": True}, {"ops": "fused"}, {"ops": "fused", "optimizer__name": "muon"}],
    ids=["eager", "compiled", "fused", "muon"],
)  # fmt: skip
def test_stopped_and_resumed_on_a_gpu_equals_one_straight_run_bitwise(
    tmp_path, config, run, monkeypatch, precision, how
):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    config = replace(config, device="cuda", deterministic=True, precision=precision, **how)
    straight = RunFolder(tmp_path / "straight")
    assert train(config, straight).state == "complete"
    train_until(7, config, run)
    require_completed(config, run, straight)


def test_the_loss_scale_goes_on_where_it_was(config, run, monkeypatch):
    """It begins at 8 here and doubles after every two steps that are finite."""
    scaler = partial(torch.amp.GradScaler, init_scale=8.0, growth_interval=2)
    monkeypatch.setattr(torch.amp, "GradScaler", scaler)
    config = replace(config, precision="fp16")
    for step in (1, 6, 7):
        train_until(step, config, run)
    train(config, run)
    scale = read_checkpoint(run.checkpoints()[0])["extra"]["scaler"]
    assert (scale["scale"], scale["_growth_tracker"]) == (8 * 2**6, 0)


def test_the_best_loss_and_the_time_go_on_where_they_were(config, run, monkeypatch):
    """The loss of step 4, before the run was stopped, stays the best, and its weights the best weights."""
    with_losses(monkeypatch, 1.0, 3.0, 2.0)
    config = replace(config, checkpoint_interval=4, keep_checkpoints=4)
    train_until(5, config, run)
    saved = read_checkpoint(run.checkpoints()[0])["extra"]["seconds"]
    result = train(config, run)
    assert (result.valid_loss, result.best_valid_loss) == (2.0, 1.0)
    (best, notes), extra = read_weights(run.best_weights), read_checkpoint(run.checkpoints()[0])["extra"]
    assert (notes["step"], notes["valid_loss"]) == (4, 1.0)
    assert digest(best) == digest(dict(sorted(read_checkpoint(run.checkpoint_file(4))["model"].items())))
    assert (extra["best_step"], extra["best_valid_loss"], extra["valid_loss"]) == (4, 1.0, 2.0)
    seconds = [line["seconds"] for line in run.metrics_lines()]
    assert seconds[1] < saved < seconds[2] < seconds[-1] <= run.status()["seconds"]


def test_a_spoiled_checkpoint_falls_back_to_the_one_before(config, run, straight, capsys):
    """Lines of metrics after that one are written again, once."""
    config = replace(config, keep_checkpoints=3)
    train_until(11, config, run)
    newest = run.checkpoints()[0]
    newest.write_bytes(newest.read_bytes()[:-100])
    run.checkpoint_file(10).unlink()
    assert [line["step"] for line in run.metrics_lines() if line["step"] > 5] == [6, 8, 9]
    require_completed(config, run, straight)
    said = capsys.readouterr().out
    assert "step_00000011.pt is not a whole checkpoint" in said
    assert "resuming from step 5" in said


def test_a_run_does_not_begin_again_over_checkpoints_or_best_weights_that_cannot_be_read(config, run, monkeypatch):
    """The best of step 4 is in no checkpoint, and both checkpoints are later: going on would lose it unnoticed."""
    with_losses(monkeypatch, 1.0, 2.0, 3.0)
    train_until(11, config, run)
    checkpoints = run.checkpoints()
    for damaged in (checkpoints, [run.best_weights]):
        whole = [path.read_bytes() for path in damaged]
        for path in damaged:
            path.write_bytes(b"damaged")
        with pytest.raises(UserError, match=r"No checkpoint in .*checkpoints can be resumed from"):
            train(config, run)
        assert run.checkpoints() == checkpoints
        damaged[-1].write_bytes(whole[-1])
    assert train(config, run).state == "complete"
    assert checkpoints[0].with_suffix(".damaged").read_bytes() == b"damaged"


def test_damaged_weights_of_a_complete_run_are_repaired(config, straight, capsys):
    paths = straight.last_weights, straight.best_weights
    there, whole = lines(straight), [digest(read_weights(path)[0]) for path in paths]
    for path, content in zip(paths, (None, paths[1].read_bytes()[:-100]), strict=True):
        path.unlink()
        if content is not None:
            path.write_bytes(content)
        assert train(config, straight).state == "complete"
        assert "repaired from the last checkpoint" in capsys.readouterr().out
        assert lines(straight) == there
        assert [digest(read_weights(path)[0]) for path in paths] == whole


def test_metrics_that_a_complete_run_has_lost_are_said(config, straight):
    """There is no other copy. A run that is stopped continues without them (`tests/test_run.py`)."""
    whole = straight.metrics_file.read_bytes()
    straight.metrics_file.write_bytes(whole[: whole.index(b"\n") + 9])
    with pytest.raises(UserError, match=r"metrics\.jsonl does not reach step 12: put it back"):
        train(config, straight)


def test_a_signal_that_ends_the_compiler_first_is_no_failure(config, run, monkeypatch):
    """As SIGTERM to the process group does while torch.compile waits for g++: it raises before the loop looks."""

    def update(self, *arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        raise RuntimeError("g++ was ended by SIGTERM")

    monkeypatch.setattr(PlainStep, "__call__", update)
    assert train(config, run).state == run.status()["state"] == "interrupted"


# ------------------------------------------------------------------------------------------------ what a run leaves


def test_throughput_and_mfu_are_of_training_steps_alone(config, run, monkeypatch):
    """Of the whole batch, in the steps since the line before; the ranks have the sum of their peaks to use. A step
    takes 2 s up to the sixth and 4 s after it, an evaluation 50 s and a save 30 s."""
    now, steps, peaks = [0.0], iter([2.0] * 6 + [4.0] * 6), {("CPU", "bf16"): 1e7}

    def slow(kind, name, seconds):
        original = getattr(kind, name)

        def method(*arguments, **options):
            now[0] += seconds()
            return original(*arguments, **options)

        monkeypatch.setattr(kind, name, method)

    slow(PlainStep, "__call__", lambda: next(steps))
    slow(lmcore.train, "validation", lambda: 50.0)
    slow(Trainer, "save", lambda: 30.0)
    for module in (lmcore.train, lmcore.metrics):
        monkeypatch.setattr(module, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(lmcore.metrics, "peak_flops", lambda *of: peaks[of])
    config = replace(config, precision="bf16")
    train(config, run)
    lines = run.metrics_lines()
    rates = [line["tokens_per_second"] for line in lines]
    assert rates == [4 * 16 / 2.0] * 3 + [4 * 16 / 4.0] * 3
    flops_per_token = 3 * (2 * (8 * 16 * 16 + 4 * 16 * 16 + 6 * 16 * 24) + 2 * 16 * 300)
    assert [line["mfu"] for line in lines] == pytest.approx([rate * flops_per_token / 1e7 for rate in rates])
    assert [line["seconds"] for line in lines] == [6, 8 + 50, 92, 150, 154, 246]  # of everything
    assert Meter(config, torch.device("cpu"), ranks=2).peak_flops == 2 * 1e7


def test_a_line_has_the_mean_loss_since_the_line_before_and_the_norm_of_its_own_step(config, run, monkeypatch):
    """Here step k has the loss k and the norm 10 k, of which 40 is not finite, as where loss scaling skips a step."""
    counted = itertools.count(1)

    def step(self, inputs, targets, lr):
        number = next(counted)
        return torch.tensor(float(number)), torch.tensor(math.inf if number == 4 else 10.0 * number)

    monkeypatch.setattr(PlainStep, "__call__", step)
    train(replace(config, precision="fp16"), run)
    lines = run.metrics_lines()
    assert [line["train_loss"] for line in lines] == [2, 4, 5.5, 7.5, 9, 11]
    assert [line["grad_norm"] for line in lines] == [30, None, 60, 80, 90, 120]
    assert [line["tokens"] for line in lines] == [number * 4 * 16 for number in (3, 4, 6, 8, 9, 12)]
    rates = [1e-2 * 0.5 * (1 + math.cos(math.pi * (number - 3) / (12 - 3))) for number in (3, 4, 6, 8, 9, 12)]
    assert [line["lr"] for line in lines] == pytest.approx(rates)


def test_with_loss_scaling_the_norm_and_the_clipping_are_of_gradients_that_are_not_scaled(config):
    """The scale, 65,536 at first, is in neither: one step with a tight limit is that of float32, but for rounding."""
    updates, ids = {}, torch.randint(300, (2, 4, 16))
    for precision in ("fp32", "fp16"):
        torch.manual_seed(0)
        model = TransformerLM(config.model)
        settings = {"optimizer__name": "sgd", "optimizer__max_grad_norm": 0.01, "precision": precision}
        before = [parameter.detach().clone() for parameter in model.parameters()]
        norm = PlainStep(model, replace(config, **settings), torch.device("cpu"))(*ids, 1.0)[1]
        moved = torch.cat([(p - old).flatten() for p, old in zip(model.parameters(), before, strict=True)])
        updates[precision] = norm.item(), moved.norm().item()
    assert updates["fp16"] == pytest.approx(updates["fp32"], rel=0.02)
    assert updates["fp32"][1] == pytest.approx(0.01, rel=1e-3)


def test_a_run_ends_with_an_evaluation_at_the_lowest_learning_rate(config, run):
    changes = {"optimizer__min_learning_rate": 2e-3, "optimizer__cosine_steps": 9, "eval_interval": 5}
    result, lines = train(replace(config, **changes), run), run.metrics_lines()
    assert [line["step"] for line in lines if "valid_loss" in line] == [5, 10, 12]
    assert result.valid_loss == lines[-1]["valid_loss"]
    assert [line["lr"] for line in (lines[0], *lines[-3:])] == pytest.approx([1e-2, 2e-3, 2e-3, 2e-3])


def test_run_folder_says_everything_and_a_complete_run_is_not_repeated(config, straight):
    assert straight.config() == config
    environment = straight.environment()
    assert {"torch", "python", "command", "git_commit", "device", "time_utc"} <= environment.keys()
    assert environment["data_fingerprint"] == open_data(config.data).fingerprint
    assert [path.name for path in straight.checkpoints()] == ["step_00000012.pt", "step_00000010.pt"]
    assert load_model(straight.best_weights).config == config.model
    before, starts, result = straight.metrics_file.read_bytes(), straight.starts(), straight.result()
    assert train(config, straight) == result
    assert (straight.metrics_file.read_bytes(), straight.starts()) == (before, starts)


@pytest.mark.parametrize("poison", ["loss", "gradient norm", "validation loss"])
def test_divergence_is_a_result_that_names_step_and_rate(config, run, monkeypatch, capsys, poison):
    original, calls = PlainStep.loss, []

    def poisoned(self, *batch, **options):
        loss, objective = original(self, *batch, **options)
        calls.append(self.model.training)
        if not (self.model.training and sum(calls) == 8):
            return loss, objective
        steep = (objective - objective.detach()).sqrt()  # 0, with an infinite gradient
        return (loss * math.nan, objective) if poison == "loss" else (loss, objective + steep)

    if poison == "validation loss":
        with_losses(monkeypatch, 2.0, math.nan)
    else:
        monkeypatch.setattr(PlainStep, "loss", poisoned)
    assert train(config, run).state == "diverged"
    assert run.status()["diverged_at_step"] == 8
    assert f"The {poison} was not finite at step 8, learning rate" in run.status()["reason"]
    assert run.status()["reason"] in capsys.readouterr().out
    step = read_checkpoint(run.checkpoints()[0])
    assert step["iteration"] == 5
    assert all(torch.isfinite(value).all() for value in step["model"].values())


@pytest.mark.parametrize(
    ("place", "error"),
    [
        ((Trainer, "__init__"), torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.")),
        ((PlainStep, "__call__"), RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 GiB")),
        ((PlainStep, "__call__"), MemoryError("Unable to allocate 9 GiB for an array")),
    ],
)
def test_out_of_memory_is_a_result_and_another_error_is_not(config, run, monkeypatch, capsys, place, error):
    monkeypatch.setattr(*place, Mock(side_effect=error))
    assert train(config, run).state == "out of memory"
    assert "9 GiB" in run.status()["reason"]
    assert "9 GiB" in capsys.readouterr().out
    monkeypatch.setattr(*place, Mock(side_effect=RuntimeError("shapes differ")))
    with pytest.raises(RuntimeError, match="shapes differ"):
        train(config, run)


def test_bad_input_is_one_sentence(tmp_path, config):
    with pytest.raises(UserError, match=r"vocabulary of .*set model\.vocab_size"):
        train(replace(config, model__vocab_size=64), tmp_path)
    with pytest.raises(UserError, match="is not there"):
        train(replace(config, device="cuda:9"), tmp_path)


def test_the_committed_figures_of_the_fault_suite_lost_nothing():
    """CONTRIBUTING.md has the command that makes them."""
    rows = read_json(Path(__file__).parents[1] / "results" / "faults.json")["faults"]
    assert all(row["lost"] == 0 for row in rows)
    assert all(row["tried"] == row["survived"] + row["refused_in_words"] for row in rows)
    assert sum(row["tried"] for row in rows) >= 400


# ------------------------------------------------------------------------------------------------ plain and fused steps


@pytest.mark.gpu
@pytest.mark.parametrize("ops", ["plain", "fused"])
def test_the_loop_never_waits_for_the_device(config, run, monkeypatch, ops):
    """Steps 6 to 40, metrics lines included, make none of the calls that PyTorch knows to synchronize."""
    config = replace(config, device="cuda", precision="bf16", ops=ops, steps=50, log_interval=3)
    config = replace(config, eval_interval=50, checkpoint_interval=50)
    original = AsyncMetrics.push

    def push(self, step, *values):
        original(self, step, *values)
        torch.cuda.set_sync_debug_mode("warn" if 5 <= step < 40 else "default")

    monkeypatch.setattr(AsyncMetrics, "push", push)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(config, run)
        torch.cuda.set_sync_debug_mode("warn")
        torch.ones(1, device="cuda").item()  # what the count would see
        torch.cuda.set_sync_debug_mode("default")
    synchronizing = [w for w in caught if "called a synchronizing" in str(w.message)]
    assert len(synchronizing) == 1, [str(w.message) for w in synchronizing]


@pytest.mark.parametrize(("changes", "reason"), [({"model__norm": "post"}, "norm=post"), ({}, None)])
def test_what_the_fused_step_does_not_cover_trains_plainly(config, run, capsys, changes, reason):
    config = replace(fast(config), precision="fp32", steps=2, **changes)
    assert type(training_step(TransformerLM(config.model), config)[0]) is (PlainStep if reason else FusedStep)
    assert train(config, run).state == "complete"
    sentence = f"run: plain operations, as the fused step does not cover {reason}."
    assert (sentence in capsys.readouterr().out) == (reason is not None)


@pytest.mark.parametrize("mode", ["forward", "forward_backward", "train_step"])
def test_a_fused_workload_has_the_plain_loss_and_measures_nothing_else(config, mode):
    cell = WorkloadConfig(model=replace(config.model, dropout=0.0), batch_size=2, mode=mode, device="cpu")
    plain = Workload(replace(cell, mode="forward_backward")).step()
    assert Workload(replace(cell, ops="fused")).step() == pytest.approx(plain.item(), rel=1e-5)
    with pytest.raises(UserError, match="does not cover norm=post; measure this case with ops plain"):
        Workload(replace(cell, ops="fused", mode="train_step", model__norm="post"))


def test_a_run_that_keeps_no_weights_has_the_same_metrics_and_only_them(config, run, straight):
    config = replace(config, keep_weights=False)
    train_until(7, config, run)
    assert {path.name for path in run.checkpoint_folder.iterdir()} == {"step_00000005.pt", "step_00000007.pt"}
    assert train(config, run).state == "complete"
    assert lines(run) == lines(straight)
    assert not list(run.checkpoint_folder.iterdir())
    assert is_finished(config, run)
    assert train(config, run) == straight.result()


def test_on_dev_a_run_trains_on_the_documents_before_it(config, run):
    data = open_data(config.data)
    config = replace(config, evaluate_on="dev", eval_details=True)
    train(config, run)
    assert run.first_start()["data_fingerprint"] == data.fingerprint
    dev, model = data.evaluated_on("dev"), load_model(run.last_weights)
    assert len(dev.train) + len(dev.valid) == len(data.train)
    found = evaluate(model, data, "dev", config.eval_batch_size)
    assert run.status()["valid_loss"] == pytest.approx(found.loss, rel=1e-6)
    assert lines(run)[-1]["valid_accuracy"] == pytest.approx(found.accuracy)


def test_an_evaluation_during_the_run_reads_so_many_tokens(config, run):
    data, context = open_data(config.data), config.model.context_length
    config = replace(config, eval_tokens=3 * context)
    train(config, run)
    part = dataclasses.replace(data, valid=data.valid[: 3 * context + 1])
    found = evaluate(load_model(run.last_weights), part, "valid", config.eval_batch_size)
    assert (found.tokens, found.loss) == (3 * context, pytest.approx(run.status()["valid_loss"], rel=1e-6))
    with pytest.raises(UserError, match=f"eval_tokens=1 is less than a window of the model, {context} tokens"):
        replace(config, eval_tokens=1)


@pytest.mark.parametrize("patience", [60.0, 0.0])
def test_best_weights_since_the_last_checkpoint_outlast_an_error(config, run, monkeypatch, patience):
    """They are written at once, if the last time is long ago, else when the run ends, whatever ends it."""
    monkeypatch.setattr(lmcore.train, "SECONDS_BETWEEN_BEST", patience)
    config, there, write_line = replace(config, eval_interval=2, checkpoint_interval=100), [], Trainer.write_line

    def fail(self, evaluate=False):
        write_line(self, evaluate)
        if self.state.step == 5:
            there.append(run.best_weights.exists())
            raise RuntimeError("no such kernel")

    monkeypatch.setattr(Trainer, "write_line", fail)
    with pytest.raises(RuntimeError, match="no such kernel"):
        train(config, run)
    assert there == [patience == 0]
    assert run.status()["state"] == "failed"
    assert read_weights(run.best_weights)[1]["step"] in (2, 4)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory, config) -> RunFolder:
    """A wider and deeper model with a longer context."""
    run = RunFolder(tmp_path_factory.mktemp("teacher"))
    shape = {"model__d_model": 24, "model__num_layers": 3, "model__context_length": 32}
    assert train(replace(config, steps=4, **shape), run).state == "complete"
    return run


def test_a_teacher_has_its_share_in_what_is_learned(config, run, teacher):
    """The loss that is reported, and evaluation, are of the tokens alone."""
    torch.manual_seed(0)
    taught = replace(config, teacher=str(teacher.path), teacher_share=0.3, model__dropout=0.0)
    model, ids = TransformerLM(taught.model), torch.randint(300, (2, config.batch_size, config.model.context_length))
    plain, fused = (training_step(copy.deepcopy(model), replace(taught, ops=ops))[0] for ops in ("plain", "fused"))
    assert isinstance(fused, FusedStep)
    with torch.no_grad():
        loss, objective = plain.loss(*ids, learns=True)
        soft = soft_cross_entropy(plain.model(ids[0]), load_model(teacher.best_weights)(ids[0]))
    assert objective.item() == pytest.approx(0.7 * loss.item() + 0.3 * soft.item(), rel=1e-5)
    assert plain.evaluation_loss(*ids) == loss != objective
    torch.testing.assert_close(fused.evaluation_loss(*ids), loss)
    for _ in range(3):
        for ours, theirs in zip(fused(*ids, 1e-3), plain(*ids, 1e-3), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        plain.teacher.lm_head.weight.fill_(math.inf)
    assert not plain(*ids)[0].isfinite()  # a loss scaler would skip such steps in silence
    plain_taught = replace(config, teacher=str(teacher.path))
    losses = [train(replace(plain_taught, teacher_share=s), run.path / str(s)).valid_loss for s in (0.0, 0.5)]
    assert losses[0] == train(config, run.path / "without").valid_loss != losses[1]
    shutil.copytree(teacher.path, run.path / "gone")
    gone = replace(config, teacher=str(run.path / "gone"))
    train(gone, run.path / "student")
    shutil.rmtree(run.path / "gone")
    assert train(gone, run.path / "student").state == "complete"


def test_a_resumed_run_has_the_same_teacher(config, run, tmp_path, teacher, never_stopped):
    """Whatever its path; none, or another, also for a complete run."""
    taught, straight = replace(config, teacher=str(teacher.path), ops="fused"), RunFolder(tmp_path / "straight")
    assert train(taught, straight).state == "complete"
    train_until(7, taught, run)
    shutil.copytree(teacher.path, tmp_path / "moved")
    other = replace(taught, teacher=str(tmp_path / "moved"))
    shutil.copy(never_stopped.best_weights, tmp_path / "moved" / "checkpoints")
    for changed, folder in itertools.product((other, replace(taught, teacher=None)), (run, straight)):
        with pytest.raises(UserError, match=r"made with other settings: teacher \([0-9a-f]{12} there"):
            train(changed, folder)
    shutil.copy(teacher.best_weights, tmp_path / "moved" / "checkpoints")
    require_completed(other, run, straight)


def test_a_teacher_that_does_not_fit_is_refused(config, run, teacher, tmp_path):
    train(replace(config, model__context_length=8, steps=1), tmp_path / "short")
    train_until(5, config, RunFolder(tmp_path / "stopped"))
    (tmp_path / "loop").symlink_to("loop")
    shutil.copytree(teacher.path, tmp_path / "damaged")
    (tmp_path / "damaged" / "status.json").write_text("complete?")
    taught = replace(config, teacher=str(teacher.path))
    for changes, message in (
        ({"teacher": str(tmp_path)}, "There are no weights"),
        ({"teacher": str(tmp_path / "loop")}, "There are no weights"),
        ({"teacher": str(tmp_path / "short")}, "has a context of less than 16 tokens"),
        ({"teacher": str(tmp_path / "stopped")}, "is not complete: interrupted"),
        ({"evaluate_on": "dev"}, "has read dev"),
        ({"evaluate_on": "dev", "teacher": None, "init_from": str(tmp_path / "stopped")}, "has read dev"),
        ({"model__vocab_size": 999}, "has another tokenizer or vocab_size"),
        ({"teacher": str(tmp_path / "damaged")}, "cannot be read as JSON"),
    ):
        with pytest.raises(UserError, match=message):
            train(replace(taught, **changes), run)
    itself = replace(taught, teacher=str(tmp_path / "stopped"))
    with pytest.raises(UserError, match="train in another run folder"):
        train(itself, itself.teacher)
    with pytest.raises(UserError, match="teacher_share must be from 0 to 1"):
        replace(taught, teacher_share=1.5)
    other = types.SimpleNamespace(fingerprint="", tokenizer=types.SimpleNamespace(fingerprint="another"))
    for changed in (taught, replace(config, init_from=str(tmp_path / "stopped"))):
        with pytest.raises(UserError, match="has another tokenizer"):
            lmcore.run.require_other_runs(changed, run, other)
    reason = FusedStep.uncovered(replace(taught, ops="fused", precision="fp16"), 1)
    assert reason == "precision=fp16"
    assert not run.path.exists()


def test_z_loss_is_part_of_the_objective_and_not_reported(config):
    torch.manual_seed(0)
    model, ids = TransformerLM(config.model), torch.randint(300, (2, 4, 16))
    plain, with_z = (
        PlainStep(copy.deepcopy(model).eval(), replace(config, z_loss=weight), torch.device("cpu"))
        for weight in (0.0, 0.5)
    )
    assert torch.equal(plain(*ids, 1e-3)[0], with_z(*ids, 1e-3)[0])
    loss, objective = with_z.loss(*ids, learns=True)
    z = with_z.model(ids[0]).logsumexp(-1)
    assert (objective - loss).item() == pytest.approx(0.5 * z.square().mean().item(), rel=1e-5)
    assert with_z.evaluation_loss(*ids) == loss
