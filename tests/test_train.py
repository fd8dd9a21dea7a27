import errno
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
import types
import warnings
from pathlib import Path

import pytest
import torch

import lmcore.run
import lmcore.train
from lmcore.checkpoint import digest, load_model, read_checkpoint, read_weights, save_checkpoint
from lmcore.config import OptimizerConfig, TrainConfig, model_config, replace
from lmcore.data import PreparedData, open_data
from lmcore.errors import EXIT_INTERRUPTED, UserError
from lmcore.files import read_json, write_json
from lmcore.functional import cross_entropy
from lmcore.model import TransformerLM
from lmcore.optimizer import build_optimizer
from lmcore.run import RunBusy, RunFolder
from lmcore.train import AsyncMetrics, PlainStep, Trainer, train
from lmcore.workbook.sweep import is_finished

TIMES = {"seconds", "tokens_per_second", "mfu", "peak_memory_bytes"}


@pytest.fixture
def config(embedded_data) -> TrainConfig:
    """A run of twelve steps with dropout, so that the state of the generators matters."""
    return TrainConfig(
        model=model_config("smoke", vocab_size=300, context_length=16, d_model=16, num_heads=2, d_ff=24, dropout=0.1),
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=3),
        data=str(embedded_data),
        batch_size=4,
        steps=12,
        log_interval=3,
        eval_interval=4,
        checkpoint_interval=5,
        eval_batch_size=64,
        device="cpu",
    )


@pytest.fixture(autouse=True)
def short_validation(monkeypatch, embedded_data):
    """The first 700 tokens of the validation split are enough here."""

    def opened(folder):
        data = open_data(folder)
        object.__setattr__(data, "valid", data.valid[:700])
        return data

    monkeypatch.setattr(lmcore.train, "open_data", opened)


def stop_after(monkeypatch, step: int) -> None:
    """Sends this process SIGTERM at the end of the given step."""
    original = AsyncMetrics.push

    def push(self, number, *values):
        original(self, number, *values)
        if number == step:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(AsyncMetrics, "push", push)


def weights(run: RunFolder) -> str:
    return digest(load_model(run.checkpoint_folder / "last.safetensors").state_dict())


def lines_without_times(run: RunFolder) -> list[dict]:
    return [{k: v for k, v in line.items() if k not in TIMES} for line in run.metrics_lines()]


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "sgd"])
@pytest.mark.parametrize("step", [1, 5, 7, 11])
def test_stopped_and_resumed_equals_one_straight_run_bitwise(tmp_path, config, monkeypatch, optimizer, step):
    config = replace(config, optimizer__name=optimizer, sampling="epoch" if optimizer == "muon" else "random")
    straight, resumed = RunFolder(tmp_path / "straight"), RunFolder(tmp_path / "resumed")
    assert train(config, straight).state == "complete"
    with monkeypatch.context() as patch:
        stop_after(patch, step)
        assert train(config, resumed).state == "interrupted"
    assert resumed.status()["step"] == step
    assert train(config, resumed).state == "complete"
    assert weights(resumed) == weights(straight)
    assert lines_without_times(resumed) == lines_without_times(straight)


def test_metrics_lines(tmp_path, config):
    train(config, tmp_path / "run")
    lines = RunFolder(tmp_path / "run").metrics_lines()
    assert [line["step"] for line in lines] == [3, 4, 6, 8, 9, 12]
    assert [line["step"] for line in lines if "valid_loss" in line] == [4, 8, 12]
    assert all(line["tokens"] == line["step"] * 4 * 16 for line in lines)
    assert lines[-1]["lr"] == pytest.approx(0, abs=1e-12)
    assert lines[0]["lr"] == pytest.approx(config.optimizer.learning_rate)
    assert all(a["seconds"] < b["seconds"] for a, b in itertools.pairwise(lines))
    assert lines[-1]["valid_loss"] < lines[2]["train_loss"]


def test_the_learning_rate_ends_at_its_minimum(tmp_path, config):
    train(replace(config, optimizer__min_learning_rate=2e-3, optimizer__cosine_steps=9), tmp_path / "run")
    rates = [line["lr"] for line in RunFolder(tmp_path / "run").metrics_lines()]
    assert rates[0] == pytest.approx(1e-2)
    assert rates[-2:] == pytest.approx([2e-3, 2e-3])


