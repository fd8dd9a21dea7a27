"""The course's adapters against plain PyTorch."""

import inspect
import io
import math

import adapters
import numpy as np
import pytest
import torch
from torch.nn import functional as F

D, HEADS, FF, SEQ, VOCAB = 8, 2, 16, 5, 11
GRADED = [
    "run_linear",
    "run_embedding",
    "run_swiglu",
    "run_scaled_dot_product_attention",
    "run_multihead_self_attention",
    "run_multihead_self_attention_with_rope",
    "run_rope",
    "run_transformer_block",
    "run_transformer_lm",
    "run_rmsnorm",
    "run_silu",
    "run_get_batch",
    "run_softmax",
    "run_cross_entropy",
    "run_gradient_clipping",
    "get_adamw_cls",
    "run_get_lr_cosine_schedule",
    "run_save_checkpoint",
    "run_load_checkpoint",
    "get_tokenizer",
    "run_train_bpe",
]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def heads(x):
    return x.unflatten(-1, (HEADS, -1)).transpose(-3, -2)


def rotate(x, positions, theta):
    """RoPE as multiplication of complex numbers."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    angles = positions[..., None] * theta ** (-torch.arange(0, x.shape[-1], 2) / x.shape[-1])
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)


def attend(x, q, k, v, o, theta=None):
    q, k, v = (heads(x @ weight.T) for weight in (q, k, v))
    if theta is not None:
        q, k = (rotate(each, torch.arange(x.shape[-2]), theta) for each in (q, k))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(-3, -2).flatten(-2) @ o.T


def block(x, w, theta):
    x = x + attend(
        F.rms_norm(x, (D,), w["ln1.weight"], 1e-5),
        *(w[f"attn.{n}_proj.weight"] for n in ("q", "k", "v", "output")),
        theta,
    )
    y = F.rms_norm(x, (D,), w["ln2.weight"], 1e-5)
    return x + (F.silu(y @ w["ffn.w1.weight"].T) * (y @ w["ffn.w3.weight"].T)) @ w["ffn.w2.weight"].T


def block_weights():
    shapes = {f"attn.{name}_proj.weight": (D, D) for name in ("q", "k", "v", "output")}
    shapes |= {"ln1.weight": (D,), "ln2.weight": (D,)}
    shapes |= {"ffn.w1.weight": (FF, D), "ffn.w2.weight": (D, FF), "ffn.w3.weight": (FF, D)}
    return {name: torch.randn(shape) / 2 for name, shape in shapes.items()}


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_every_adapter_of_the_course_is_there():
    assert [name for name in GRADED if not inspect.isfunction(getattr(adapters, name, None))] == []


def test_layers():
    x, w = torch.randn(2, SEQ, D), torch.randn(FF, D)
    close(adapters.run_linear(D, FF, w, x), x @ w.T)
    ids, table = torch.randint(VOCAB, (2, SEQ)), torch.randn(VOCAB, D)
    close(adapters.run_embedding(VOCAB, D, table, ids), table[ids])
    close(adapters.run_silu(x), F.silu(x))
    close(adapters.run_softmax(x + 1000, -2), F.softmax(x, -2))
    close(adapters.run_rmsnorm(D, 1e-3, w[0], x), F.rms_norm(x, (D,), w[0], 1e-3))
    w1, w2, w3 = torch.randn(FF, D), torch.randn(D, FF), torch.randn(FF, D)
    close(adapters.run_swiglu(D, FF, w1, w2, w3, x), (F.silu(x @ w1.T) * (x @ w3.T)) @ w2.T)
    logits, targets = torch.randn(6, VOCAB), torch.randint(VOCAB, (6,))
    close(adapters.run_cross_entropy(logits, targets), F.cross_entropy(logits, targets))


def test_attention():
    q, k, v = torch.randn(2, 3, SEQ, D), torch.randn(2, 3, 7, D), torch.randn(2, 3, 7, D)
    mask = torch.rand(SEQ, 7) < 0.6
    mask[:, 0] = True
    close(adapters.run_scaled_dot_product_attention(q, k, v, mask), F.scaled_dot_product_attention(q, k, v, mask))
    x, weights = torch.randn(2, SEQ, D), [torch.randn(D, D) / 2 for _ in range(4)]
    close(adapters.run_multihead_self_attention(D, HEADS, *weights, x), attend(x, *weights))
    positions = torch.arange(SEQ)
    rope = adapters.run_multihead_self_attention_with_rope(D, HEADS, 16, 1e4, *weights, x, positions[None])
    close(rope, attend(x, *weights, theta=1e4))
    close(adapters.run_rope(D, 1e4, 16, x, positions[None] + 3), rotate(x, positions + 3, 1e4))


def test_block_and_model():
    x, weights = torch.randn(2, SEQ, D), block_weights()
    close(adapters.run_transformer_block(D, HEADS, FF, 16, 1e4, weights, x), block(x, weights, 1e4))
    layers = [block_weights() for _ in range(2)]
    all_weights = {f"layers.{i}.{name}": value for i, layer in enumerate(layers) for name, value in layer.items()}
    embedding, head, norm = torch.randn(VOCAB, D), torch.randn(VOCAB, D), torch.randn(D)
    all_weights |= {"token_embeddings.weight": embedding, "lm_head.weight": head, "ln_final.weight": norm}
    ids = torch.randint(VOCAB, (2, SEQ))
    hidden = block(block(embedding[ids], layers[0], 1e4), layers[1], 1e4)
    ours = adapters.run_transformer_lm(VOCAB, 16, D, 2, HEADS, FF, 1e4, all_weights, ids)
    close(ours, F.rms_norm(hidden, (D,), norm, 1e-5) @ head.T)


def test_batches_and_schedule():
    inputs, targets = adapters.run_get_batch(np.arange(100), 32, 7, "cpu")
    assert inputs.shape == targets.shape == (32, 7)
    assert torch.equal(inputs + 1, targets)
    rates = [adapters.run_get_lr_cosine_schedule(it, 1.0, 0.1, 7, 21) for it in (0, 7, 14, 21, 30)]
    assert rates == pytest.approx([0, 1, 0.55, 0.1, 0.1])
    assert adapters.get_lr_cosine_schedule(3, 1.0, 0.1, 7, 21) == pytest.approx(3 / 7)


def handout_adamw(weights, steps, lr=1e-2, decay=0.1, betas=(0.9, 0.99), eps=1e-8):
    """AdamW as the handouts' algorithm has it: the weights decay after the step. The loss is the sum of squares."""
    m = v = torch.zeros_like(weights)
    for t in range(1, steps + 1):
        gradient = 2 * weights
        m, v = betas[0] * m + (1 - betas[0]) * gradient, betas[1] * v + (1 - betas[1]) * gradient**2
        rate = lr * math.sqrt(1 - betas[1] ** t) / (1 - betas[0] ** t)
        weights = weights - rate * m / (v.sqrt() + eps)
        weights = weights - lr * decay * weights
    return weights


