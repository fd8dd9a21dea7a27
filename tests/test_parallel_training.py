"""`lmcore train --strategy`: equal to one process on any number of ranks, and resumed from any checkpoint."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from parallel_runs import Trainers, small_config

from lmcore.checkpoint import read_checkpoint, read_weights
from lmcore.config import CorpusConfig, TrainConfig, model_config, replace
from lmcore.data import open_or_prepare
from lmcore.distributed import world
from lmcore.errors import UserError
from lmcore.run import RunFolder
from lmcore.train import train

WAYS = ("ddp", "zero1", "fsdp", "torch-ddp", "torch-fsdp2")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parallel") / "data"
    open_or_prepare("embedded", "bpe:300", folder, CorpusConfig(num_documents=100))
    return folder


@pytest.fixture(scope="module")
def trainers():
    pool = Trainers()
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def alone(data, tmp_path_factory):
    """The same run by one process."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    assert train(small_config(data), folder).state == "complete"
    return RunFolder(folder)


def complete(ended, steps=12) -> None:
    assert [(e.code, e.sentence) for e in ended] == [(0, "")] * len(ended), ended
    assert {e.result.state for e in ended} == {"complete"}
    assert {e.result for e in ended} == {ended[0].result}
    assert ended[0].result.step == steps


def same_run(run: RunFolder, other: RunFolder, rtol=2e-5) -> None:
    """Equal lines of metrics and equal weights, up to the order of sums."""
    for line, expected in zip(run.metrics_lines(), other.metrics_lines(), strict=True):
        assert line["step"] == expected["step"]
        assert line["tokens"] == expected["tokens"]
        for key in ("train_loss", "valid_loss", "grad_norm", "valid_accuracy"):
            if expected.get(key) is not None:
                assert line[key] == pytest.approx(expected[key], rel=rtol), key
    for path, expected_path in ((run.last_weights, other.last_weights), (run.best_weights, other.best_weights)):
        weights, expected = read_weights(path)[0], read_weights(expected_path)[0]
        assert weights.keys() == expected.keys()
        for name in weights:
            torch.testing.assert_close(weights[name], expected[name], rtol=1e-3, atol=2e-5)


def refused(ended) -> tuple[int, str]:
    """The rank that says why, and its sentence; all exit with code 2, the others without a word."""
    assert [e.code for e in ended] == [2] * len(ended), ended
    ((rank, sentence),) = [(rank, e.sentence) for rank, e in enumerate(ended) if e.sentence]
    return rank, sentence


def back_to(run: RunFolder, step: int) -> None:
    """The run as it was when it was killed after the checkpoint of a step."""
    for path in run.checkpoints():
        if int(path.stem.split("_")[1]) > step:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    run.status_file.unlink()
    run.last_weights.unlink()


