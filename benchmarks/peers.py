"""Hugging Face's Llama, the peer in training and decoding, with the weights of one of our models."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lmcore.exchange.llama import llama_config, to_llama
from lmcore.model import TransformerLM

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
