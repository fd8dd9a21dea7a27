"""Accounting formulas against the built model, PyTorch's FLOP counter and hand-worked numbers."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_strategies import model_configs
from torch.utils.flop_counter import FlopCounterMode

from lmcore import accounting
from lmcore.config import ModelConfig, model_config, replace
from lmcore.model import TransformerLM

ANSWERS = json.loads((Path(__file__).parents[1] / "results/h200/answers.json").read_text(encoding="utf-8"))["01_build"]


def meta_model(config: ModelConfig) -> TransformerLM:
    return TransformerLM(config, device="meta")


@settings(max_examples=40, deadline=None)
@given(model_configs())
def test_parameters_equal_the_built_model_by_component(config):
    model = meta_model(config)
    built = dict.fromkeys(accounting.parameter_counts(config), 0)
    for name, parameter in model.named_parameters():  # names a tied matrix once, as token_embeddings
        component = {"attn": "attention", "ffn": "ffn", "ln1": "norms", "ln2": "norms", "ln_final": "norms"}
        part = name.split(".")[2] if name.startswith("layers.") else name.split(".")[0]
        part = "norms" if "_norm" in name else part  # of queries and keys
        built[component.get(part, part)] += parameter.numel()
    assert accounting.parameter_counts(config) == built
    assert accounting.num_parameters(config) == sum(p.numel() for p in model.parameters())


@settings(max_examples=35, deadline=None)
@given(model_configs(), st.integers(1, 3), st.data())
def test_flops_equal_pytorchs_counter(config, batch_size, data):
    seq_len = data.draw(st.integers(1, config.context_length))
    with FlopCounterMode(display=False) as forward:
        logits = meta_model(config)(torch.zeros(batch_size, seq_len, dtype=torch.long, device="meta"))
    with FlopCounterMode(display=False) as backward:
        logits.sum().backward()
    assert accounting.forward_flops(config, batch_size, seq_len) == forward.get_total_flops()
    both = forward.get_total_flops() + backward.get_total_flops()
    assert accounting.training_flops(config, batch_size, seq_len) == both


def says(problem: str, *numbers: str) -> bool:
    """Whether a committed answer of notebook 01 has all of these words."""
    text = " ".join(ANSWERS[problem]["text"].split())
    return all(number in text for number in numbers)


def test_cs336_2026_worked_by_hand():
    """GPT-2 XL by CS336's handout of 2026: SwiGLU of width 4,288, one H100; the sums that a student does on paper."""
    config = model_config("xl", vocab_size=50_257, context_length=1024, d_ff=4288)
    embedding = 50_257 * 1600  # and as many in the LM head
    block = 4 * 1600 * 1600 + 3 * 1600 * 4288 + 2 * 1600  # Q, K, V, O; W1, W2, W3; two norms
    parameters = embedding + 48 * block + 1600 + embedding
    assert parameters == 1_640_452_800 == accounting.num_parameters(config)
    assert 4 * parameters == 6_561_811_200
    assert says("transformer_accounting (a, CS336)", f"{parameters:,} trainable parameters", "6.56 GB")

    qkv = 48 * 3 * 2 * 1024 * 1600 * 1600
    pairs = 2 * 48 * 25 * 2 * 1024 * 64 * 1024  # scores and weighted sums
    output = 48 * 2 * 1024 * 1600 * 1600
    ffn = 48 * 3 * 2 * 1024 * 1600 * 4288
    head = 2 * 1024 * 1600 * 50_257
    forward = qkv + pairs + output + ffn + head
    assert forward == 3_516_769_894_400 == accounting.forward_flops(config)
    parts = {"qkv_proj": qkv, "scores": pairs // 2, "weighted_sum": pairs // 2, "output_proj": output, "ffn": ffn}
    assert accounting.forward_flops_by_component(config) == parts | {"lm_head": head}
    assert says("transformer_accounting (b, CS336)", f"{forward:,} FLOPs")
    assert [round(100 * part / forward, 1) for part in (ffn, qkv, pairs, output, head)] == [57.5, 21.5, 9.2, 7.2, 4.7]
    shares = "networks 57.5%", "Q, K, V projections 21.5%", "sums 9.2%", "output projections 7.2%", "LM head 4.7%"
    assert says("transformer_accounting (c, CS336)", *shares)

    longer = 16 * (qkv + output + ffn + head) + 256 * pairs
    assert longer == accounting.forward_flops(replace(config, context_length=16_384))
    assert (round(longer / forward, 1), round(100 * 256 * pairs / longer, 1)) == (38.0, 61.7)
    assert says("transformer_accounting (e, CS336)", "38.0 times", "from 9.2% to 61.7%")

    tokens, logits = 1024, 1024 * 50_257
    # 8 streams; W1, SiLU, W3 and their product; scores and softmax
    block = 8 * tokens * 1600 + 4 * tokens * 4288 + 2 * 25 * tokens**2
    activations = 4 * (48 * block + tokens * 1600 + 2 * logits)
    assert activations == 16_373_391_360
    assert 16 * parameters == 26_247_244_800
    # three take 75.4 GB; four would take 91.7
    assert says("adamw_accounting (b, CS336)", "16.37 GB", "26.25 GB", "**3**")
    assert sum(accounting.ADAMW_FLOPS.values()) == 14
    assert says("adamw_accounting (c, CS336)", "14 for each parameter")

    seconds = 3 * forward * 1024 * 400_000 / (0.5 * 495e12)
    assert seconds / 3600 == pytest.approx(4850, abs=1)
    assert says("adamw_accounting (d, CS336)", f"**{seconds / 3600:,.0f} hours.**")


def test_cs336_2026_smaller_models_by_hand():
    """The multiple of 64 nearest to 8/3 of 768, 1,024, 1,280 and 1,600: 32, 42.67, 53.33 and 66.67 times 64."""
    sizes = {"small": (12, 768, 2048), "medium": (24, 1024, 2752), "large": (36, 1280, 3392), "xl": (48, 1600, 4288)}
    assert [d_ff // 64 for *_, d_ff in sizes.values()] == [32, 43, 53, 67]
    shares = []
    for size, (layers, d_model, d_ff) in sizes.items():
        per_token = layers * (8 * d_model**2 + 4 * 1024 * d_model + 6 * d_model * d_ff) + 2 * d_model * 50_257
        config = model_config(size, vocab_size=50_257, context_length=1024, d_ff=d_ff)
        assert accounting.forward_flops(config) == 1024 * per_token
        shares.append(layers * 6 * d_model * d_ff / per_token)
    row = next(
        row for row in ANSWERS["transformer_accounting (d, CS336)"]["text"].splitlines() if "feed-forward" in row
    )
    assert row.replace(" ", "").split("|")[2:6] == [f"{share:.1%}" for share in shares]


def test_cse599o_worked_by_hand():
    """GPT-2 XL by CSE599-O's handout: width 6,400; for AdamW a shorter list of activations, one A100 in float32."""
    layers, d_model, d_ff, heads, vocab, context = 48, 1600, 6400, 25, 50_257, 1024
    config = model_config("xl", vocab_size=vocab, context_length=context)
    per_block = 4 * d_model**2 + 3 * d_model * d_ff + 2 * d_model
    parameters = 2 * vocab * d_model + layers * per_block + d_model
    assert accounting.num_parameters(config) == parameters
    assert says("transformer_accounting (a, CSE599-O)", f"{parameters:,} trainable parameters")
    pairs = 2 * heads * 2 * context * context * (d_model // heads)
    block = 4 * 2 * context * d_model**2 + pairs + 3 * 2 * context * d_model * d_ff
    forward = layers * block + 2 * context * d_model * vocab
    assert accounting.forward_flops(config) == forward
    assert says("transformer_accounting (b, CSE599-O)", f"{forward:,} FLOPs")
    plain = replace(config, ffn="silu")
    stream, pairs, logits = 1024 * 1600, 25 * 1024**2, 1024 * 50_257
    # two norms, q k v, weighted sum, output projection, W2: 8 streams; W1 and SiLU: 4 each
    activations = 48 * (16 * stream + 2 * pairs) + stream + 2 * logits
    assert sum(accounting.activation_counts(plain).values()) == activations
    assert says("adamwAccounting (b, CSE599-O)", f"{4 * activations / 1e9:.2f} GB")
    assert says("adamwAccounting (b, CSE599-O)", f"{16 * parameters / 1e9:.2f} GB")
    seconds = 3 * forward * 1024 * 400_000 / (0.5 * 19.5e12)
    assert says("adamwAccounting (d, CSE599-O)", f"**{seconds / 86_400:,.0f} days.**")
