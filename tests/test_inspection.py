"""What notebook 01 measures, on models whose insides are known."""

import math

import pytest
import torch

from lmcore.config import ModelConfig
from lmcore.errors import UserError
from lmcore.model import CausalMultiHeadSelfAttention, TransformerLM
from lmcore.tokenizer import END_OF_TEXT
from lmcore.workbook.inspection import (
    attention_weights,
    attention_weights_of_layer,
    norms_by_layer,
    sample_text,
)
from lmcore.workbook.report.notebook import show_source

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


def test_show_source_shows_the_code_itself():
    code = show_source(sample_text)
    assert "def sample_text(" in code.data
    assert 'class="highlight"' in code._repr_html_()  # by which the writeup leaves code out
