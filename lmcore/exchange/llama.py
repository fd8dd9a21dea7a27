"""`TransformerLM` and Llama (Touvron et al. 2023): one table of names and one order of rows, used in both directions.

Both rotate pairs of a head's features by the same angles. lmcore and GGUF pair neighbors, (x0, x1), (x2, x3), … (Su et
al. 2021); `rotate_half` of transformers' modeling_llama.py pairs halves, (x0, x[d/2]), … The rows of W_q and W_k stand
in another order there, and scores are the same.
"""

from collections.abc import Iterator
from typing import Any

from jaxtyping import Float
from torch import Tensor

from lmcore.config import ModelConfig, from_dict
from lmcore.errors import UserError, require

HUGGING_FACE, GGUF = 0, 1
"""Columns of the tables of names."""

OUTER = {
    "token_embeddings": ("model.embed_tokens", "token_embd"),
    "ln_final": ("model.norm", "output_norm"),
    "lm_head": ("lm_head", "output"),
}
LAYER = {
    "ln1": ("input_layernorm", "attn_norm"),
    "attn.q_proj": ("self_attn.q_proj", "attn_q"),
    "attn.k_proj": ("self_attn.k_proj", "attn_k"),
    "attn.v_proj": ("self_attn.v_proj", "attn_v"),
    "attn.output_proj": ("self_attn.o_proj", "attn_output"),
    "ln2": ("post_attention_layernorm", "ffn_norm"),
    "ffn.w1": ("mlp.gate_proj", "ffn_gate"),
    "ffn.w3": ("mlp.up_proj", "ffn_up"),
    "ffn.w2": ("mlp.down_proj", "ffn_down"),
}
LAYERS = ("model.layers", "blk")
ROTATED = ("q_proj.weight", "k_proj.weight")

FIELDS = {
    "vocab_size": "vocab_size", "max_position_embeddings": "context_length", "hidden_size": "d_model",
    "num_hidden_layers": "num_layers", "num_attention_heads": "num_heads", "intermediate_size": "d_ff",
    "num_key_value_heads": "num_kv_heads", "rms_norm_eps": "norm_eps", "tie_word_embeddings": "tie_embeddings",
}  # fmt: skip
"""Fields of Hugging Face's LlamaConfig, and ours."""

DEFAULTS = {"num_key_value_heads": None, "rms_norm_eps": 1e-6, "tie_word_embeddings": False}
"""Of the fields that a config.json may lack."""

FIXED = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "quantization_config": None}
"""The only values of other fields that our model computes."""


def weight_names(config: ModelConfig, column: int) -> Iterator[tuple[str, str]]:
    """Our name and theirs of each weight; of tied embeddings there is one."""
    for ours, theirs in OUTER.items():
        if ours != "lm_head" or not config.tie_embeddings:
            yield f"{ours}.weight", f"{theirs[column]}.weight"
    for layer in range(config.num_layers):
        for ours, theirs in LAYER.items():
            yield f"layers.{layer}.{ours}.weight", f"{LAYERS[column]}.{layer}.{theirs[column]}.weight"


def halves(weight: Float[Tensor, "rows d_model"], d_k: int) -> Float[Tensor, "rows d_model"]:
    """Rows of W_q or W_k for a RoPE of halves: of each head first the pairs' first members, then the second ones."""
    return weight.unflatten(0, (-1, d_k // 2, 2)).transpose(1, 2).reshape(weight.shape)


def neighbors(weight: Float[Tensor, "rows d_model"], d_k: int) -> Float[Tensor, "rows d_model"]:
    """The inverse of `halves`."""
    return weight.unflatten(0, (-1, 2, d_k // 2)).transpose(1, 2).reshape(weight.shape)


def to_llama(config: ModelConfig, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our weights as those of `LlamaForCausalLM`."""
    names = weight_names(config, HUGGING_FACE)
    return {theirs: halves(state[o], config.d_k) if o.endswith(ROTATED) else state[o] for o, theirs in names}


def from_llama(config: ModelConfig, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights of `LlamaForCausalLM` as ours, in float32."""
    found = {ours: state[theirs].float() for ours, theirs in weight_names(config, HUGGING_FACE)}
    return {o: neighbors(weight, config.d_k) if o.endswith(ROTATED) else weight for o, weight in found.items()}


def llama_config(config: ModelConfig) -> dict[str, Any]:
    """Fields of LlamaConfig; `rope_theta` is the form of transformers 4, `rope_parameters` that of 5.

    Raises `UserError` naming the settings of a model that Llama cannot express.
    """
    obstacles = {
        f"norm={config.norm}": config.norm != "pre",
        f"position={config.position}": config.position != "rope",
        f"ffn={config.ffn}": config.ffn != "swiglu",
        "qk_norm": config.qk_norm,
        "parallel blocks": config.parallel,
    }
    found = ", ".join(name for name, present in obstacles.items() if present)
    require(not found, f"Llama has no {found}: such a model cannot be exported.")

    return {
        **{theirs: getattr(config, ours) for theirs, ours in FIELDS.items()},
        **{name: value for name, value in FIXED.items() if value is not None},
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.d_k,
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
    }


def model_config_of(values: dict[str, Any], name: str) -> ModelConfig:
    """Our model for the fields of a LlamaConfig in `name`. Raises `UserError` naming a field that it cannot express."""
    fixed = {field: (values.get(field, value), value) for field, value in FIXED.items()}
    fixed["model_type"] = values.get("model_type"), "llama"
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    require(isinstance(rope, dict), f"{name}: the settings of RoPE must be an object, not {rope!r}.")
    fixed["rope_scaling"] = rope.get("rope_type", rope.get("type", "default")), "default"
    fixed["partial_rotary_factor"] = (rope | values).get("partial_rotary_factor", 1), 1
    for field, (there, ours) in fixed.items():
        require(there == ours, f"{name} has {field}={there}; lmcore computes {field}={ours} alone.")
    missing = [field for field in FIELDS if field not in values and field not in DEFAULTS]
    require(not missing, f"{name} lacks {', '.join(missing)}.")
    fields = {ours: values.get(theirs, DEFAULTS.get(theirs)) for theirs, ours in FIELDS.items()}
    fields["rope_theta"] = rope.get("rope_theta", values.get("rope_theta", 10_000.0))
    try:
        config = from_dict(ModelConfig, fields)
    except UserError as error:
        raise UserError(f"{name}: {error}") from None
    head = values.get("head_dim") or config.d_k
    require(head == config.d_k, f"{name} has head_dim={head}; lmcore's heads have d_model / num_heads = {config.d_k}.")
    return config
