"""Evaluation: against sums by hand over the same windows, and against what is known of bytes, words and chance."""

import math

import numpy as np
import pytest
import torch

from lmcore.cli.application import main
from lmcore.config import ModelConfig, replace
from lmcore.data import open_data
from lmcore.errors import UserError
from lmcore.evaluate import evaluate, score
from lmcore.functional import cross_entropy
from lmcore.model import TransformerLM
from lmcore.train import train

TINY = ModelConfig(vocab_size=300, context_length=8, d_model=8, num_layers=1, num_heads=1, d_ff=8, dropout=0.5)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return TransformerLM(TINY)


def test_score_is_the_mean_over_windows_by_hand(model):
    tokens = np.random.default_rng(0).integers(0, 300, 60).astype(np.uint16)
    found = score(model, tokens, 3, torch.device("cpu"))
    assert model.training
    model.eval()
    windows = torch.from_numpy(tokens.astype(np.int64))[: 7 * 8 + 1]  # the last three tokens fill no window
    inputs, targets = windows[:-1].view(7, 8), windows[1:].view(7, 8)
    with torch.no_grad():
        logits = model(inputs)
    assert found.tokens == 56
    assert found.loss == pytest.approx(cross_entropy(logits, targets).item(), rel=1e-6)
    assert found.accuracy == (logits.argmax(-1) == targets).float().mean().item()


def test_bytes_and_words_are_those_of_the_predicted_tokens(model, embedded_data):
    data = open_data(embedded_data)
    found = evaluate(model, data, batch_size=16)
    predicted = data.valid[1 : found.tokens + 1].tolist()
    text = data.tokenizer.decode(predicted)
    assert found.tokens == (len(data.valid) - 1) // 8 * 8
    assert found.bytes == len(text.replace("<|endoftext|>", "").encode())
    assert found.words == len(text.replace("<|endoftext|>", " ").split())
    nats = found.loss * found.tokens
    assert found.loss_per_byte * found.bytes == pytest.approx(nats)
    assert math.log(found.word_perplexity) * found.words == pytest.approx(nats)
    assert math.log(found.perplexity) == pytest.approx(found.loss)


def test_a_model_that_knows_the_next_token_is_always_right():
    model = TransformerLM(replace(TINY, norm="none", position="none", dropout=0.0))
    with torch.no_grad():
        for parameter in model.layers.parameters():
            parameter.zero_()
        embedding = torch.eye(300)[:, :8]
        model.token_embeddings.weight.copy_(embedding)
        model.lm_head.weight.copy_(50 * embedding.roll(1, 0))  # after i comes i + 1
    tokens = np.tile(np.arange(7), 20).astype(np.uint8)
    found = score(model, tokens, 4, torch.device("cpu"))
    follows = tokens[1 : found.tokens + 1] == tokens[: found.tokens] + 1  # not after the last, where it begins again
    assert found.accuracy == pytest.approx(follows.mean())


def test_bad_input(embedded_data):
    for changes, split, sentence in (
        ({}, "test", "A model is evaluated on valid or dev, not on 'test'."),
        ({"vocab_size": 50}, "valid", "The data has a vocabulary of 300, the model one of 50."),
        ({"context_length": 10**6}, "dev", r"\(dev part\) has only"),
    ):
        model = TransformerLM(replace(TINY, **changes, position="none"), device="meta")
        with pytest.raises(UserError, match=sentence):
            evaluate(model, open_data(embedded_data), split)


def test_the_command_prints_what_evaluate_finds(tmp_path, tiny_run, capsys):
    result = train(replace(tiny_run, steps=2, eval_batch_size=64), tmp_path / "run")
    assert main(["evaluate", str(tmp_path / "run"), "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert f"loss {result.valid_loss:.4f} nats per token" in said
    assert "word perplexity" in said
    assert main(["evaluate", str(tmp_path / "run"), "--device", "cpu", "--split", "dev"]) == 0
    assert "run on dev, which it has read: loss" in capsys.readouterr().out
