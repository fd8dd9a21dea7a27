"""Predicted memory of a forward pass and of a training step: where it peaks, and what is alive there.

The peak is the largest of a few moments, each a list of what is alive: the tensors kept for the backward pass
(`saved_tensors` beside this file), the gradients made so far and the temporaries of the operation in hand. Bytes are
those that tensors ask for (`torch.cuda.max_memory_allocated` rounds each up to 512, which matters only for toy sizes,
as every large tensor here is a multiple of that).

Not predicted: the workspace of cuBLAS, which PyTorch takes from the same allocator once a thread, and the backward pass
has a thread of its own (32 MiB on Hopper, 8.125 MiB before; `parseChosenWorkspaceSize` in PyTorch's
aten/src/ATen/cuda/CublasHandlePool.cpp); scratch memory inside a kernel; compiled models, which fuse operations.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from lmcore.accounting import num_parameters, parameter_counts
from lmcore.config import ModelConfig
from lmcore.errors import require, require_positive
from lmcore.profiling.memory.saved_tensors import (
    FLOAT,
    Saved,
    Sizes,
    saved_after_blocks,
    saved_bytes,
    saved_in_block,
    sizes,
)

TOKEN_ID = 8
"""Bytes of a token id (int64)."""

PASSES = ("forward", "forward_backward", "train_step")


@dataclass(frozen=True)
class Moment:
    """What is alive at one moment, in bytes, besides parameters, optimizer state and inputs."""

    stage: str
    """forward, loss, backward or optimizer."""
    moment: str
    """What is being computed, in words."""
    gradients: int = 0
    activations: int = 0
    """Tensors kept for the backward pass."""
    temporary: int = 0

    @property
    def bytes(self) -> int:
        """Of all three together."""
        return self.gradients + self.activations + self.temporary


def residual_stream_bytes(
    config: ModelConfig, batch_size: int = 1, seq_len: int | None = None, bytes_per_value: int = FLOAT
) -> int:
    """Bytes of one tensor of the residual stream, (batch_size, seq_len, d_model) (memory_profiling d)."""
    return bytes_per_value * sizes(config, batch_size, seq_len).stream


def saved_by_operation(
    config: ModelConfig, batch_size: int = 1, seq_len: int | None = None, precision: str = "fp32"
) -> list[dict]:
    """What one block keeps for the backward pass as rows of a table: operation, tensors (in words), bytes, source.

    See `lmcore.profiling.memory.saved_tensors.saved_in_block`; source is the line that keeps them.
    """
    return [vars(row) for row in saved_in_block(config, batch_size, seq_len, precision)]


def predicted_peak(
    config: ModelConfig,
    batch_size: int = 1,
    seq_len: int | None = None,
    precision: str = "fp32",
    passes: str = "train_step",
) -> dict:
    """The moment at which most memory is allocated, after warm-up, and what is alive then, in bytes.

    `passes` are those of `lmcore.profiling.workload.WorkloadConfig`. Keys: parameters, gradients, optimizer_state,
    activations (kept for the backward pass), temporary, inputs (token ids and position tables), peak_bytes (their
    sum), stage ("forward", "loss", "backward" or "optimizer"), moment (in words), and by_stage, the peak of each
    stage. Raises `UserError` for unknown passes or precisions, sizes below 1, and more tokens than the context.
    """
    require(passes in PASSES, f"passes must be one of {', '.join(PASSES)}, not {passes!r}.")
    require_positive("batch_size", batch_size)
    require_positive("seq_len", config.context_length if seq_len is None else seq_len)
    c, s = config, sizes(config, batch_size, seq_len, precision)
    parameters = FLOAT * num_parameters(c)
    constant = {
        "parameters": parameters,
        "optimizer_state": 2 * parameters if passes == "train_step" else 0,
        "inputs": 2 * TOKEN_ID * s.rows + _position_tables(c),
    }
    if passes == "forward":
        moments = list(inference_moments(c, s))
    else:
        moments = list(training_moments(c, batch_size, seq_len, precision))
        if passes == "train_step":
            largest = FLOAT * max(c.vocab_size * c.d_model, c.d_model * c.d_ff, c.d_model**2)
            moments.append(Moment("optimizer", "square root of the largest second moment", parameters, 0, largest))
    always, peak = sum(constant.values()), max(moments, key=lambda m: m.bytes)
    stages = dict.fromkeys(m.stage for m in moments)
    return constant | {
        "gradients": peak.gradients,
        "activations": peak.activations,
        "temporary": peak.temporary,
        "peak_bytes": always + peak.bytes,
        "stage": peak.stage,
        "moment": peak.moment,
        "by_stage": {stage: always + max(m.bytes for m in moments if m.stage == stage) for stage in stages},
    }


def largest_context(
    config: ModelConfig,
    memory_bytes: float,
    batch_size: int = 1,
    precision: str = "fp32",
    passes: str = "train_step",
) -> int:
    """Longest sequence, up to the model's context, whose predicted peak fits into `memory_bytes`; 0 if none does."""

    def fits(seq_len: int) -> bool:
        return predicted_peak(config, batch_size, seq_len, precision, passes)["peak_bytes"] <= memory_bytes

    low, high = 0, config.context_length  # low fits (or is 0), everything above high does not
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def inference_moments(c: ModelConfig, s: Sizes) -> Iterator[Moment]:
    """A forward pass that keeps nothing: the fullest moments of a block, and the logits."""
    yield Moment("forward", "softmax of a block", temporary=_attention_forward(c, s))
    yield Moment("forward", "feed-forward network of a block", temporary=_feed_forward_forward(c, s))
    yield Moment("forward", "logits", temporary=_head_forward(c, s))