def test_adamw():
    start = torch.randn(4, 3, dtype=torch.float64)
    weights = torch.nn.Parameter(start.clone())
    optimizer = adapters.get_adamw_cls()([weights], lr=1e-2, weight_decay=0.1, betas=(0.9, 0.99), eps=1e-8)
    for _ in range(5):
        optimizer.zero_grad()
        weights.square().sum().backward()
        optimizer.step()
    torch.testing.assert_close(weights.data, handout_adamw(start, 5), rtol=1e-7, atol=1e-7)


def train(steps):
    torch.manual_seed(1)
    layer = torch.nn.Linear(3, 2)
    optimizer = adapters.get_adamw_cls()(layer.parameters(), lr=1e-2, weight_decay=0.1, betas=(0.9, 0.99), eps=1e-8)
    for _ in range(steps):
        optimizer.zero_grad()
        layer(torch.ones(4, 3)).square().sum().backward()
        optimizer.step()
    return layer, optimizer


def test_clipping_and_checkpoints():
    layer, optimizer = train(steps=5)
    file = io.BytesIO()
    adapters.run_save_checkpoint(layer, optimizer, 10, file)
    file.seek(0)
    other, restored = train(steps=1)
    assert adapters.run_load_checkpoint(file, other, restored) == 10
    assert torch.equal(other.weight, layer.weight)
    before = [p.grad.clone() for p in layer.parameters()]
    adapters.run_gradient_clipping(layer.parameters(), 1e-2)
    norm = math.sqrt(sum(g.square().sum() for g in before))
    assert norm > 1e-2
    for parameter, gradient in zip(layer.parameters(), before, strict=True):
        close(parameter.grad, gradient * 1e-2 / norm)


def test_tokenizer(tmp_path):
    (tmp_path / "corpus.txt").write_text("low low low lower<|endoftext|>low low")
    vocab, merges = adapters.run_train_bpe(tmp_path / "corpus.txt", 260, ["<|endoftext|>"])
    assert merges == [(b"o", b"w"), (b"l", b"ow"), (b" ", b"low")]
    tokenizer = adapters.get_tokenizer(vocab, merges, ["<|endoftext|>"])
    ids = tokenizer.encode("low low<|endoftext|>")
    assert [vocab[i] for i in ids] == [b"low", b" low", b"<|endoftext|>"]
    assert tokenizer.decode(ids) == "low low<|endoftext|>"
