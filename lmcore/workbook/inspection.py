"""Looking inside a model: sizes of activations and gradients, attention weights; and notebook 01's sample of text."""

import os
from contextlib import ExitStack

import pandas as pd
import torch
from einops import rearrange
from torch import Tensor

from lmcore.data import is_prepared, open_corpus, open_data
from lmcore.errors import require
from lmcore.functional import cross_entropy, scaled_dot_product_attention
from lmcore.model import CausalMultiHeadSelfAttention, TransformerLM, causal_mask
from lmcore.optimizer import gradient_norm
from lmcore.tokenizer import END_OF_TEXT


def norms_by_layer(model: TransformerLM, inputs: Tensor, targets: Tensor) -> pd.DataFrame:
    """Size of the residual stream after each block, and of the gradient of its weights, for one batch.

    Columns: layer (0 is the embedding), activation_rms (root mean square of the output), gradient_norm (l2 norm of the
    gradients of all weights in the layer). Leaves the model without gradients.
    """
    stages = [model.token_embeddings, *model.layers]
    activations: list[float] = []
    with ExitStack() as hooks:
        for stage in stages:
            hook = stage.register_forward_hook(lambda _, __, x: activations.append(x.square().mean().sqrt().item()))
            hooks.enter_context(hook)
        cross_entropy(model(inputs), targets).backward()
    gradients = [gradient_norm([p.grad for p in stage.parameters()]).item() for stage in stages]
    model.zero_grad(set_to_none=True)
    return pd.DataFrame({"layer": range(len(stages)), "activation_rms": activations, "gradient_norm": gradients})


@torch.no_grad()
def attention_weights(attention: CausalMultiHeadSelfAttention, x: Tensor) -> Tensor:
    """How much each query attends to each key: (heads, seq, seq) for x of (seq, d_model); rows sum to 1.

    Attention to the identity matrix instead of values: the weighted sums are then the weights themselves.
    """
    seq, heads = x.shape[0], attention.num_heads
    q, k = (
        rearrange(project(x), "seq (heads d_k) -> heads seq d_k", heads=heads)
        for project in (attention.q_proj, attention.k_proj)
    )
    if attention.rope is not None:
        q, k = (attention.rope(y, torch.arange(seq, device=x.device)) for y in (q, k))
    identity = torch.eye(seq, device=x.device, dtype=x.dtype).expand(heads, seq, seq)
    return scaled_dot_product_attention(q, k, identity, causal_mask(seq, seq, x.device))


@torch.no_grad()
def attention_weights_of_layer(model: TransformerLM, token_ids: Tensor, layer: int) -> Tensor:
    """`attention_weights` (heads, seq, seq) of block `layer` (from 0) for a sequence of token ids (seq,)."""
    require(0 <= layer < len(model.layers), f"layer must be from 0 to {len(model.layers) - 1}, not {layer}.")
    attention, seen = model.layers[layer].attn, []
    with attention.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0])):
        model(token_ids.unsqueeze(0))
    return attention_weights(attention, seen[0][0])


def sample_text(source: str | os.PathLike, characters: int) -> str:
    """The first training documents of a source, about `characters` in all, each followed by <|endoftext|>.

    `source` is what `lmcore.data.open_corpus` takes, or a prepared folder, whose tokens are decoded.
    """
    if is_prepared(source):
        data = open_data(source)
        ids = data.train[:characters]  # a token has at least one character, but for broken ones
        return data.tokenizer.decode(ids.tolist())[:characters]
    text = ""
    for piece in open_corpus(source, progress=False).documents("train"):
        text += piece.text + (END_OF_TEXT if piece.ends_document else "")
        if len(text) >= characters:
            break
    require(bool(text), "The corpus has no text.")
    return text
