"""What a Transformer costs: parameters, matmul FLOPs, bytes and time (CS336 A1 and CSE599-O A1, sections 3.6 and 4.3).

Every formula is written once, over the fields of a config. With a `ModelConfig` it gives whole numbers; with symbols of
sympy for the sizes, the very same code gives the algebra.
"""

from dataclasses import dataclass
from typing import Any

from lmcore.config import ModelConfig

ADAMW_FLOPS = {"first moment": 3, "second moment": 4, "update": 5, "weight decay": 2}
"""Operations per parameter of the lines of Algorithm 1; products of scalars alone are done once and not counted.

`lmcore.optimizer.AdamW` needs one less: it decays by a single product with 1 - alpha lambda.
"""

LEAST_MOMENTS = {"adamw": 2, "muon": 1, "sgd": 0}
"""Float32 values that an optimizer keeps for every parameter, or more for some."""


def parameter_counts(config: ModelConfig) -> dict[str, int]:
    """Trainable parameters by component; tied embeddings count once, and no position embedding has any."""
    c, (norms, head_norms) = config, _norms(config)
    return {
        "token_embeddings": c.vocab_size * c.d_model,
        "attention": c.num_layers * 2 * c.d_model * (c.d_model + _kv_width(c)),
        "ffn": c.num_layers * (3 if c.ffn == "swiglu" else 2) * c.d_model * c.d_ff,
        "norms": norms * c.d_model + head_norms * c.d_k,
        "lm_head": 0 if c.tie_embeddings else c.vocab_size * c.d_model,
    }


def num_parameters(config: ModelConfig) -> int:
    """All trainable parameters of the model."""
    return sum(parameter_counts(config).values())


@dataclass(frozen=True)
class MatrixMultiply:
    """`count` products of a (rows, inner) with an (inner, columns) matrix, each 2 * rows * inner * columns FLOPs."""

    component: str
    product: str
    count: int
    rows: int
    inner: int
    columns: int

    @property
    def flops(self) -> int:
        """Additions and multiplications of all `count` matmuls."""
        return 2 * self.count * self.rows * self.inner * self.columns


def matrix_multiplies(config: ModelConfig, batch_size: int = 1, seq_len: int | None = None) -> list[MatrixMultiply]:
    """Every matmul of a forward pass over (batch_size, seq_len) tokens; `seq_len` None: the whole context.

    Scores and weighted sums are counted in full, as the plain implementation computes them, although the causal mask
    throws half away.
    """
    c, seq = config, config.context_length if seq_len is None else seq_len
    tokens, heads = batch_size * seq, c.num_layers * batch_size * c.num_heads

    def per_layer(component: str, product: str, inner: int, columns: int, count: int = 1) -> MatrixMultiply:
        return MatrixMultiply(component, product, count * c.num_layers, tokens, inner, columns)

    qkv = [per_layer("qkv_proj", "W_Q x, W_K x, W_V x", c.d_model, c.d_model, count=3)]
    if c.num_kv_heads is not None:
        keys_values = per_layer("qkv_proj", "W_K x, W_V x", c.d_model, _kv_width(c), count=2)
        qkv = [per_layer("qkv_proj", "W_Q x", c.d_model, c.d_model), keys_values]
    gated = c.ffn == "swiglu"
    return [
        *qkv,
        MatrixMultiply("scores", "Q K^T", heads, seq, c.d_k, seq),
        MatrixMultiply("weighted_sum", "softmax(...) V", heads, seq, seq, c.d_k),
        per_layer("output_proj", "W_O heads", c.d_model, c.d_model),
        per_layer("ffn", "W_1 x, W_3 x" if gated else "W_1 x", c.d_model, c.d_ff, count=2 if gated else 1),
        per_layer("ffn", "W_2 hidden", c.d_ff, c.d_model),
        MatrixMultiply("lm_head", "W_head x", 1, tokens, c.d_model, c.vocab_size),
    ]


def forward_flops_by_component(config: ModelConfig, batch_size: int = 1, seq_len: int | None = None) -> dict[str, int]:
    """Matmul FLOPs of a forward pass: qkv_proj, scores, weighted_sum, output_proj, ffn, lm_head."""
    flops: dict[str, int] = {}
    for multiply in matrix_multiplies(config, batch_size, seq_len):
        flops[multiply.component] = flops.get(multiply.component, 0) + multiply.flops
    return flops


