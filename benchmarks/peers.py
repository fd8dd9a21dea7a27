"""Peers in training and decoding with the weights of one of our models: Hugging Face's Llama, and one of torch.nn."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lmcore.exchange.llama import halves, llama_config, to_llama
from lmcore.model import RMSNorm, TransformerBlock, TransformerLM

CAUSAL = "sdpa_by_flag"


def llama(model: TransformerLM, dtype: torch.dtype = torch.float32, **settings: Any) -> nn.Module:
    """`LlamaForCausalLM` that computes what `model` does, on its device. Raises ImportError without transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    own = {"bos_token_id": None, "eos_token_id": None, "attn_implementation": "sdpa", "use_cache": False}
    with model.lm_head.weight.device:
        theirs = LlamaForCausalLM(LlamaConfig(**llama_config(model.config) | own | settings))
    theirs.load_state_dict(to_llama(model.config, model.state_dict()))
    return theirs.to(dtype)


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


def linear(*weights: Tensor) -> nn.Linear:
    """One layer for all these matrices of the same input."""
    weight = torch.cat([w.detach() for w in weights])
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight)
    return layer


def rms_norm(norm: RMSNorm) -> nn.RMSNorm:
    """PyTorch's with the same weight."""
    theirs = nn.RMSNorm(norm.weight.shape, norm.eps, device="meta")
    theirs.weight = nn.Parameter(norm.weight.detach().clone())
    return theirs


class PackedBlock(nn.Module):
    """A block with one matmul for q, k and v, one for gate and up projection, and a RoPE of halves."""

    def __init__(self, source: TransformerBlock, heads: int, d_k: int):
        super().__init__()
        attn, ffn, self.heads = source.attn, source.ffn, heads
        q, k = (halves(projection.weight, d_k) for projection in (attn.q_proj, attn.k_proj))
        self.qkv, self.out = linear(q, k, attn.v_proj.weight), linear(attn.output_proj.weight)
        self.gate_and_up, self.down = linear(ffn.w1.weight, ffn.w3.weight), linear(ffn.w2.weight)
        self.ln1, self.ln2 = rms_norm(source.ln1), rms_norm(source.ln2)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """(B, T, D) to (B, T, D)."""
        q, k, v = self.qkv(self.ln1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind()
        q, k = (y * cos + torch.cat((-y.chunk(2, -1)[1], y.chunk(2, -1)[0]), -1) * sin for y in (q, k))
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(heads.transpose(1, 2).flatten(2))
        gate, up = self.gate_and_up(self.ln2(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class PackedLlama(nn.Module):
    """What `source` computes, of torch.nn; the residual stream is in the type of autocast."""

    def __init__(self, source: TransformerLM):
        super().__init__()
        c, rope = source.config, source.layers[0].attn.rope
        self.embedding = nn.Embedding.from_pretrained(source.token_embeddings.weight.detach().clone(), freeze=False)
        self.layers = nn.ModuleList(PackedBlock(layer, c.num_heads, c.d_k) for layer in source.layers)
        self.norm, self.head = rms_norm(source.ln_final), linear(source.lm_head.weight)
        self.cos, self.sin = (torch.cat((table, table), -1) for table in (rope.cos, rope.sin))

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits of (B, T) token ids."""
        x, kind = self.embedding(inputs), inputs.device.type
        if torch.is_autocast_enabled(kind):
            x = x.to(torch.get_autocast_dtype(kind))
        cos, sin = (table[: inputs.shape[1]].to(x.dtype) for table in (self.cos, self.sin))
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.head(self.norm(x))


def packed(source: TransformerLM, float8: bool = False) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    """`PackedLlama`, with torchao's float8 matmuls in its blocks if asked. Raises ImportError without torchao."""
    model = PackedLlama(source)
    if float8:
        from torchao.float8 import convert_to_float8_training

        convert_to_float8_training(model.layers)
    return model, model
