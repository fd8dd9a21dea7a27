import io

import pytest
import torch

from lmcore.checkpoint import digest, load_checkpoint, load_model, read_checkpoint, save_checkpoint, save_weights
from lmcore.config import ModelConfig
from lmcore.errors import UserError
from lmcore.functional import cross_entropy
from lmcore.model import TransformerLM
from lmcore.optimizer import SGD, AdamW

SMALL = {"vocab_size": 31, "context_length": 8, "d_model": 16, "num_layers": 2, "num_heads": 2, "d_ff": 24}


def trained(steps: int = 3, seed: int = 0, **switches):
    torch.manual_seed(seed)
    model = TransformerLM(ModelConfig(**SMALL | switches))
    optimizer = AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        step(model, optimizer)
    return model, optimizer


def step(model, optimizer):
    ids = torch.arange(16).reshape(2, 8) % 31
    optimizer.zero_grad()
    cross_entropy(model(ids), ids).backward()
    optimizer.step()


def equal(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    there = b.state_dict()
    return all(torch.equal(value, there[key]) for key, value in a.state_dict().items())


def test_round_trip_through_a_file_object_goes_on_bitwise():
    (model, optimizer), out = trained(), io.BytesIO()
    save_checkpoint(model, optimizer, 3, out)
    out.seek(0)
    other, other_optimizer = trained(steps=1, seed=1)
    assert not equal(model, other)
    assert load_checkpoint(out, other, other_optimizer) == 3
    assert equal(model, other)
    step(model, optimizer)
    step(other, other_optimizer)
    assert equal(model, other)


def test_a_checkpoint_that_is_cut_or_has_a_flipped_bit_is_refused_and_nothing_is_touched(tmp_path):
    model, optimizer = trained()
    path = tmp_path / "c.pt"
    save_checkpoint(model, optimizer, 3, path)
    whole, before, sound = path.read_bytes(), digest(model.state_dict()), digest(read_checkpoint(path))
    for length in (0, 1, 100, len(whole) // 2, len(whole) - 100):
        path.write_bytes(whole[:length])
        with pytest.raises(UserError, match=r"c\.pt is not a whole checkpoint"):
            load_checkpoint(path, model, optimizer)
        assert digest(model.state_dict()) == before
    found = 0
    for position in range(0, len(whole), 997):
        damaged = bytearray(whole)
        damaged[position] ^= 0x10
        path.write_bytes(damaged)
        try:
            assert digest(read_checkpoint(path)) == sound  # a byte of padding
        except UserError:
            found += 1
    assert found > 10


def test_a_digest_is_of_names_types_shapes_and_nesting():
    ones = torch.ones(2, 3)
    contents = [
        {"a": ones}, {"b": ones}, {"a": ones.view(3, 2)}, {"a": ones.view(torch.int32)}, {"a": ones.double()},
        {"a": {"a": ones}}, [ones], [[1], 2], [[1, 2]], [1, [2]], [1, 2], [1, "2"], [1, 2.0], {1: 2}, {"1": 2},
    ]  # fmt: skip
    assert len({digest(content) for content in contents}) == len(contents)


def test_foreign_files_are_refused(tmp_path):
    model, optimizer = trained()
    path = tmp_path / "c.pt"
    with pytest.raises(UserError, match="There is no checkpoint"):
        load_checkpoint(path, model, optimizer)
    for content, sentence in (
        ({"model": model.state_dict()}, "was not written by lmcore"),
        ({"lmcore_format": 1}, "checkpoint format 1; this version reads 2"),
        ({"lmcore_format": 2, "digest": digest({"iteration": 3}), "iteration": 3}, "was not written by lmcore"),
        (torch.nn.Linear, "not a whole checkpoint"),  # would run code if it were unpickled freely
    ):
        torch.save(content, path)
        with pytest.raises(UserError, match=sentence):
            load_checkpoint(path, model, optimizer)


def test_another_architecture_is_refused_by_the_fields_that_differ(tmp_path):
    model, optimizer = trained()
    save_checkpoint(model, optimizer, 3, tmp_path / "c.pt")
    layer = torch.nn.Linear(3, 2)
    for other, its_optimizer, sentence in (
        (*trained(d_ff=32, norm="post"), r"d_ff \(24 there, 32 here\), norm \(pre there, post here\)"),
        (model, AdamW([{"params": [p]} for p in model.parameters()]), "another optimizer"),
        (model, SGD(model.parameters()), "another optimizer"),
        (layer, SGD(layer.parameters()), "another architecture"),
    ):
        with pytest.raises(UserError, match=sentence):
            load_checkpoint(tmp_path / "c.pt", other, its_optimizer)


@pytest.mark.parametrize("tied", [False, True])
def test_weights_alone(tmp_path, tied):
    model, _ = trained(tie_embeddings=tied)
    save_weights(model, tmp_path / "w.safetensors", step=3)
    loaded = load_model(tmp_path / "w.safetensors")
    assert equal(model, loaded)
    assert loaded.config == model.config
    assert (loaded.lm_head.weight is loaded.token_embeddings.weight) == tied
    whole = (tmp_path / "w.safetensors").read_bytes()
    flipped = whole[:-5] + bytes([whole[-5] ^ 1]) + whole[-4:]
    for content, sentence in ((whole[:-5], "not a whole safetensors file"), (flipped, "damaged")):
        (tmp_path / "w.safetensors").write_bytes(content)
        with pytest.raises(UserError, match=sentence):
            load_model(tmp_path / "w.safetensors")
