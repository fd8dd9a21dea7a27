"""`lmcore train --strategy`: equal to one process on any number of ranks, and resumed from any checkpoint."""

import shutil

import pytest
import torch
from parallel_runs import Trainers, small_config

from lmcore.checkpoint import read_checkpoint, read_weights
from lmcore.config import CorpusConfig, replace
from lmcore.data import open_or_prepare
from lmcore.distributed import world
from lmcore.distributed.watch import by_other_rank
from lmcore.errors import UserError
from lmcore.run import RunFolder
from lmcore.train import train

STRATEGIES = ("ddp", "zero1", "fsdp", "torch-ddp", "torch-fsdp2")
LAUNCHED = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}


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
def alone(tmp_path_factory):
    """The same run by one process, which trains it once."""
    runs = {}

    def trained(config):
        key = repr(replace(config, checkpoints="whole"))
        if key not in runs:
            runs[key] = RunFolder(tmp_path_factory.mktemp("alone") / "run")
            assert train(config, runs[key]).state == "complete"
        return runs[key]

    return trained


def complete(ended, steps=12) -> None:
    assert [(e.code, e.sentence) for e in ended] == [(0, "")] * len(ended), ended
    assert {e.result.state for e in ended} == {"complete"}
    assert {e.result for e in ended} == {ended[0].result}
    assert ended[0].result.step == steps


def same_run(run: RunFolder, other: RunFolder, rtol=1e-4, weights=(1e-3, 2e-5)) -> None:
    """Equal lines of metrics and equal weights, up to the order of sums."""
    for line, expected in zip(run.metrics_lines(), other.metrics_lines(), strict=True):
        assert (line["step"], line["tokens"]) == (expected["step"], expected["tokens"])
        for key in ("train_loss", "valid_loss", "grad_norm", "valid_accuracy"):
            if expected.get(key) is not None:
                assert line[key] == pytest.approx(expected[key], rel=rtol), key
    for path, expected_path in ((run.last_weights, other.last_weights), (run.best_weights, other.best_weights)):
        torch.testing.assert_close(
            read_weights(path)[0], read_weights(expected_path)[0], rtol=weights[0], atol=weights[1]
        )


def same_up_to_rounding(run: RunFolder, other: RunFolder) -> None:
    """Equal up to the rounding of bfloat16; the weights are float32, not what was computed with."""
    for line, expected in zip(run.metrics_lines(), other.metrics_lines(), strict=True):
        assert line["train_loss"] == pytest.approx(expected["train_loss"], rel=5e-3)
        assert line["grad_norm"] == pytest.approx(expected["grad_norm"], rel=3e-2)
        assert line.get("valid_accuracy") == pytest.approx(expected.get("valid_accuracy"), abs=0.02)
    found, expected = read_weights(run.last_weights)[0], read_weights(other.last_weights)[0]
    for name in expected:
        assert (found[name] - expected[name]).norm() < 0.05 * expected[name].norm(), name
        assert found[name].bfloat16().float().ne(found[name]).any(), name


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


EXPLICIT = {"ops": "fused", "model__d_model": 24, "model__d_ff": 48}
TIED = {"model__tie_embeddings": True}
CASES = [
    # written with this strategy, in this form, on so many ranks; read with this one, on so many; other settings
    ("zero1", "sharded", 3, "fsdp", 2, {}),
    ("fsdp", "sharded", 3, "torch-fsdp2", 2, TIED | {"eval_details": True}),
    ("torch-fsdp2", "sharded", 2, "zero1", 3, {"sampling": "epoch", "z_loss": 1e-3}),
    ("none", "sharded", 1, "torch-ddp", 2, {"model__checkpoint_every": 1}),
    ("torch-fsdp2", "whole", 3, "fsdp", 2, TIED),
    ("zero1", "sharded", 2, "zero1", 3, {"optimizer__name": "muon"}),
    ("fsdp", "whole", 2, "none", 1, {"optimizer__name": "sgd", "optimizer__max_grad_norm": None}),
    ("ddp", "whole", 2, "zero1", 3, EXPLICIT | {"teacher": "alone", "optimizer__max_grad_norm": 0.3}),
    ("ddp", "whole", 2, "none", 1, EXPLICIT | TIED | {"optimizer__name": "muon"}),
    ("zero1", "sharded", 3, "none", 1, EXPLICIT | TIED | {"model__num_layers": 4}),
    ("fsdp", "sharded", 3, "ddp", 2, EXPLICIT | {"model__vocab_size": 301, "compile": True}),
    ("fsdp", "sharded", 2, "fsdp", 3, EXPLICIT | TIED | {"model__num_layers": 4, "model__checkpoint_every": 1}),
]


@pytest.mark.parametrize(("writer", "form", "ranks", "reader", "others", "changes"), CASES)
def test_it_trains_what_one_process_trains(
    trainers, data, alone, tmp_path, writer, form, ranks, reader, others, changes
):
    """Undisturbed, and resumed with another strategy on another number of ranks."""
    if "teacher" in changes:
        changes |= {"teacher": str(alone(small_config(data)).path)}
    run, config = RunFolder(tmp_path / "run"), small_config(data, checkpoints=form, **changes)
    straight = alone(config)

    def trained(strategy, count):
        if strategy == "none":
            assert train(config, run).state == "complete"
            return ""
        ended = trainers.train(replace(config, strategy=strategy), run.path, count)
        complete(ended)
        assert not any(e.printed for e in ended[1:])
        same_run(run, straight)
        return ended[0].printed

    assert "does not cover" not in trained(writer, ranks)
    assert [path.suffix for path in run.checkpoints()] == [".pt" if form == "whole" else ".sharded"] * 3
    assert not list(run.checkpoint_folder.glob(".*"))
    back_to(run, 8)
    printed = trained(reader, others)
    assert reader == "none" or "resuming from step 8" in printed
    same_run(run, straight)


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