@pytest.mark.parametrize(
    ("way", "changes"),
    [
        ("zero1", {"optimizer__name": "muon"}),
        ("zero1", {"optimizer__name": "sgd", "optimizer__max_grad_norm": None}),
        ("fsdp", {"model__tie_embeddings": True, "eval_details": True}),
        ("torch-fsdp2", {"model__tie_embeddings": True, "sampling": "epoch", "z_loss": 1e-3}),
        ("ddp", {"ops": "fused", "model__d_model": 24, "eval_details": True}),
        ("ddp", {"ops": "fused", "model__tie_embeddings": True, "model__d_model": 24, "optimizer__name": "muon"}),
        ("zero1", {"ops": "fused", "model__d_model": 24, "optimizer__max_grad_norm": 0.3}),
        ("zero1", {"ops": "fused", "model__d_model": 24, "model__tie_embeddings": True, "model__norm": "none"}),
        ("fsdp", {"ops": "fused", "model__d_model": 24, "model__num_layers": 5, "model__vocab_size": 301}),
        (
            "fsdp",
            {
                "ops": "fused",
                "model__d_model": 24,
                "model__num_layers": 4,
                "model__checkpoint_every": 1,
                "model__tie_embeddings": True,
                "model__norm": "none",
                "eval_details": True,
            },
        ),
        ("torch-ddp", {"model__checkpoint_every": 1, "checkpoints": "sharded"}),
    ],
)
def test_with_other_settings(trainers, data, tmp_path, way, changes):
    """Optimizers, tied weights, the explicit step, which sends gradients while it goes back, and details."""
    config = small_config(data, **changes)
    assert train(config, tmp_path / "alone").state == "complete"
    ended = trainers.train(replace(config, strategy=way), tmp_path / "run", 2)
    complete(ended)
    assert "does not cover" not in ended[0].printed
    same_run(RunFolder(tmp_path / "run"), RunFolder(tmp_path / "alone"), rtol=1e-4)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"strategy": "fsdp", "model__d_ff": 41}, "d_model=24 and d_ff=41 divided by 2 ranks"),
        ({"strategy": "zero1", "optimizer__name": "muon"}, "strategy=zero1 with muon"),
    ],
)
def test_what_the_explicit_step_does_not_cover_trains_as_plain_operations(trainers, data, tmp_path, changes, reason):
    config = small_config(data, ops="fused", model__d_model=24, steps=3, **changes)
    ended = trainers.train(config, tmp_path / "run", 2)
    complete(ended, 3)
    assert [f"the fused step does not cover {reason}" in e.printed for e in ended] == [True, False]
    if config.strategy == "fsdp":
        rank, sentence = refused(trainers.train(replace(config, model__checkpoint_every=1), tmp_path / "refused", 2))
        assert rank == 0
        assert "model.checkpoint_every: only the fused step does, and it does not cover d_model=24" in sentence


def test_bf16_is_that_of_one_process_up_to_its_rounding(trainers, data, tmp_path):
    losses = []
    for way in ("none", "ddp", "fsdp", "torch-fsdp2"):
        config = small_config(data, strategy=way, precision="bf16")
        if way == "none":
            train(config, tmp_path / way)
        else:
            complete(trainers.train(config, tmp_path / way, 2))
        losses.append([line["train_loss"] for line in RunFolder(tmp_path / way).metrics_lines()])
    for other in losses[1:]:
        assert other == pytest.approx(losses[0], rel=5e-3)
        assert other != losses[0]


@pytest.mark.parametrize("way", ["zero1", "fsdp"])
def test_the_explicit_step_in_bf16_saves_weights_of_every_owner(trainers, data, tmp_path, way):
    """Compute weights are bf16 copies: the float32 parameters come from their owners."""
    config = small_config(data, precision="bf16", ops="fused", model__d_model=24, eval_details=True)
    assert train(config, tmp_path / "alone").state == "complete"
    complete(trainers.train(replace(config, strategy=way), tmp_path / "run", 2))
    run, alone = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "alone")
    for line, expected in zip(run.metrics_lines(), alone.metrics_lines(), strict=True):
        assert line["train_loss"] == pytest.approx(expected["train_loss"], rel=5e-3)
        assert line.get("valid_accuracy") == pytest.approx(expected.get("valid_accuracy"), abs=0.02)
    found, expected = read_weights(run.last_weights)[0], read_weights(alone.last_weights)[0]
    for name in expected:
        assert (found[name] - expected[name]).norm() < 0.05 * expected[name].norm(), name
        assert found[name].bfloat16().float().ne(found[name]).any(), name  # not what was computed with


def test_dropout_differs_between_ranks_and_goes_on_where_it_was(trainers, data, tmp_path):
    """Resumed on as many ranks a run is bitwise the undisturbed one; the ranks' masks are not the same."""
    config, run = small_config(data, strategy="ddp", model__dropout=0.5), RunFolder(tmp_path / "run")
    complete(trainers.train(config, run.path, 2))
    states = read_checkpoint(run.checkpoints()[0])["extra"]["rng"]
    assert not torch.equal(states[0]["cpu"], states[1]["cpu"])
    before, weights = run.metrics_lines(), read_weights(run.last_weights)[0]
    back_to(run, 8)
    complete(trainers.train(config, run.path, 2))
    after = RunFolder(run.path).metrics_lines()
    assert [line["train_loss"] for line in after] == [line["train_loss"] for line in before]
    assert all(torch.equal(weights[name], tensor) for name, tensor in read_weights(run.last_weights)[0].items())


