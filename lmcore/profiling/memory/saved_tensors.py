"""What the plain implementation keeps for the backward pass, tensor by tensor (CS336 A2 section 1.1.6).

`lmcore.accounting.activation_counts` is the handout's model: one tensor for each component's output. This is the
implementation's own list, read off `lmcore.model` and `lmcore.functional`: for each operation the storages that
autograd holds until its backward pass, which are inputs as often as outputs. Views cost nothing, a storage that two
operations keep counts once, with the first that makes it, and parameters are not counted: they are there anyway.

Under autocast (bf16 and fp16 alike) matrix products keep 2-byte copies of their inputs *and of their weights*: PyTorch
caches casts of leaves alone, and `self.weight.T` is none. The residual stream, the norms and the softmax stay float32.
"""

from dataclasses import dataclass

from lmcore.accounting import activation_counts
from lmcore.config import ModelConfig
from lmcore.errors import require

FLOAT = 4
"""Bytes of a float32 value: parameters, gradients, optimizer state, the residual stream, norms and softmax."""

MATMUL_BYTES = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2}
"""Bytes of a value that goes into or comes out of a matrix product, by precision."""


@dataclass(frozen=True)
class Saved:
    """Storages that one operation keeps for the backward pass: what they hold, and the line that keeps them."""

    operation: str
    tensors: str
    bytes: int
    source: str


@dataclass(frozen=True)
class Sizes:
    """Numbers of values of the tensors that one block makes, for one batch, and their width in matrix products."""

    rows: int
    """Tokens of the batch: B T."""
    stream: int
    """A tensor of the residual stream: B T d_model."""
    hidden: int
    """A tensor inside the feed-forward network: B T d_ff."""
    pairs: int
    """A score for each query, key and head: B H T T."""
    heads_rows: int
    """A number for each query and head: B H T."""
    mask: int
    """A byte for each query and key: T T."""
    angles: int
    """The cosines of all positions: T d_k / 2."""
    logits: int
    """B T vocab_size."""
    width: int
    """Bytes of a value in a matrix product."""

    @property
    def half(self) -> bool:
        """Whether autocast is on."""
        return self.width < FLOAT


def sizes(config: ModelConfig, batch_size: int, seq_len: int | None = None, precision: str = "fp32") -> Sizes:
    """The sizes of a block's tensors. Raises `UserError` for an unknown precision or more tokens than the context."""
    c, seq = config, config.context_length if seq_len is None else seq_len
    require(precision in MATMUL_BYTES, f"precision must be one of {', '.join(MATMUL_BYTES)}, not {precision!r}.")
    require(seq <= c.context_length, f"seq_len ({seq}) is above the model's context_length ({c.context_length}).")
    per_layer = activation_counts(c, batch_size, seq)  # the handout's list already has the large sizes
    rows = batch_size * seq
    return Sizes(
        rows=rows,
        stream=rows * c.d_model,
        hidden=rows * c.d_ff,
        pairs=per_layer["scores"] // c.num_layers,
        heads_rows=rows * c.num_heads,
        mask=seq * seq,
        angles=seq * c.d_k // 2,
        logits=per_layer["lm_head"],
        width=MATMUL_BYTES[precision],
    )


def saved_in_block(
    config: ModelConfig, batch_size: int = 1, seq_len: int | None = None, precision: str = "fp32"
) -> list[Saved]:
    """Everything that one block keeps for its backward pass, in the order in which it is made.

    The block's input is its own, its output the next block's. With fused attention the list is that of
    FlashAttention: queries and keys, values, the output and a log-sum-exp for each row. PyTorch's memory-efficient
    kernel, which float32 takes on a GPU, lays its output out by position, so that no copy of it is needed.
    """
    c, s = config, sizes(config, batch_size, seq_len, precision)
    attention = _plain_attention(c, s) if c.attention == "plain" else _fused_attention(c, s)
    return [
        *_norm(c, s, "norm 1", "ln1", post_input="x + attention"),
        *(_inputs(c, s, "q, k, v projections", "x", c.d_model * c.d_model, products=3)),
        *attention,
        *_dropout(c, s, "dropout 1"),
        *_norm(c, s, "norm 2", "ln2", post_input="x + ffn"),
        *_feed_forward(c, s),
        *_dropout(c, s, "dropout 2"),
    ]


def saved_after_blocks(
    config: ModelConfig, batch_size: int = 1, seq_len: int | None = None, precision: str = "fp32"
) -> list[Saved]:
    """What the final norm, the output embedding and the cross-entropy keep, besides the token ids."""
    c, s = config, sizes(config, batch_size, seq_len, precision)
    rows = _norm(c, s, "final norm", "ln_final") if c.norm == "pre" else []
    rows += _inputs(c, s, "lm head", "x", c.vocab_size * c.d_model)
    loss = "cross_entropy: shifted.exp(), .gather(), .log()"
    return [*rows, Saved("cross-entropy", "shifted logits, exponentials, sums", FLOAT * (2 * s.logits + s.rows), loss)]


