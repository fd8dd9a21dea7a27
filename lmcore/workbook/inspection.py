"""Looking inside: shapes, activation and gradient sizes, attention weights, learning one batch, compression.

What notebook 01 measures on models and tokenizers; its figures are in `lmcore.workbook.report.build.figures`.
"""

import os
from collections.abc import Sequence
from typing import Any

import pandas as pd
import torch
from einops import rearrange
from torch import Tensor, nn

from lmcore.data import is_prepared, open_corpus, open_data
from lmcore.errors import require
from lmcore.functional import cross_entropy, scaled_dot_product_attention
from lmcore.model import CausalMultiHeadSelfAttention, TransformerLM, causal_mask
from lmcore.optimizer import AdamW, gradient_clipping, gradient_norm
from lmcore.tokenizer import END_OF_TEXT, Tokenizer


def output_shapes(model: nn.Module, *inputs: Any) -> pd.DataFrame:
    """Every module that a forward pass calls, in the order in which they finish.

    Columns: module (its name), kind (its class), output (shape), parameters (its own and those of its parts).
    """
    rows: list[dict[str, Any]] = []
    hooks = []
    for name, module in model.named_modules():

        def record(module: nn.Module, _: Any, output: Tensor, name: str = name) -> None:
            parameters = sum(p.numel() for p in module.parameters())
            shape = " × ".join(map(str, output.shape))
            kind = type(module).__name__
            rows.append({"module": name or "(model)", "kind": kind, "output": shape, "parameters": parameters})

        hooks.append(module.register_forward_hook(record))
    try:
        with torch.no_grad():
            model(*inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return pd.DataFrame(rows)


def norms_by_layer(model: TransformerLM, inputs: Tensor, targets: Tensor) -> pd.DataFrame:
    """Size of the residual stream after each block, and of the gradient of its weights, for one batch.

    Columns: layer (0 is the embedding), activation_rms (root mean square of the output), gradient_norm (l2 norm of the
    gradients of all weights in the layer). Leaves the model without gradients.
    """
    stages = [model.token_embeddings, *model.layers]
    activations: list[float] = []
    hooks = [
        stage.register_forward_hook(lambda _, __, output: activations.append(output.square().mean().sqrt().item()))
        for stage in stages
    ]
    try:
        cross_entropy(model(inputs), targets).backward()
    finally:
        for hook in hooks:
            hook.remove()
    gradients = [gradient_norm([p.grad for p in stage.parameters()]).item() for stage in stages]
    model.zero_grad(set_to_none=True)
    return pd.DataFrame({"layer": range(len(stages)), "activation_rms": activations, "gradient_norm": gradients})


@torch.no_grad()
def attention_weights(attention: CausalMultiHeadSelfAttention, x: Tensor) -> Tensor:
    """How much each query attends to each key: (heads, seq, seq) for x of (seq, d_model); rows sum to 1.

    Attention to the identity matrix instead of values: the weighted sums are then the weights themselves.
    """
    seq = x.shape[0]
    q, k = (
        rearrange(proj(x), "seq (heads d_k) -> heads seq d_k", heads=attention.num_heads)
        for proj in (attention.q_proj, attention.k_proj)
    )
    if attention.rope is not None:
        positions = torch.arange(seq, device=x.device)
        q, k = attention.rope(q, positions), attention.rope(k, positions)
    identity = torch.eye(seq, device=x.device, dtype=x.dtype).expand(attention.num_heads, seq, seq)
    return scaled_dot_product_attention(q, k, identity, causal_mask(seq, seq, x.device))


@torch.no_grad()
def attention_weights_of_layer(model: TransformerLM, token_ids: Tensor, layer: int) -> Tensor:
    """`attention_weights` (heads, seq, seq) of block `layer` (from 0) for a sequence of token ids (seq,)."""
    require(0 <= layer < len(model.layers), f"layer must be from 0 to {len(model.layers) - 1}, not {layer}.")
    attention = model.layers[layer].attn
    seen: list[Tensor] = []
    hook = attention.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    try:
        model(token_ids.unsqueeze(0))
    finally:
        hook.remove()
    return attention_weights(attention, seen[0][0])


def learn_one_batch(
    model: TransformerLM, inputs: Tensor, targets: Tensor, steps: int, learning_rate: float
) -> list[float]:
    """Trains on the same batch with AdamW without decay; returns the loss before each step and after the last."""
    optimizer = AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), targets)
        loss.backward()
        gradient_clipping(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        return [*losses, cross_entropy(model(inputs), targets).item()]


def sample_text(source: str | os.PathLike, characters: int) -> str:
    """The first training documents of a source, about `characters` in all, each followed by <|endoftext|>.

    `source` is what `lmcore.data.open_corpus` takes, or a prepared folder, whose tokens are decoded.
    """
    if is_prepared(source):
        data = open_data(source)
        ids = data.train[:characters]  # a token has at least one character, but for broken ones
        return data.tokenizer.decode(ids.tolist())[:characters]
    corpus = open_corpus(source, progress=False)
    texts: list[str] = []
    length = 0
    for piece in corpus.documents("train"):
        texts.append(piece.text + (END_OF_TEXT if piece.ends_document else ""))
        length += len(texts[-1])
        if length >= characters:
            break
    require(length > 0, "The corpus has no text.")
    return "".join(texts)


def split_text(text: str, held_out: float) -> tuple[str, str]:
    """Cuts off the last share `held_out` of a text, at the end of a document if one ends before there."""
    place = int((1 - held_out) * len(text))
    end = text.rfind(END_OF_TEXT, 0, place)
    cut = end + len(END_OF_TEXT) if end >= 0 else place
    return text[:cut], text[cut:]


def bytes_per_token(tokenizer: Tokenizer, text: str) -> float:
    """Compression ratio of a tokenizer on a text: UTF-8 bytes per token."""
    return len(text.encode()) / len(tokenizer.encode(text))


def compression_by_vocabulary(tokenizer: Tokenizer, text: str, sizes: Sequence[int]) -> pd.DataFrame:
    """Bytes per token with only the first merges kept, so many that the vocabulary has each of `sizes`.

    A vocabulary that was trained further begins with the same merges, so this is what smaller ones would have been.
    Columns: vocab_size, bytes_per_token.
    """
    rows = []
    for size in sizes:
        merges = tokenizer.merges[: size - 256 - len(tokenizer.special_tokens)]
        vocab = {token_id: tokenizer.vocab[token_id] for token_id in range(256 + len(merges))}
        smaller = Tokenizer(vocab, merges, tokenizer.special_tokens)
        rows.append({"vocab_size": smaller.vocab_size, "bytes_per_token": bytes_per_token(smaller, text)})
    return pd.DataFrame(rows)