def test_a_run_that_diverges_does_so_on_all_ranks(trainers, data, tmp_path):
    config = small_config(data, strategy="ddp", optimizer__learning_rate=1e30, optimizer__max_grad_norm=None)
    ended = trainers.train(config, tmp_path / "run", 2)
    assert {(e.code, e.result.state) for e in ended} == {(0, "diverged")}


def test_what_the_ranks_refuse(trainers, data, tmp_path):
    run, config = tmp_path / "run", small_config(data, strategy="ddp")
    assert refused(trainers.train(config, run, 5)) == (0, "batch_size (12) must divide by the number of ranks, 5.")
    rank, sentence = refused(trainers.train(config, run, 2, {1: {"optimizer__learning_rate": 0.5, "seed": 3}}))
    assert rank == 0
    assert sentence == (
        "The ranks were started with different settings: optimizer.learning_rate (0.01 on rank 0, 0.5 on rank 1), "
        "seed (0 on rank 0, 3 on rank 1)."
    )
    other = tmp_path / "other"
    open_or_prepare("embedded", "bpe:300", other, CorpusConfig(num_documents=60))
    assert "data (" in refused(trainers.train(config, run, 2, {1: {"data": str(other)}}))[1]
    assert refused(trainers.train(config, run, 2, {1: {"data": str(tmp_path / "none")}}))[0] == 1
    assert refused(trainers.train(replace(config, device="cuda"), run, 2))[1].endswith(
        "has 0 GPUs for 2 ranks, and each needs its own: start fewer, or use --device cpu."
    )
    assert "Ranks train on a GPU each or on CPUs" in refused(trainers.train(replace(config, device="mps"), run, 2))[1]
    assert not run.exists() or not any(run.rglob("*.json"))
    complete(trainers.train(config, run, 2))
    assert "made with other settings: seed" in refused(trainers.train(replace(config, seed=1), run, 2))[1]
    with RunFolder(run).lock():
        assert "Another process is using the run folder" in refused(trainers.train(config, run, 2))[1]
    complete(trainers.train(config, run, 3))  # it is complete already


