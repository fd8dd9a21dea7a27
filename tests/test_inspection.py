"""What notebook 01 measures and says: on models whose insides are known, and with numbers that change."""

import math

import pandas as pd
import pytest
import torch

from lmcore import accounting
from lmcore.config import ModelConfig, model_config, replace
from lmcore.errors import UserError
from lmcore.model import CausalMultiHeadSelfAttention, TransformerLM
from lmcore.tokenizer import END_OF_TEXT
from lmcore.workbook.inspection import (
    attention_weights,
    attention_weights_of_layer,
    norms_by_layer,
    sample_text,
)
from lmcore.workbook.report.build import answers as build_answers
from lmcore.workbook.report.build import figures as build_figures
from lmcore.workbook.report.checks import agreement
from lmcore.workbook.report.figures import save_figure, use_style
from lmcore.workbook.report.source import show_source

TINY = ModelConfig(vocab_size=50, context_length=16, d_model=16, num_layers=2, num_heads=2, d_ff=24)


@pytest.fixture
def model() -> TransformerLM:
    torch.manual_seed(0)
    return TransformerLM(TINY)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(50, (3, 9), generator=torch.Generator().manual_seed(1))
    return ids[:, :-1], ids[:, 1:]


def test_norms_by_layer_measures_streams_and_gradients(model):
    inputs, targets = batch()
    table = norms_by_layer(model, inputs, targets)
    assert list(table["layer"]) == [0, 1, 2]
    embedded = model.token_embeddings(inputs)
    assert table["activation_rms"][0] == pytest.approx(embedded.square().mean().sqrt().item())
    assert all(p.grad is None for p in model.parameters())
    torch.nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()
    squares = sum(p.grad.square().sum().item() for p in model.layers[0].parameters())
    assert table["gradient_norm"][1] == pytest.approx(math.sqrt(squares), rel=1e-4)


def test_attention_weights_are_the_shares_that_attention_uses():
    torch.manual_seed(0)
    attention = CausalMultiHeadSelfAttention(16, 2)
    x = torch.randn(7, 16)
    weights = attention_weights(attention, x)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 7))
    assert (weights.triu(1) == 0).all()
    values = attention.v_proj(x).view(7, 2, 8).transpose(0, 1)
    mixed = (weights @ values).transpose(0, 1).reshape(7, 16)
    torch.testing.assert_close(attention.output_proj(mixed), attention(x))


def test_attention_weights_of_layer_sees_the_layers_input(model):
    token_ids = batch()[0][0]
    x = model.layers[0](model.token_embeddings(token_ids))
    expected = attention_weights(model.layers[1].attn, model.layers[1].ln1(x))
    torch.testing.assert_close(attention_weights_of_layer(model, token_ids, 1), expected)
    with pytest.raises(UserError, match=r"layer must be from 0 to 1, not 2\.$"):
        attention_weights_of_layer(model, token_ids, 2)


def test_sample_text(embedded_data):
    text = sample_text("embedded", 2000)
    assert 2000 <= len(text) < 4000
    assert text.endswith(END_OF_TEXT)
    assert sample_text(embedded_data, 500) == text[:500]


def test_agreement_says_what_it_found():
    ours, theirs = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0 + 1e-6])
    assert agreement(ours, ours, "itself").sentence == "It agrees with itself exactly."
    close = agreement(ours, theirs, "the other")
    assert repr(close) == "the other: max |difference| below 1e-05: True (shape 2)"
    assert "the largest difference is $" in close.sentence
    for far in (torch.tensor([1.0, 2.1]), torch.tensor([1.0, math.nan])):
        check = agreement(far, theirs, "the other")
        assert "False" in repr(check)
        assert "does **not** agree" in check.sentence
    with pytest.raises(UserError, match="differ"):
        agreement(ours, torch.ones(3), "another shape")


def test_show_source_shows_the_code_itself():
    code = show_source(agreement)
    assert "def agreement(" in code.data
    assert 'class="highlight"' in code._repr_html_()  # by which the writeup leaves code out


def test_answers_follow_the_numbers():
    xl, small = accounting.gpt2_config("xl"), accounting.gpt2_config("small")
    answers = [
        build_answers.parameters_answer,
        build_answers.multiplies_table,
        build_answers.largest_answer,
        lambda config: build_answers.batch_answer(config, 80e9),
        lambda config: build_answers.adamw_flops_answer(config, 8),
        lambda config: build_answers.days_answer(config, 8, 1000, 1e14, 0.5),
        lambda config: build_answers.context_answer(config, replace(config, context_length=2048)),
    ]
    for sentence in answers:
        assert sentence(xl) != sentence(small)
    assert f"{accounting.num_parameters(small):,}" in build_answers.parameters_answer(small)
    assert f"{accounting.forward_flops(small):,}" in build_answers.multiplies_table(small)
    assert "Not even one sequence fits" in build_answers.batch_answer(xl, 1e9)


def test_largest_answer_names_the_largest():
    wide = model_config("smoke", d_ff=10_000, vocab_size=50)
    large_vocabulary = model_config("smoke", vocab_size=1_000_000)
    assert "Most FLOPs go to the feed-forward network" in build_answers.largest_answer(wide)
    assert "Most FLOPs go to the output layer" in build_answers.largest_answer(large_vocabulary)


def test_trend_answer_tells_rising_from_falling():
    growing = {"narrow": model_config("smoke", d_model=32), "wide": model_config("smoke", d_model=128)}
    shrinking = dict(reversed(growing.items()))
    more, less = (build_answers.trend_answer(configs) for configs in (growing, shrinking))
    assert "more goes to the Q, K, V projections" in more
    assert "less to the Q, K, V projections" in less


def test_memory_algebra_has_every_kind_and_component():
    text = build_answers.memory_algebra(accounting.gpt2_config("xl", ffn="silu"))
    for words in ("parameters", "gradients", "optimizer state", "activations", "total", "softmax", "cross-entropy"):
        assert words in text


def test_figures_are_drawn_and_the_same_every_time(tmp_path, model):
    use_style()
    inputs, targets = batch()
    rope = model.layers[0].attn.rope
    q = torch.ones(8)
    weights = attention_weights_of_layer(model, inputs[0], 0)
    shares = build_answers.flop_shares({"a": TINY, "b": replace(TINY, context_length=512)})
    curve = pd.DataFrame({"vocab_size": [257, 300], "bytes_per_token": [1.0, 1.5]})
    draw = {
        "compression": lambda: build_figures.compression_figure(curve, {"another": 4.2}),
        "silu": build_figures.silu_figure,
        "rope": lambda: build_figures.rope_figure(rope, q, q, (0, 2, 5)),
        "attention": lambda: build_figures.attention_figure({"head": weights[0]}, ["a"] * 8),
        "initialization": lambda: build_figures.initialization_figure({"lm_head": (model.lm_head.weight, 0.17)}),
        "norms": lambda: build_figures.norms_figure({"pre": norms_by_layer(model, inputs, targets)}, logarithmic=True),
        "one_batch": lambda: build_figures.one_batch_figure({"a": [3.0, 2.0, 1.0]}, 4.0),
        "shares": lambda: build_figures.flop_shares_figure(shares),
        "memory": lambda: build_figures.memory_figure(TINY, [1, 2, 3], 1e6),
    }
    for name, figure in draw.items():
        files = [save_figure(figure(), tmp_path / f"{name}{n}.svg").read_bytes() for n in range(2)]
        assert files[0] == files[1], name
        assert len(files[0]) > 5000, name