def test_best_weights_are_those_of_the_lowest_validation_loss(tmp_path, config, monkeypatch):
    losses = iter([2.0, 1.0, 3.0])
    monkeypatch.setattr(Trainer, "evaluate", lambda self: next(losses))
    result = train(replace(config, checkpoint_interval=4, keep_checkpoints=3), tmp_path / "run")
    run = RunFolder(tmp_path / "run")
    notes = read_weights(run.best_weights)[1]
    assert (result.valid_loss, result.best_valid_loss) == (3.0, 1.0)
    assert (notes["step"], notes["valid_loss"]) == (8, 1.0)
    best = load_model(run.best_weights).state_dict()
    assert digest(best) == digest(read_checkpoint(run.checkpoint_file(8))["model"])


def test_validation_is_the_whole_set(tmp_path, config):
    train(config, tmp_path / "run")
    run = RunFolder(tmp_path / "run")
    model = load_model(run.checkpoint_folder / "last.safetensors")
    ids = torch.tensor(open_data(config.data).valid[:700].astype("int64"))
    windows = (len(ids) - 1) // 16
    inputs, targets = ids[: windows * 16].view(-1, 16), ids[1 : windows * 16 + 1].view(-1, 16)
    with torch.no_grad():
        expected = cross_entropy(model(inputs), targets).item()
    assert run.status()["valid_loss"] == pytest.approx(expected, rel=1e-5)


def test_run_folder_says_everything(tmp_path, config):
    train(config, tmp_path / "run")
    run = RunFolder(tmp_path / "run")
    assert run.config() == config
    environment = run.environment()
    assert {"torch", "python", "command", "git_commit", "device", "time_utc"} <= environment.keys()
    assert environment["data_fingerprint"] == open_data(config.data).fingerprint
    assert [path.name for path in run.checkpoints()] == ["step_00000012.pt", "step_00000010.pt"]
    assert load_model(run.best_weights).config == config.model
    assert len(run.metrics()) == 6


def test_complete_run_is_not_repeated(tmp_path, config):
    first = train(config, tmp_path / "run")
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    assert train(config, tmp_path / "run") == first
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


def test_a_vocabulary_larger_than_the_data_s_is_said(tmp_path, config, capsys):
    train(replace(config, steps=1, model__vocab_size=1300), tmp_path / "wide")
    assert (
        "wide: the model's vocabulary (1,300) is larger than that of the data (300): ids from 300 on never occur.\n"
        in capsys.readouterr().out
    )
    train(replace(config, steps=1), tmp_path / "fitting")
    assert "vocabulary" not in capsys.readouterr().out


def test_other_settings_or_data_are_refused_by_name(tmp_path, config, embedded_data):
    train(config, tmp_path / "run")
    with pytest.raises(UserError, match=r"made with other settings: steps \(12 there, 13 here\)"):
        train(replace(config, steps=13), tmp_path / "run")
    train(replace(config, keep_checkpoints=1), tmp_path / "run")
    starts = RunFolder(tmp_path / "run").starts()
    write_json(tmp_path / "run" / "environment.json", [start | {"data_fingerprint": "another"} for start in starts])
    with pytest.raises(UserError, match="the data"):
        train(config, tmp_path / "run")


def test_checkpoints_tell_which_data_they_were_made_with(tmp_path, config, monkeypatch, capsys):
    run = RunFolder(tmp_path / "run")
    train(config, run)
    run.environment_file.unlink()
    with monkeypatch.context() as patch:
        patch.setattr(PreparedData, "fingerprint", "another")
        with pytest.raises(UserError, match="made with other data"):
            train(config, run)
    assert not run.environment_file.exists()
    assert not is_finished(config, run)
    assert train(config, run).state == "complete"
    assert is_finished(config, run)
    assert "was not checked" not in capsys.readouterr().out