def test_a_forgotten_parallel_is_said_once(tmp_path):
    torchrun = [sys.executable, *["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "--"]]
    words = [*torchrun, "lmcore", "train", "--preset", "smoke", "--run", str(tmp_path / "run")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    told = [
        line for line in done.stderr.splitlines() if "lmcore:" in line or "interrupted" in line or "stopped" in line
    ]
    assert told == [
        "lmcore: torchrun started 2 processes, but the run is not parallel: add --strategy ddp, or another way."
    ]
    assert "(exitcode: 2) local_rank: 0" in done.stderr  # of the rank that has said it
    assert done.stdout == ""
    assert not (tmp_path / "run").exists()


def test_one_process_is_told_of_the_other_gpus(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    for way, told in (("fsdp", 1), ("none", 0)):
        with world.joined(TrainConfig(model_config("smoke"), strategy=way)) as alone:
            assert alone.size == 1
        assert capsys.readouterr().err.count("torchrun --nproc-per-node 8") == told


@pytest.mark.parametrize(
    ("way", "changes", "what"),
    [
        ("fsdp", {"optimizer__name": "muon"}, "optimizer.name=muon, which needs whole matrices"),
        ("torch-fsdp2", {"precision": "fp16"}, "precision=fp16, whose loss scaling needs whole gradients"),
        ("fsdp", {"compile": True}, "compile"),
        ("fsdp", {"model__checkpoint_every": 1}, "model.checkpoint_every=1 with ops=plain"),
    ],
)
def test_what_a_way_does_not_cover(data, way, changes, what):
    with pytest.raises(UserError, match=f"^strategy={way} does not cover {what}; choose another --strategy.$"):
        small_config(data, strategy=way, **changes)


def damaged(folder: Path, how: str) -> None:
    """Does it to the part of a sharded checkpoint that rank 1 wrote."""
    part = next(folder.glob("__1_*.distcp"))
    if how == "flipped":
        content = bytearray(part.read_bytes())
        content[len(content) // 2] ^= 1
        part.write_bytes(content)
    elif how == "missing":
        part.unlink()
    else:
        (folder / "manifest.json").write_text("{")


@pytest.mark.parametrize("how", ["flipped", "missing", "manifest"])
def test_a_damaged_sharded_checkpoint_is_noticed(trainers, data, alone, tmp_path, how):
    run, config = RunFolder(tmp_path / "run"), small_config(data, strategy="fsdp", checkpoints="sharded")
    complete(trainers.train(config, run.path, 2))
    back_to(run, 8)
    damaged(run.checkpoint_file(8, sharded=True), how)
    ended = trainers.train(config, run.path, 2)
    complete(ended)
    assert "step_00000008.sharded is not a whole checkpoint" in ended[0].printed
    assert "resuming from step 4" in ended[0].printed
    same_run(run, alone)


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ({"RANK": "x"}, "The variable RANK must be a whole number, not 'x': start the ranks with torchrun."),
        ({"RANK": "2"}, "RANK is 2 of WORLD_SIZE 2"),
        ({"MASTER_PORT": "x"}, "The 2 ranks did not meet at 127.0.0.1:x within 120 seconds"),
    ],
)
def test_variables_of_a_launcher_that_make_no_sense(monkeypatch, data, variables, sentence):
    launched = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    for name, value in (launched | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"} | variables).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=f"^{sentence}"), world.joined(small_config(data, strategy="ddp")):
        pass


CHANGES = [
    # written by, in this form, on so many ranks; read by, on so many
    ("zero1", "sharded", 3, "fsdp", 2),
    ("fsdp", "sharded", 3, "torch-fsdp2", 2),
    ("torch-fsdp2", "async", 2, "zero1", 3),
    ("ddp", "whole", 2, "fsdp", 4),
    ("fsdp", "whole", 2, "none", 1),
    ("fsdp", "async", 4, "none", 1),
    ("none", "sharded", 1, "torch-ddp", 2),
    ("torch-ddp", "whole", 2, "torch-ddp", 2),
    ("torch-fsdp2", "whole", 3, "ddp", 2),
    ("zero1", "async", 2, "zero1", 2),
]


@pytest.mark.parametrize(("writer", "form", "ranks", "reader", "others"), CHANGES)
def test_it_trains_what_one_process_trains(trainers, data, alone, tmp_path, writer, form, ranks, reader, others):
    run = RunFolder(tmp_path / "run")
    config = small_config(data, strategy=writer, checkpoints=form)
    if writer == "none":
        assert train(config, run).state == "complete"
    else:
        complete(trainers.train(config, run.path, ranks))
    assert [path.suffix for path in run.checkpoints()] == [".pt" if form == "whole" else ".sharded"] * 3
    back_to(run, 8)
    assert not list(run.checkpoint_folder.glob(".*"))
    config = replace(config, strategy=reader)
    if reader == "none":
        assert train(config, run).state == "complete"
    else:
        ended = trainers.train(config, run.path, others)
        complete(ended)
        assert ["resuming from step 8" in e.printed for e in ended] == [True] + [False] * (others - 1)
    same_run(run, alone)


@pytest.mark.parametrize(
    ("writer", "reader", "others"),
    [("zero1", "zero1", 2), ("zero1", "none", 1), ("fsdp", "ddp", 2), ("fsdp", "fsdp", 4)],
)
def test_the_explicit_step_with_divided_moments_goes_on_elsewhere(trainers, data, tmp_path, writer, reader, others):
    config = small_config(data, ops="fused", model__d_model=24, model__d_ff=48)
    assert train(config, tmp_path / "alone").state == "complete"
    run = RunFolder(tmp_path / "run")
    complete(trainers.train(replace(config, strategy=writer, checkpoints="sharded"), run.path, 3))
    back_to(run, 8)
    config = replace(config, strategy=reader)
    if reader == "none":
        assert train(config, run).state == "complete"
    else:
        complete(trainers.train(config, run.path, others))
    same_run(run, RunFolder(tmp_path / "alone"), rtol=1e-4)
