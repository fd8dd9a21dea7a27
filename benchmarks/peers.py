"""Hugging Face's Llama, the peer in training and decoding, with the weights of one of our models."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lmcore.config import ModelConfig
from lmcore.model import TransformerLM

NAMES = {
    "token_embeddings.": "model.embed_tokens.", "layers.": "model.layers.", "ln_final.": "model.norm.",
    ".attn.output_proj.": ".self_attn.o_proj.", ".attn.": ".self_attn.",
    ".ffn.w1.": ".mlp.gate_proj.", ".ffn.w2.": ".mlp.down_proj.", ".ffn.w3.": ".mlp.up_proj.",
    ".ln1.": ".input_layernorm.", ".ln2.": ".post_attention_layernorm.",
}  # fmt: skip
"""Parts of our parameters' names, and what they are called there; replaced in this order."""

CAUSAL = "sdpa_by_flag"


def llama(model: TransformerLM, dtype: torch.dtype = torch.float32, **settings: Any) -> nn.Module:
    """`LlamaForCausalLM` that computes what `model` does, on its device. Raises ImportError without transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    c, weight = model.config, model.token_embeddings.weight
    config = LlamaConfig(**{
        "hidden_size": c.d_model, "intermediate_size": c.d_ff, "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads, "num_key_value_heads": c.num_heads, "vocab_size": c.vocab_size,
        "max_position_embeddings": c.context_length, "rope_theta": c.rope_theta, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None, "attn_implementation": "sdpa",
        "use_cache": False,
    } | settings)  # fmt: skip
    with weight.device:
        theirs = LlamaForCausalLM(config)
    theirs.load_state_dict(renamed(model.state_dict(), c))
    return theirs.to(dtype)


def renamed(state: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Our weights under their names."""
    weights = {}
    for name, weight in state.items():
        if ".q_proj." in name or ".k_proj." in name:
            weight = halves(weight, config.num_heads)
        for ours, theirs in NAMES.items():
            name = name.replace(ours, theirs)
        weights[name] = weight
    return weights


def halves(weight: Tensor, num_heads: int) -> Tensor:
    """Rows of a (D, D) projection for a RoPE that rotates the halves of a head, while lmcore's rotates neighbors.

    First come the pairs' first members, then the second ones; attention does not see the order.
    """
    return weight.unflatten(0, (num_heads, -1, 2)).transpose(1, 2).reshape(weight.shape)


def hugging_face(source: TransformerLM) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    """`LlamaForCausalLM` with the weights of `source`, and its logits of (B, T) token ids. Raises ImportError without
    transformers.

    SDPA is told that it is causal, instead of given a mask: under torch.compile the library writes a mask out, and
    PyTorch then has to pass over its fastest kernels.
    """
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register(CAUSAL, sdpa_attention_forward)
    model = llama(source, attn_implementation=CAUSAL)
    return model, lambda inputs: model(input_ids=inputs, use_cache=False).logits