def forward_flops(config: ModelConfig, batch_size: int = 1, seq_len: int | None = None) -> int:
    """Matmul FLOPs of a forward pass over (batch_size, seq_len) tokens."""
    return sum(forward_flops_by_component(config, batch_size, seq_len).values())


def training_flops(config: ModelConfig, batch_size: int = 1, seq_len: int | None = None) -> int:
    """Matmul FLOPs of forward and backward pass together: three times the forward pass.

    Each matmul Y = X W has two of the same size in the backward pass, for the gradients of X and of W. That is exact
    when every weight is trained: only a matmul whose input needs no gradient would save one of the two.
    """
    return 3 * forward_flops(config, batch_size, seq_len)


def activation_counts(config: ModelConfig, batch_size: int = 1, seq_len: int | None = None) -> dict[str, int]:
    """Values kept for the backward pass, by the handouts' list of components (adamw_accounting a): one per output.

    A gated feed-forward network adds its second branch and the gated product. The list is a model of the memory, not
    a measurement: it leaves out residual sums, rotated queries and keys, masks and the temporaries inside an operation.
    """
    c, seq = config, config.context_length if seq_len is None else seq_len
    stream = batch_size * seq * c.d_model
    pairs = batch_size * c.num_heads * seq**2
    hidden_tensors = 4 if c.ffn == "swiglu" else 2  # W1 x, SiLU and, when gated, W3 x and the product
    logits = batch_size * seq * c.vocab_size
    return {
        "norms": sum(_norms(c)) * stream,
        "qkv_proj": c.num_layers * batch_size * seq * (c.d_model + 2 * _kv_width(c)),
        "scores": c.num_layers * pairs,
        "softmax": c.num_layers * pairs,
        "weighted_sum": c.num_layers * stream,
        "output_proj": c.num_layers * stream,
        "ffn": c.num_layers * (hidden_tensors * batch_size * seq * c.d_ff + stream),
        "lm_head": logits,
        "cross_entropy": logits,
    }


def least_step_bytes(config: Any, mode: str = "train_step") -> int:
    """Bytes below which the steps of a `TrainConfig` fit nowhere, or those of a `WorkloadConfig` in this mode.

    A forward pass: the float32 weights. With a backward pass also the larger of two moments: before it, the activations
    of `activation_counts` in the precision of the matmuls; after it, the gradients, which a fused step has all the
    time. A training step adds the optimizer's moments, before the backward pass from the second step on. Not counted:
    elementwise results in a fused or compiled step, scores that a kernel spares, activations that are checkpointed.
    """
    weights, fused = 4 * num_parameters(config.model), config.ops == "fused"
    if mode == "forward":
        return weights
    moments = LEAST_MOMENTS[config.optimizer.name] * weights if mode == "train_step" else 0
    saved = activation_counts(config.model, config.batch_size)
    if config.model.attention != "plain":
        del saved["scores"], saved["softmax"]
    if fused or config.compile:
        outputs = saved["weighted_sum"]  # as many values as the blocks put out
        hidden = (saved["ffn"] - outputs) // 2
        saved = {"qkv_proj": saved["qkv_proj"], "attention": outputs, "hidden": hidden, "outputs": outputs}
    least = 0 if config.model.checkpoint_every is not None else sum(saved.values())
    before_backward = weights + (2 if config.precision in ("bf16", "fp16") else 4) * least
    before_backward += (moments if config.steps > 1 else 0) + (weights if fused else 0)
    return max(before_backward, 2 * weights + moments)


def _kv_width(config: ModelConfig) -> int:
    """Features of a token's keys, and of its values, over all heads."""
    return config.d_model if config.num_kv_heads is None else config.num_kv_heads * config.d_k


def _norms(config: ModelConfig) -> tuple[int, int]:
    """How many norms there are over d_model features, and how many over those of a head."""
    per_block = 0 if config.norm == "none" else 1 if config.parallel else 2
    final = 1 if config.norm == "pre" else 0  # post-norm blocks end in a norm of their own
    return per_block * config.num_layers + final, 2 * config.num_layers if config.qk_norm else 0