@pytest.mark.parametrize(
    ("strategy", "changes"), [("fsdp", {}), ("torch-fsdp2", {}), ("zero1", EXPLICIT), ("fsdp", EXPLICIT)]
)
def test_bf16_is_that_of_one_process_up_to_its_rounding(trainers, data, alone, tmp_path, strategy, changes):
    """Where compute weights are bf16 copies, the float32 parameters that are saved come from their owners."""
    config, run = small_config(data, precision="bf16", eval_details=True, **changes), RunFolder(tmp_path / "run")
    complete(trainers.train(replace(config, strategy=strategy), run.path, 2))
    same_up_to_rounding(run, alone(config))


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
    run, config = tmp_path / "run", small_config(data, strategy="ddp", steps=3)
    odd = trainers.train(replace(config, batch_size=13), run, 2)
    assert refused(odd) == (0, "batch_size (13) must divide by the number of ranks, 2.")
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
    assert "has 0 GPUs for 2 ranks, and each" in refused(trainers.train(replace(config, device="cuda"), run, 2))[1]
    assert "Ranks train on a GPU each or on CPUs" in refused(trainers.train(replace(config, device="mps"), run, 2))[1]
    assert not run.exists() or not any(run.rglob("*.json"))
    complete(trainers.train(config, run, 2), 3)
    assert "made with other settings: seed" in refused(trainers.train(replace(config, seed=1), run, 2))[1]
    with RunFolder(run).lock():
        assert "Another process is using the run folder" in refused(trainers.train(config, run, 2))[1]
    complete(trainers.train(config, run, 3), 3)  # it is complete already


def test_a_forgotten_parallel_is_said_once(monkeypatch, data):
    for name, value in (LAUNCHED | {"TORCHELASTIC_RUN_ID": "x"}).items():
        monkeypatch.setenv(name, value)
    sentence = "torchrun started 2 processes, but the run is not parallel: add --strategy ddp"
    with pytest.raises(UserError, match=sentence), world.joined(small_config(data)):
        pass
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr("lmcore.distributed.world.SECONDS_TO_SAY", 0)
    with pytest.raises(SystemExit) as silent, world.joined(small_config(data)):
        pass
    assert silent.value.code == 2


def test_what_a_strategy_does_not_cover(data):
    for strategy, changes, what in (
        ("fsdp", {"optimizer__name": "muon"}, "optimizer.name=muon, which needs whole matrices"),
        ("torch-fsdp2", {"precision": "fp16"}, "precision=fp16, whose loss scaling needs whole gradients"),
        ("fsdp", {"compile": True}, "compile with ops=plain"),
        ("fsdp", {"model__checkpoint_every": 1}, "model.checkpoint_every=1 with ops=plain"),
    ):
        with pytest.raises(UserError, match=f"^strategy={strategy} does not cover {what}; choose another --strategy.$"):
            small_config(data, strategy=strategy, **changes)


def test_a_damaged_sharded_checkpoint_is_noticed(trainers, data, alone, tmp_path):
    """The part that rank 1 wrote has a flipped bit: the checkpoint before it is used."""
    run, config = RunFolder(tmp_path / "run"), small_config(data, strategy="fsdp", checkpoints="sharded")
    complete(trainers.train(config, run.path, 2))
    back_to(run, 8)
    part = next(run.checkpoint_file(8, sharded=True).glob("__1_*.distcp"))
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(content)
    ended = trainers.train(config, run.path, 2)
    complete(ended)
    assert "step_00000008.sharded is not a whole checkpoint" in ended[0].printed
    assert "resuming from step 4" in ended[0].printed
    same_run(run, alone(small_config(data)))


@pytest.mark.fault("variables of a launcher", "refused_in_words")
@pytest.mark.parametrize("strategy", ["none", "ddp"])
@pytest.mark.parametrize("which", ["", "LOCAL_"])
@pytest.mark.parametrize(
    "rank_and_size", ["x of 2", "-1 of 2", "5 of 2", "2 of 2", "0 of 0", "0 of -1", "0 of x", "0 of "]
)
def test_variables_of_a_launcher_that_make_no_sense(monkeypatch, data, rank_and_size, which, strategy):
    rank, size = rank_and_size.split(" of ")
    launched = LAUNCHED | {"TORCHELASTIC_RUN_ID": "x", "MASTER_PORT": "1"}
    for name, value in (launched | {f"{which}RANK": rank, f"{which}WORLD_SIZE": size}).items():
        monkeypatch.setenv(name, value)
    sentence = f"^{which}RANK is '{rank}' and {which}WORLD_SIZE is '{size}': "
    with pytest.raises(UserError, match=sentence), world.joined(small_config(data, strategy=strategy)):
        pass


@pytest.mark.fault("variables of a launcher", "refused_in_words")
def test_a_port_that_is_none(monkeypatch, data):
    for name, value in (LAUNCHED | {"MASTER_PORT": "x"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=r"^The 2 ranks did not meet at .*:x"):
        world.join(small_config(data, strategy="ddp"))


@pytest.mark.parametrize(
    ("error", "by_another"),
    [
        (RuntimeError("Application timeout caused pair closure"), True),  # gloo's, of a rank that hangs
        (RuntimeError("[/x/gloo/transport/tcp/pair.cc:534] Connection closed by peer"), True),
        (RuntimeError("NCCL communicator was aborted"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (UserError("Connection of what is the user's"), False),
    ],
)
def test_which_errors_are_of_another_rank(error, by_another):
    assert by_other_rank(error) == by_another