def test_damaged_checkpoint_falls_back_to_the_one_before(tmp_path, config, monkeypatch, capsys):
    straight, run = RunFolder(tmp_path / "straight"), RunFolder(tmp_path / "run")
    train(config, straight)
    with monkeypatch.context() as patch:
        stop_after(patch, 11)
        train(config, run)
    newest = run.checkpoints()[0]
    newest.write_bytes(newest.read_bytes()[:-100])
    assert train(config, run).state == "complete"
    said = capsys.readouterr().out
    assert "step_00000011.pt is not a whole checkpoint" in said
    assert "goes on from step 10" in said
    assert weights(run) == weights(straight)
    assert lines_without_times(run) == lines_without_times(straight)


def test_lines_after_the_checkpoint_are_written_once(tmp_path, config, monkeypatch):
    config = replace(config, keep_checkpoints=3)
    straight, run = RunFolder(tmp_path / "straight"), RunFolder(tmp_path / "run")
    train(config, straight)
    with monkeypatch.context() as patch:
        stop_after(patch, 11)
        train(config, run)
    for step in (10, 11):
        run.checkpoint_file(step).unlink()
    assert [line["step"] for line in run.metrics_lines() if line["step"] > 5] == [6, 8, 9]
    assert train(config, run).state == "complete"
    assert weights(run) == weights(straight)
    assert lines_without_times(run) == lines_without_times(straight)


def test_a_run_does_not_begin_again_over_checkpoints_that_cannot_be_read(tmp_path, config, monkeypatch):
    run = RunFolder(tmp_path / "run")
    with monkeypatch.context() as patch:
        stop_after(patch, 11)
        train(config, run)
    checkpoints, metrics = run.checkpoints(), run.metrics_file.read_bytes()
    whole = checkpoints[0].read_bytes()
    for path in checkpoints:
        path.write_bytes(b"damaged")
    with pytest.raises(UserError, match=r"No checkpoint in .*checkpoints can be read"):
        train(config, run)
    assert run.checkpoints() == checkpoints
    assert run.metrics_file.read_bytes() == metrics
    checkpoints[1].write_bytes(whole)
    assert train(config, run).state == "complete"
    assert checkpoints[0].with_suffix(".damaged").read_bytes() == b"damaged"


def test_a_checkpoint_of_an_earlier_version_is_gone_on_from(tmp_path, config, monkeypatch):
    """Format 1 as it was before: without the metrics and the step of the best weights."""
    straight, run = RunFolder(tmp_path / "straight"), RunFolder(tmp_path / "run")
    train(config, straight)
    with monkeypatch.context() as patch:
        stop_after(patch, 7)
        train(config, run)
    content = read_checkpoint(run.checkpoints()[0])
    del content["extra"]["metrics"], content["extra"]["best_step"]
    torch.save(content | {"lmcore_format": 1, "digest": digest(content)}, run.checkpoints()[0])
    run.metrics_file.write_text("".join(json.dumps(line) + "\n" for line in run.metrics_lines()))
    assert train(config, run).state == "complete"
    assert weights(run) == weights(straight)
    assert lines_without_times(run) == lines_without_times(straight)


@pytest.mark.parametrize("name", ["metrics.jsonl", "checkpoints/last.safetensors", "checkpoints/best.safetensors"])
@pytest.mark.parametrize("damaged", ["cut", "missing"])
def test_damaged_results_of_a_complete_run_are_mended(tmp_path, config, capsys, name, damaged):
    run = RunFolder(tmp_path / "run")
    train(config, run)
    lines, last, best = run.metrics_lines(), weights(run), digest(load_model(run.best_weights).state_dict())
    path = run.path / name
    if damaged == "cut":
        path.write_bytes(path.read_bytes()[:-100])
    else:
        path.unlink()
    assert train(config, run).state == "complete"
    assert "mended from the last checkpoint" in capsys.readouterr().out
    assert lines_without_times(run) == [{k: v for k, v in line.items() if k not in TIMES} for line in lines]
    assert (weights(run), digest(load_model(run.best_weights).state_dict())) == (last, best)


