"""Peers in training and decoding: the same model by Hugging Face and by torch.nn, with the weights of one of ours."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lmcore.config import ModelConfig
from lmcore.model import TransformerLM

Logits = Callable[[Tensor], Tensor]
"""Of (B, T) token ids."""

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


def by_flag() -> str:
    """An attention implementation for training: SDPA told that it is causal, instead of given a mask.

    Under torch.compile the library writes a mask out, and PyTorch then has to pass over its fastest kernels.
    """
    try:
        from transformers import AttentionInterface
        from transformers.integrations.sdpa_attention import sdpa_attention_forward
    except ImportError:
        return "sdpa"
    AttentionInterface.register(CAUSAL, sdpa_attention_forward)
    return CAUSAL


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


def hugging_face(source: TransformerLM) -> tuple[nn.Module, Logits]:
    """`LlamaForCausalLM` with the weights of `source`. Raises ImportError where transformers is not installed."""
    model = llama(source, attn_implementation=by_flag())
    return model, lambda inputs: model(input_ids=inputs, use_cache=False).logits


class TorchBlock(nn.Module):
    """A pre-norm block of torch.nn's modules with PyTorch's fused attention."""

    def __init__(self, c: ModelConfig):
        super().__init__()
        self.num_heads = c.num_heads
        self.ln1, self.ln2 = (nn.RMSNorm(c.d_model, eps=1e-5) for _ in range(2))
        self.qkv = nn.Linear(c.d_model, 3 * c.d_model, bias=False)
        self.output_proj = nn.Linear(c.d_model, c.d_model, bias=False)
        self.w13 = nn.Linear(c.d_model, 2 * c.d_ff, bias=False)
        self.w2 = nn.Linear(c.d_ff, c.d_model, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = self.qkv(self.ln1(x)).unflatten(-1, (3, self.num_heads, -1)).transpose(1, 3).unbind(2)
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.output_proj(heads.transpose(1, 2).flatten(2))
        gate, up = self.w13(self.ln2(x)).chunk(2, dim=-1)
        return x + self.w2(F.silu(gate) * up)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on (B, H, T, K) that rotates the two halves of a head, with cosines and sines of shape (T, K / 2)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class TorchLlama(nn.Module):
    """The same model as `TransformerLM`, written with what torch.nn has, q, k and v as well as w1 and w3 in one."""

    def __init__(self, source: TransformerLM):
        super().__init__()
        c = source.config
        self.token_embeddings = nn.Embedding(c.vocab_size, c.d_model)
        self.layers = nn.ModuleList(TorchBlock(c) for _ in range(c.num_layers))
        self.ln_final = nn.RMSNorm(c.d_model, eps=1e-5)
        self.lm_head = nn.Linear(c.d_model, c.vocab_size, bias=False)
        frequencies = c.rope_theta ** (-torch.arange(0, c.d_k, 2) / c.d_k)
        angles = torch.outer(torch.arange(c.context_length), frequencies)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self.load_state_dict(packed(source.state_dict(), c.num_heads))

    def forward(self, token_ids: Tensor) -> Tensor:
        x, length = self.token_embeddings(token_ids), token_ids.shape[-1]
        for layer in self.layers:
            x = layer(x, self.cos[:length], self.sin[:length])
        return self.lm_head(self.ln_final(x))


def packed(state: dict[str, Tensor], num_heads: int) -> dict[str, Tensor]:
    """lmcore's weights under the names of `TorchLlama`."""
    result = {}
    for name, weight in state.items():
        if name.endswith("q_proj.weight"):
            q, k, v = (state[name.replace("q_proj", part)] for part in ("q_proj", "k_proj", "v_proj"))
            result[name.replace("attn.q_proj", "qkv")] = torch.cat([halves(q, num_heads), halves(k, num_heads), v])
        elif name.endswith("w1.weight"):
            result[name.replace("ffn.w1", "w13")] = torch.cat([weight, state[name.replace("w1", "w3")]])
        elif not name.endswith(("k_proj.weight", "v_proj.weight", "w3.weight")):
            result[name.replace("attn.", "").replace("ffn.", "")] = weight
    return result


def torch_llama(source: TransformerLM) -> tuple[nn.Module, Logits]:
    """`TorchLlama` with the weights of `source`."""
    model = TorchLlama(source).to(source.lm_head.weight.device)
    return model, model