def training_moments(
    c: ModelConfig, batch_size: int, seq_len: int | None = None, precision: str = "fp32"
) -> Iterator[Moment]:
    """Forward pass, loss and backward pass, with or without gradient checkpointing."""
    s = sizes(c, batch_size, seq_len, precision)
    block = saved_in_block(c, batch_size, seq_len, precision)
    after = saved_after_blocks(c, batch_size, seq_len, precision)
    kept = Kept(c, s, saved_bytes(block))
    loss = saved_bytes(after, "cross-entropy")
    head = kept.all_blocks + saved_bytes(after) - loss
    if c.checkpoint_every is None:
        if c.attention == "plain":  # the last block has not yet come to its feed-forward network
            softmax = kept.all_blocks - saved_bytes(block, *_FEED_FORWARD, "output projection", "dropout 1")
            around = 2 * s.width * s.stream  # the values before they were made contiguous, the weighted sum
            yield Moment("forward", "softmax of the last block", 0, softmax, around + _softmax_temporaries(s))
    else:
        fullest = max(_attention_forward(c, s), _feed_forward_forward(c, s))
        if (c.num_layers - 1) % c.checkpoint_every == 0:  # the last block's x is itself the kept input
            fullest -= FLOAT * s.stream
        yield Moment("forward", "last block, keeping nothing", 0, kept.all_blocks, fullest)
    cast_from = FLOAT * s.stream if s.half and c.norm == "pre" else 0  # what the head's cast input was made of
    yield Moment("forward", "logits", 0, head, s.width * s.logits + cast_from)
    widened = FLOAT * s.logits if s.half else 0
    yield Moment("loss", "exponentials of the logits", 0, head + loss, s.width * s.logits + widened)
    yield Moment("backward", "gradient of the target logits", 0, head + loss, FLOAT * s.logits)
    yield from _backward_moments(c, s, block, kept)
    # a tied weight's first gradient waits for the second, and their sum is a third
    tied = 2 * FLOAT * c.vocab_size * c.d_model if c.tie_embeddings else 0
    parameters = FLOAT * num_parameters(c)
    yield Moment("backward", "gradient of the token embeddings", parameters, 0, FLOAT * s.stream + tied)


_FEED_FORWARD = ("norm 2", "w1, w3", "w1", "silu", "gate", "w2", "dropout 2")
"""Operations of `saved_in_block` that come after the attention."""