def test_best_weights_that_cannot_be_made_again_are_refused(tmp_path, config, monkeypatch):
    """The best of step 4 is in no checkpoint, and both checkpoints are later: going on would lose it unnoticed."""
    losses = iter([1.0, 2.0, 3.0, 1.0, 2.0, 3.0])
    monkeypatch.setattr(Trainer, "evaluate", lambda self: next(losses))
    run = RunFolder(tmp_path / "run")
    with monkeypatch.context() as patch:
        stop_after(patch, 11)
        train(config, run)
    run.checkpoint_file(5).unlink(missing_ok=True)
    whole = run.best_weights.read_bytes()
    run.best_weights.write_bytes(whole[:-5])
    with pytest.raises(UserError, match=r"best\.safetensors is damaged, and no checkpoint from before"):
        train(config, run)
    run.best_weights.unlink()
    assert train(config, run).state == "complete"


def test_a_full_disk_is_noted_and_the_run_goes_on_later(tmp_path, config, monkeypatch):
    straight, run = RunFolder(tmp_path / "straight"), RunFolder(tmp_path / "run")
    train(config, straight)

    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(lmcore.train, "describe", full)
        with pytest.raises(UserError, match="No space left on device; the same command goes on"):
            train(config, run)
    assert run.status()["state"] == "failed"
    assert "No space left" in run.status()["reason"]
    assert train(config, run).state == "complete"
    assert weights(run) == weights(straight)


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_before_training_begins(tmp_path, config, monkeypatch, capsys, number):
    opened, before = lmcore.train.open_data, signal.getsignal(number)

    def stopped(folder):
        os.kill(os.getpid(), number)
        return opened(folder)

    with monkeypatch.context() as patch:
        patch.setattr(lmcore.train, "open_data", stopped)
        assert train(config, tmp_path / "run").state == "interrupted"
    assert "stopped before it began; nothing is lost" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()
    assert signal.getsignal(number) == before
    with monkeypatch.context() as patch:
        patch.setattr(lmcore.train, "is_complete", lambda _: os.kill(os.getpid(), number))
        assert train(config, tmp_path / "run").state == "interrupted"
    assert RunFolder(tmp_path / "run").checkpoints() == []
    assert train(config, tmp_path / "run").state == "complete"


