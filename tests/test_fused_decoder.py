"""The decoder with a static cache: the tokens of plain `generate`, row by row, and its own rules."""

import dataclasses
import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcore.config import GenerateConfig, ModelConfig, model_config
from lmcore.device import autocast
from lmcore.errors import UserError
from lmcore.fast.decoder import FusedDecoder, unsupported_reason
from lmcore.generate import generate
from lmcore.model import TransformerLM

CONTEXT, VOCAB = 12, 67
CPU = torch.device("cpu")


def build(seed: int = 0, device: torch.device = CPU, **changes) -> TransformerLM:
    torch.manual_seed(seed)
    sizes = {"vocab_size": VOCAB, "context_length": CONTEXT, "d_model": 48, "num_layers": 2, "num_heads": 2, "d_ff": 40}
    return TransformerLM(ModelConfig(**sizes | changes)).to(device)


PROMPTS = [[1, 2, 3], [9], list(range(20, 20 + CONTEXT)), [4] * (CONTEXT - 1), [60, 50, 3, 50, 60]]
GREEDY = GenerateConfig(max_new_tokens=40, temperature=0)


def assert_same(model, prompts, config, eot_id=None, num_ids=None) -> list[list[int]]:
    """Plain operations and the fused decoder give the same tokens, which are returned, and tell `on_token` the same."""
    results = []
    for ops in ("plain", "fused"):
        told = []
        tell = partial(lambda told, *token: told.append(token), told)
        results.append((generate(model, prompts, dataclasses.replace(config, ops=ops), eot_id, tell, num_ids), told))
    assert results[0] == results[1]
    return results[0][0]


@settings(deadline=None, max_examples=20)
@given(
    lengths=st.lists(st.integers(1, CONTEXT), min_size=1, max_size=5),
    seed=st.integers(0, 1000),
    choice=st.sampled_from([{"temperature": 0}, {"top_k": 7, "temperature": 0.7}, {"top_p": 0.8, "top_k": 50}]),
    num_ids=st.sampled_from([None, 61, 1000]),
    max_new_tokens=st.integers(1, 50),
    context=st.integers(1, CONTEXT),
    changes=st.sampled_from([{}, {"tie_embeddings": True}, {"dropout": 0.5}, {"attention": "sdpa"}]),
)
def test_tokens_are_those_of_plain_decoding(device, lengths, seed, choice, num_ids, max_new_tokens, context, changes):
    """Of any batch, also beyond the context, where rows are placed anew; more ids than the vocabulary are all of it."""
    numbers = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(0, VOCAB, (min(n, context),), generator=numbers).tolist() for n in lengths]
    config = GenerateConfig(max_new_tokens=max_new_tokens, seed=seed, **choice)
    model = build(1, device, context_length=context, **changes)
    assert_same(model, prompts, config, 3, num_ids)
    assert model.training


@pytest.mark.parametrize("norm", ["ln1", "ln2", "ln_final"])
def test_weights_of_norms_are_part_of_the_decoder(norm):
    """A fresh model's are all 1, and would not be missed."""
    model = build()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if norm in name:
                p.copy_(torch.linspace(-1, 2, p.numel()))
    assert_same(model, PROMPTS, GREEDY)


def test_what_it_does_not_cover_is_decoded_plainly_and_said_once(capsys):
    assert_same(build(norm="post", position="sinusoidal"), PROMPTS, GREEDY)
    said = capsys.readouterr()
    assert said.out == ""  # which belongs to the text
    assert said.err.count("\n") == 1
    assert "norm=post, position=sinusoidal" in said.err
    grouped = build(num_kv_heads=1, norm_eps=1e-6).config
    assert unsupported_reason(grouped, torch.bfloat16) == "num_kv_heads=1, norm_eps=1e-06"
    assert unsupported_reason(build(dropout=0.5, checkpoint_every=1).config, torch.bfloat16) is None


def test_the_decoder_works_in_the_precision_that_is_asked_for(capsys):
    model, config = build(), GenerateConfig(max_new_tokens=20, temperature=0, ops="fused")
    with autocast(CPU, "bf16"):
        rows = generate(model, PROMPTS, config)
    assert [len(row) for row in rows] == [20] * len(PROMPTS)
    assert generate(model, PROMPTS, dataclasses.replace(config, precision="bf16")) == rows
    assert "".join(capsys.readouterr()) == ""
    generate(model, PROMPTS, dataclasses.replace(config, precision="fp16"))
    assert "does not cover precision=fp16." in capsys.readouterr().err


def test_nothing_to_do_and_bad_input():
    config, decoder = GenerateConfig(ops="fused"), FusedDecoder(build(), 1, 4, torch.float32)
    assert generate(build(), [], config) == []
    for call in (
        lambda: generate(build(), [[]], config),
        lambda: generate(build(), [[1]], dataclasses.replace(config, kv_cache=False)),
        lambda: generate(build(), [[1]], config, num_ids=0),
        lambda: generate(build(), [[1]], dataclasses.replace(config, ops="plain"), num_ids=0),
        lambda: FusedDecoder(build(norm="none"), 1, 4, torch.float32),
        lambda: FusedDecoder(build(), 1, CONTEXT + 1, torch.float32),
        lambda: decoder.place([0], [[]]),
        lambda: decoder.place([0], [[1] * 5]),  # beyond the slots
        lambda: decoder.decode(65),
        lambda: FusedDecoder(build(), 1, 4, torch.float32, GenerateConfig()).decode(1),  # without uniforms
    ):
        with pytest.raises(UserError):
            call()


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_logits_that_are_not_finite_are_refused_after_the_tokens_before_them(temperature):
    model = build()
    config = GenerateConfig(max_new_tokens=30, temperature=temperature, ops="fused")
    fine = generate(model, [[1]], config)[0]
    model.token_embeddings.weight.data[fine[5]] = math.nan  # comes in when this token is the last for the first time
    first = fine.index(fine[5])
    told = []
    with pytest.raises(UserError, match="NaN or infinity"):
        generate(model, [[1]], config, on_token=lambda row, token: told.append(token))
    assert told[: first + 1] == fine[: first + 1]
    assert len(told) == first + 1


def test_a_row_that_has_ended_may_break_without_harm():
    """What a row says after its end is nobody's business, NaN included."""
    model = build()
    free = generate(model, PROMPTS, GREEDY)
    eot = free[0][0]
    model.token_embeddings.weight.data[eot] = math.nan
    prompts = [prompt for prompt in PROMPTS if eot not in prompt]
    assert assert_same(model, prompts, GREEDY, eot_id=eot)[0] == []


# ---------------------------------------------------------------------------------------------- on the GPU


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 3, 8, 33])
def test_logits_on_the_gpu_in_bfloat16(rows):
    model = TransformerLM(model_config("small", context_length=512, num_layers=3), device="cuda")
    decoder = FusedDecoder(model, rows, 512, torch.bfloat16)
    prompts = torch.randint(0, 10_000, (rows, 300)).tolist()
    decoder.place(list(range(rows)), prompts)
    tokens = decoder.decode(100).T.tolist()
    windows = torch.tensor([prompt + row[:-1] for prompt, row in zip(prompts, tokens, strict=True)], device="cuda")
    with torch.no_grad():
        exact = model(windows)[:, -1]
    assert ((decoder._logits - exact).norm() / exact.norm()).item() < 0.02