@dataclass(frozen=True)
class Kept:
    """Activations that the blocks below hold, when all of them are kept or only the input of every so many."""

    config: ModelConfig
    sizes: Sizes
    block: int
    """Bytes that one block keeps."""

    @property
    def all_blocks(self) -> int:
        """At the end of the forward pass."""
        every = self.config.checkpoint_every
        if every is None:
            return self.config.num_layers * self.block
        return -(-self.config.num_layers // every) * FLOAT * self.sizes.stream

    def below(self, index: int) -> int:
        """While the backward pass is in block `index`, and its segment has been computed again: without its own."""
        every = self.config.checkpoint_every
        if every is None:
            return index * self.block
        segment, within = divmod(index, every)
        # the input of the segment is kept, and is also what its first block keeps as its own input
        own_input = self.config.norm == "pre" or not self.sizes.half
        inputs = segment + (0 if own_input else 1)
        return inputs * FLOAT * self.sizes.stream + within * self.block


def _backward_moments(c: ModelConfig, s: Sizes, block: list[Saved], kept: Kept) -> Iterator[Moment]:
    """The two fullest moments of each block's backward pass, from the last block to the first."""
    counts = parameter_counts(c)
    of_block = {name: FLOAT * counts[name] // c.num_layers for name in ("attention", "ffn")}
    of_block["norms"] = 0 if c.norm == "none" else 2 * FLOAT * c.d_model
    done = FLOAT * c.vocab_size * c.d_model + (FLOAT * c.d_model if c.norm == "pre" else 0)
    # w2 has passed its gradient on; what it kept is free, and the product is turned into gradients of both factors
    gate = saved_bytes(block) - saved_bytes(block, "w2", "dropout 2")
    if c.norm == "post":  # a norm behind its sublayer comes before it on the way back
        gate -= saved_bytes(block, "norm 2")
    gate_gradients = FLOAT * s.stream + 3 * s.width * s.hidden
    # what the softmax and everything before it keeps
    softmax = saved_bytes(block) - saved_bytes(block, *_FEED_FORWARD, "weighted sum", "output projection", "dropout 1")
    if c.norm == "post":
        softmax -= saved_bytes(block, "norm 1")
    # the quotient's gradient for its divisor, -g ((e / sum) / sum), makes four tensors of scores beside g itself
    softmax_gradients = 5 * FLOAT * s.pairs + s.width * s.stream + FLOAT * s.stream
    for index in reversed(range(c.num_layers)):
        below, where = kept.below(index), f"block {index}"
        last = of_block["ffn"] // (3 if c.ffn == "swiglu" else 2)
        yield Moment("backward", f"{where}: hidden layer", done + last, below + gate, gate_gradients)
        if c.attention == "plain":
            so_far = done + of_block["ffn"] + of_block["norms"] // 2 + of_block["attention"] // 4
            yield Moment("backward", f"{where}: softmax", so_far, below + softmax, softmax_gradients)
        done += sum(of_block.values())


def _position_tables(c: ModelConfig) -> int:
    """Bytes of the cosines and sines, or of the sinusoids, of the whole context."""
    per_position = {"rope": c.d_k, "sinusoidal": c.d_model, "none": 0}[c.position]
    return FLOAT * c.context_length * per_position


def _stream_and_input(c: ModelConfig, s: Sizes) -> int:
    """A sublayer's place in the residual stream: x itself, and the normalized x with norms in front."""
    return FLOAT * s.stream * (2 if c.norm == "pre" else 1)


def _softmax_temporaries(s: Sizes) -> int:
    """Beside exponentials and probabilities: the masked scores, and under autocast wider copies of both."""
    return s.width * s.pairs + (FLOAT * 2 - s.width) * s.pairs * s.half + s.mask


def _attention_forward(c: ModelConfig, s: Sizes) -> int:
    around = _stream_and_input(c, s) + 3 * s.width * s.stream
    if c.attention != "plain":
        return around + s.width * s.stream + FLOAT * s.heads_rows
    softmax = (FLOAT + s.width) * s.pairs + FLOAT * s.heads_rows + _softmax_temporaries(s)
    return around + softmax


def _feed_forward_forward(c: ModelConfig, s: Sizes) -> int:
    """x before and after the attention, and W1 x, its sigmoid and their product, or one product and a cast weight."""
    around = FLOAT * s.stream + _stream_and_input(c, s)
    weight = s.width * c.d_model * c.d_ff + s.width * s.stream if s.half else 0
    return around + max(3 * s.width * s.hidden, 2 * s.width * s.hidden + weight)


def _head_forward(c: ModelConfig, s: Sizes) -> int:
    weight = s.width * c.vocab_size * c.d_model + s.width * s.stream if s.half else 0
    return _stream_and_input(c, s) + weight + s.width * s.logits