def test_a_run_keeps_the_number_of_threads_that_it_began_with(tmp_path, config, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS")
    run, used = RunFolder(tmp_path / "run"), []
    original = AsyncMetrics.push

    def push(self, *values):
        used.append(torch.get_num_threads())
        original(self, *values)

    with monkeypatch.context() as patch:
        patch.setattr(lmcore.train, "fastest_threads", lambda device, work: work() or 2)
        stop_after(patch, 7)
        train(config, run)
    assert run.environment()["threads"] == 2
    with monkeypatch.context() as patch:
        patch.setattr(lmcore.train, "fastest_threads", lambda device, work: 1 / 0)
        patch.setattr(AsyncMetrics, "push", push)
        assert train(config, run).state == "complete"
    assert used == [2] * 5
    assert torch.get_num_threads() == 1
    assert (
        lmcore.train.choose_threads(replace(config, deterministic=True), torch.device("cpu"), RunFolder("new")) is None
    )


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_stopped_and_resumed_on_a_gpu_equals_one_straight_run_bitwise(
    tmp_path, config, monkeypatch, precision, compiled
):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    config = replace(config, device="cuda", deterministic=True, precision=precision, compile=compiled)
    straight, resumed = RunFolder(tmp_path / "straight"), RunFolder(tmp_path / "resumed")
    assert train(config, straight).state == "complete"
    with monkeypatch.context() as patch:
        stop_after(patch, 7)
        assert train(config, resumed).state == "interrupted"
    assert train(config, resumed).state == "complete"
    assert weights(resumed) == weights(straight)
    assert lines_without_times(resumed) == lines_without_times(straight)


@pytest.mark.gpu
@pytest.mark.parametrize("ops", ["plain", "fused"])
def test_the_loop_never_waits_for_the_device(tmp_path, config, monkeypatch, ops):
    """Steps 6 to 40, metrics lines included, make none of the calls that PyTorch knows to synchronize."""
    config = replace(config, device="cuda", precision="bf16", ops=ops, steps=50, log_interval=3, model__dropout=0.0)
    config = replace(config, eval_interval=50, checkpoint_interval=50)
    original = AsyncMetrics.push

    def push(self, step, *values):
        original(self, step, *values)
        torch.cuda.set_sync_debug_mode("warn" if 5 <= step < 40 else "default")

    monkeypatch.setattr(AsyncMetrics, "push", push)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(config, tmp_path / "run")
        torch.cuda.set_sync_debug_mode("warn")
        torch.ones(1, device="cuda").item()  # what the count would see
        torch.cuda.set_sync_debug_mode("default")
    synchronizing = [w for w in caught if "called a synchronizing" in str(w.message)]
    assert len(synchronizing) == 1, [str(w.message) for w in synchronizing]


def test_a_checkpoint_that_is_not_of_a_run_is_refused(tmp_path, config, monkeypatch):
    run = RunFolder(tmp_path / "run")
    with monkeypatch.context() as patch:
        stop_after(patch, 5)
        train(config, run)
    model = TransformerLM(config.model)
    save_checkpoint(model, build_optimizer(model, config.optimizer), 6, run.checkpoint_file(6))
    with pytest.raises(UserError, match=r"step_00000006\.pt was not written by a training run"):
        train(config, run)


@pytest.mark.parametrize("poison", ["loss", "gradient"])
def test_divergence_is_a_result_that_names_step_and_rate(tmp_path, config, monkeypatch, capsys, poison):
    original, calls = PlainStep.loss, []

    def poisoned(self, inputs, targets):
        loss = original(self, inputs, targets)
        calls.append(self.model.training)
        if self.model.training and sum(calls) == 8:
            return (
                loss * float("nan") if poison == "loss" else loss + (self.model.lm_head.weight * 1e38 * 1e38).sum() * 0
            )
        return loss

    monkeypatch.setattr(PlainStep, "loss", poisoned)
    result = train(config, tmp_path / "run")
    run = RunFolder(tmp_path / "run")
    assert result.state == "diverged"
    assert run.status()["diverged_at_step"] == 8
    assert "not finite at step 8, learning rate" in run.status()["reason"]
    assert run.status()["reason"] in capsys.readouterr().out
    step = read_checkpoint(run.checkpoints()[0])
    assert step["iteration"] == 5
    assert all(torch.isfinite(value).all() for value in step["model"].values())


@pytest.mark.parametrize("place", [(Trainer, "__init__"), (PlainStep, "__call__")], ids=["building", "a step"])
@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB."),
        RuntimeError("MPS backend out of memory (tried to allocate 9 GiB)."),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 GiB."),
        MemoryError("Unable to allocate 9 GiB for an array"),
    ],
)
def test_out_of_memory_is_a_result(tmp_path, config, monkeypatch, capsys, place, error):
    def too_large(*_):
        raise error

    monkeypatch.setattr(*place, too_large)
    assert train(config, tmp_path / "run").state == "out of memory"
    assert "9 GiB" in RunFolder(tmp_path / "run").status()["reason"]
    assert "9 GiB" in capsys.readouterr().out


def test_another_error_is_not_taken_for_a_lack_of_memory(tmp_path, config, monkeypatch):
    def broken(*_):
        raise RuntimeError("shapes differ")

    monkeypatch.setattr(PlainStep, "__call__", broken)
    with pytest.raises(RuntimeError, match="shapes differ"):
        train(config, tmp_path / "run")


def test_two_processes_in_one_run_folder(tmp_path, config):
    run = RunFolder(tmp_path / "run")
    refused = []

    def second():
        try:
            train(config, run)
        except RunBusy as error:
            refused.append(str(error))

    with run.lock():
        thread = threading.Thread(target=second)
        thread.start()
        thread.join()
        assert run.is_busy()
    assert len(refused) == 1
    assert "Another process is using the run folder" in refused[0]
    assert not run.is_busy()


def test_bad_input_is_one_sentence(tmp_path, config):
    with pytest.raises(UserError, match=r"vocabulary of .*set model\.vocab_size"):
        train(replace(config, model__vocab_size=64), tmp_path / "a")
    with pytest.raises(UserError, match="context of"):
        train(replace(config, model__context_length=10**6), tmp_path / "b")
    with pytest.raises(UserError, match="is not there"):
        train(replace(config, device="cuda:9"), tmp_path / "c")
    with pytest.raises(UserError, match="not a prepared corpus"):
        train(replace(config, data=str(tmp_path)), tmp_path / "d")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written to"):
        train(config, tmp_path / "file" / "run")
    with pytest.raises(UserError, match=r"pip install 'lmcore\[wandb\]'"):
        train(replace(config, trackers=("wandb",)), tmp_path / "e")