def saved_bytes(rows: list[Saved], *operations: str) -> int:
    """Bytes of all rows, or of those of the named operations."""
    return sum(row.bytes for row in rows if not operations or row.operation in operations)


def _norm(c: ModelConfig, s: Sizes, operation: str, name: str, post_input: str = "") -> list[Saved]:
    """RMSNorm keeps its input (the square, the division), the root mean squares and the quotient."""
    if c.norm == "none":
        return []
    x = post_input if c.norm == "post" else "x"
    source = f"RMSNorm.forward ({name}): wide / rms * self.weight"
    return [Saved(operation, f"{x}, rms, {x} / rms", FLOAT * (2 * s.stream + s.rows), source)]


def _inputs(c: ModelConfig, s: Sizes, operation: str, x: str, weights: int, products: int = 1) -> list[Saved]:
    """Products of one normalized stream tensor with `products` matrices of `weights` values each.

    In float32 all keep the same input; autocast casts it anew for each product, and each weight.
    """
    if not s.half:
        return [Saved(operation, x, FLOAT * s.stream, "Linear.forward: x @ self.weight.T")]
    return [
        Saved(operation, f"{x} cast {products} times", s.width * products * s.stream, "autocast in Linear.forward"),
        Saved(operation, f"{products} weights, cast", s.width * products * weights, "autocast in Linear.forward"),
    ]


def _weight_cast(s: Sizes, operation: str, weights: int) -> list[Saved]:
    cast = Saved(operation, "weight, cast", s.width * weights, "autocast in Linear.forward")
    return [cast] if s.half else []


def _rope(c: ModelConfig, s: Sizes) -> list[Saved]:
    if c.position != "rope":
        return []
    source = "RotaryPositionalEmbedding.forward: self.cos[token_positions]"
    return [Saved("rope", "cosines and sines for q and for k", FLOAT * 4 * s.angles, source)]


def _plain_attention(c: ModelConfig, s: Sizes) -> list[Saved]:
    function = "scaled_dot_product_attention"
    return [
        *_rope(c, s),
        Saved("scores", "queries, keys", s.width * 2 * s.stream, f"{function}: Q @ K.transpose(-2, -1)"),
        Saved("mask", "inverted causal mask", s.mask, f"{function}: scores.masked_fill(~mask, ...)"),
        Saved("softmax", "exponentials, their sums", FLOAT * (s.pairs + s.heads_rows), "softmax: exp, division"),
        Saved("weighted sum", "probabilities", s.width * s.pairs, f"{function}: softmax(...) @ V"),
        Saved("weighted sum", "values, contiguous by head", s.width * s.stream, f"{function}: softmax(...) @ V"),
        Saved("output projection", "heads side by side", s.width * s.stream, "rearrange(heads, ...) in forward"),
        *_weight_cast(s, "output projection", c.d_model * c.d_model),
    ]


def _fused_attention(c: ModelConfig, s: Sizes) -> list[Saved]:
    function = "flash_attention" if c.attention == "flash" else "fused_causal_attention"
    # PyTorch lays the output out as the queries: rotated ones are contiguous by head, and the heads side by side are a
    # copy, unless there is but one head or one position; our own kernels lay it out by position
    by_head = c.attention == "sdpa" and c.position == "rope" and c.num_heads > 1 and s.mask > 1
    copy = Saved("output projection", "heads side by side", s.width * s.stream, "rearrange(heads, ...) in forward")
    return [
        *_rope(c, s),
        Saved("fused attention", "queries, keys, values", s.width * 3 * s.stream, function),
        Saved("fused attention", "output, log-sum-exp", s.width * s.stream + FLOAT * s.heads_rows, function),
        *([copy] if by_head else []),
        *_weight_cast(s, "output projection", c.d_model * c.d_model),
    ]


def _feed_forward(c: ModelConfig, s: Sizes) -> list[Saved]:
    gated, weights = c.ffn == "swiglu", c.d_model * c.d_ff
    rows = _inputs(c, s, "w1, w3" if gated else "w1", "x", weights, products=2 if gated else 1)
    rows.append(Saved("silu", "W1 x, its sigmoid", s.width * 2 * s.hidden, "silu: x * torch.sigmoid(x)"))
    if gated:
        rows.append(Saved("gate", "silu, W3 x", s.width * 2 * s.hidden, "SwiGLU.forward: silu(...) * self.w3(x)"))
    return [
        *rows,
        Saved("w2", "hidden", s.width * s.hidden, "Linear.forward: x @ self.weight.T"),
        *_weight_cast(s, "w2", weights),
    ]


def _dropout(c: ModelConfig, s: Sizes, operation: str) -> list[Saved]:
    kept = Saved(operation, "which values stay, as bytes", s.stream, "dropout: x * (rand_like(x) >= p)")
    return [kept] if c.dropout else []