def test_trackers_receive_every_line(tmp_path, config, monkeypatch):
    class Recorder:
        def __init__(self, *_):
            self.lines, self.closed = [], False
            recorders.append(self)

        def log(self, line):
            self.lines.append(line)

        def close(self):
            self.closed = True

    recorders: list[Recorder] = []
    monkeypatch.setattr(lmcore.run, "TRACKERS", {"tensorboard": Recorder})
    train(replace(config, trackers=("tensorboard",)), tmp_path / "run")
    assert recorders[0].lines == RunFolder(tmp_path / "run").metrics_lines()
    assert recorders[0].closed


def test_tensorboard_events(tmp_path, config):
    pytest.importorskip("tensorboard", reason="the tensorboard extra is not installed")
    train(replace(config, trackers=("tensorboard",)), tmp_path / "run")
    assert list((tmp_path / "run" / "tensorboard").glob("events.out.tfevents.*"))


@pytest.mark.parametrize("precision", ["bf16", "fp16", "tf32"])
def test_precisions_learn(tmp_path, config, precision):
    result = train(replace(config, precision=precision, model__dropout=0.0), tmp_path / "run")
    lines = RunFolder(tmp_path / "run").metrics_lines()
    assert result.state == "complete"
    assert lines[-1]["train_loss"] < lines[0]["train_loss"]


def test_signal_reaches_a_process_on_its_own(tmp_path, config):
    config = replace(config, steps=100_000, eval_interval=100_000, checkpoint_interval=100_000, log_interval=1)
    write_json(tmp_path / "config.json", json.loads(json.dumps(config, default=vars)))
    run = RunFolder(tmp_path / "run")
    command = [
        sys.executable,
        "-m",
        "lmcore",
        "train",
        "--config",
        str(tmp_path / "config.json"),
        "--run",
        str(run.path),
    ]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    while not (run.metrics_file.exists() and run.metrics_lines()):  # the first line of progress comes far later
        assert child.poll() is None, child.stdout.read()
        time.sleep(0.02)
    child.send_signal(signal.SIGUSR1)
    rest = child.stdout.read()
    assert child.wait(timeout=60) == EXIT_INTERRUPTED, rest
    assert run.status()["state"] == "interrupted"
    assert read_checkpoint(run.checkpoints()[0])["iteration"] == run.status()["step"]


def test_wandb_gets_the_lines_and_continues_its_page(tmp_path, config, monkeypatch):
    calls: list = []
    session = types.SimpleNamespace(
        log=lambda values, step: calls.append((step, values)), finish=lambda: calls.append("finish")
    )
    package = types.ModuleType("wandb")
    package.init = lambda **options: calls.append(options) or session
    monkeypatch.setitem(sys.modules, "wandb", package)
    train(replace(config, trackers=("wandb",)), tmp_path / "run")
    options, *lines, last = calls
    assert (options["id"], options["resume"], options["config"]["steps"]) == ("run", "allow", 12)
    assert [step for step, _ in lines] == [line["step"] for line in RunFolder(tmp_path / "run").metrics_lines()]
    assert all(None not in values.values() for _, values in lines)
    assert last == "finish"


def test_the_committed_figures_of_the_fault_suite_lost_nothing():
    """They are made by: pytest -m faults tests/faults --faults-report results/faults.json."""
    rows = read_json(Path(__file__).parents[1] / "results" / "faults.json")["faults"]
    assert all(row["lost"] == 0 for row in rows)
    assert all(row["tried"] == row["survived"] + row["refused_in_words"] for row in rows)
    kills = {row["kind"].removeprefix("SIGKILL at a random moment "): row["survived"] for row in rows}
    assert kills["of training"] + kills["in the middle of a save"] >= 100
    assert kills["in the middle of a save"] > 0
