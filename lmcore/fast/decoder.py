"""Decoding with a static cache: one step is a fixed chain of kernels, on CUDA one CUDA graph that is launched again.

Nothing of a step depends on the host: positions, the tokens and what is drawn from are on the device, and a token
becomes the next step's input there. Each weight is read once for a token of all rows.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lmcore.config import GenerateConfig, ModelConfig
from lmcore.device import autocast
from lmcore.errors import require
from lmcore.fast.kernels import decode as ops
from lmcore.fast.kernels.dispatch import on_device_of
from lmcore.fast.support import precision_of
from lmcore.fast.support import unsupported_reason as unsupported_in_training
from lmcore.model import Linear, TransformerBlock, TransformerLM, evaluating

GREEDY = GenerateConfig(temperature=0)
KEYS_PER_PART = 256
"""A part of the keys has at least so many; more parts than it takes to fill the chip gain nothing."""
SPLITS = 8
"""Most programs that share a tile of a matmul of many rows."""


def unsupported_reason(config: ModelConfig, dtype: torch.dtype) -> str | None:
    """As `lmcore.fast.support` says it of training, but without a backward pass; with RoPE alone."""
    found = [unsupported_in_training(config, precision_of(dtype))]
    found += ["position=none"] if config.position == "none" else []
    found += [f"norm_eps={config.norm_eps}"] * (config.norm_eps != ops.EPS)
    return ", ".join(filter(None, found)) or None


class LayerWeights(NamedTuple):
    """One layer's matrices as its kernels read them: in the working precision, the norm weights folded in."""

    qkv: Float[Tensor, "3D D"]
    output: Float[Tensor, "D D"]
    gate_up: Float[Tensor, "2F D"]
    down: Float[Tensor, "D F"]


class FusedDecoder:
    """Continues `num_rows` sequences of `num_slots` positions at most, token by token, all rows at once.

        decoder = FusedDecoder(model, num_rows=1, num_slots=256, dtype=torch.bfloat16)
        decoder.place([0], [prompt])         # rows, and their tokens so far
        tokens = decoder.decode(240)         # (240, 1), on the device, without waiting for it

    To time it: `place`, a `decode` of a few tokens (the first captures the graph), then `decode` between two
    synchronisations. `config` says how tokens are chosen (greedy unless given), `num_ids` from which id on none is.
    The weights are copies of the model's when it is built. Rows may be placed anew at any time.
    """

    def __init__(
        self,
        model: TransformerLM,
        num_rows: int,
        num_slots: int,
        dtype: torch.dtype,
        config: GenerateConfig = GREEDY,
        num_ids: int | None = None,
    ):
        reason = unsupported_reason(model.config, dtype)
        require(reason is None, f"The fused decoder does not cover {reason}.")
        require(
            num_slots <= model.config.context_length,
            f"num_slots ({num_slots}) must be at most the model's context_length ({model.config.context_length}).",
        )
        c, self.model, self.config, self.dtype = model.config, model, config, dtype
        self.num_rows, self.num_slots, self.num_ids = num_rows, num_slots, min(num_ids or c.vocab_size, c.vocab_size)
        self.device = device = next(model.parameters()).device
        self._layers = [self._packed(layer) for layer in model.layers]
        self._head = (model.lm_head.weight * model.ln_final.weight).detach().to(dtype)
        self._rope = model.layers[0].attn.rope
        cache = (c.num_layers, num_rows, c.num_heads, num_slots, c.d_k)
        self.keys, self.values = (torch.zeros(cache, device=device, dtype=dtype) for _ in range(2))
        narrow, wide = ({"device": device, "dtype": kind} for kind in (dtype, torch.float32))
        self._x = torch.zeros(num_rows, c.d_model, **wide)
        self._copy = torch.zeros(num_rows, c.d_model, **narrow)
        self._qkv = torch.empty(num_rows, 3 * c.d_model, **wide)
        self._heads = torch.empty(num_rows, c.d_model, **narrow)
        self._parts = self._lse = None
        if (parts := _num_parts(num_rows * c.num_heads, num_slots)) > 1:
            self._parts = torch.empty(parts, num_rows, c.d_model, **wide)
            self._lse = torch.empty(parts, num_rows, c.num_heads, **wide)
        self._hidden = torch.empty(num_rows, c.d_ff, **narrow)
        self._sums = torch.empty(SPLITS, num_rows, c.d_model, **wide)
        self._counts = torch.zeros(num_rows * c.d_model, device=device, dtype=torch.int32)
        self._logits = torch.empty(num_rows, c.vocab_size, **wide)
        # rings of the tokens and random numbers of the latest steps
        self.capacity = max(64, num_slots)
        self._tokens = torch.zeros(self.capacity, num_rows, device=device, dtype=torch.int32)
        self._uniforms = torch.zeros(self.capacity, num_rows, device=device)
        self._steps, self._positions = (torch.zeros(num_rows, device=device, dtype=torch.int32) for _ in range(2))
        self._done = 0
        self._graph: torch.cuda.CUDAGraph | None = None

    @torch.no_grad()
    def _packed(self, layer: TransformerBlock) -> LayerWeights:
        def together(norm_weight: Tensor, *matrices: Linear) -> Tensor:
            return torch.cat([(matrix.weight * norm_weight).to(self.dtype) for matrix in matrices])

        attn, ffn = layer.attn, layer.ffn
        return LayerWeights(
            qkv=together(layer.ln1.weight, attn.q_proj, attn.k_proj, attn.v_proj),
            output=attn.output_proj.weight.detach().to(self.dtype),
            gate_up=together(layer.ln2.weight, ffn.w1, ffn.w3),
            down=ffn.w2.weight.detach().to(self.dtype),
        )

    @torch.no_grad()
    def place(self, rows: Sequence[int], windows: Sequence[Sequence[int]]) -> None:
        """Puts each of `rows` at the end of its window (token ids, at least one, at most `num_slots`).

        The plain model computes the keys and values of all tokens but the last, which the next step is fed.
        """
        longest = max(map(len, windows))
        require(min(map(len, windows)) > 0, "A window to continue must hold a token.")
        require(longest <= self.num_slots, f"A window of {longest} tokens does not fit into {self.num_slots} slots.")
        which, last = (torch.tensor(ids).to(self.device) for ids in (rows, [window[-1] for window in windows]))
        lengths = torch.tensor([len(window) - 1 for window in windows])
        self._positions[which] = lengths.to(self.device, torch.int32)
        self._x[which] = self.model.token_embeddings.weight[last].to(self._x.dtype)
        self._copy[which] = self._x[which].to(self.dtype)
        if longest > 1:
            tokens = torch.tensor([[*window[:-1], *[0] * (longest - len(window))] for window in windows])
            self._prefill(which, tokens.to(self.device))

    def _prefill(self, rows: Int[Tensor, "rows"], tokens: Int[Tensor, "rows seq"]) -> None:
        """What is right of a row's end is never seen: attention is causal, and steps overwrite its slots in turn."""
        positions = torch.arange(tokens.shape[1], device=self.device)
        with evaluating(self.model), autocast(self.device, precision_of(self.dtype)):
            x = self.model.token_embeddings(tokens)
            for index, layer in enumerate(self.model.layers):
                x = layer(x, positions, None, _Slots(rows, self.keys[index], self.values[index]))

    @torch.no_grad()
    def decode(
        self, num_tokens: int, uniforms: Float[Tensor, "num_tokens B"] | None = None
    ) -> Int[Tensor, "num_tokens B"]:
        """The next `num_tokens` tokens of every row (at most `capacity`), on the device; the host does not wait.

        A token is -1 where the logits it was to be taken from were not finite. `uniforms`, from [0, 1), are what
        tokens are drawn with unless `config.temperature` is 0. A row must not outgrow its slots: from then on its
        tokens mean nothing.
        """
        require(
            0 < num_tokens <= self.capacity, f"decode takes 1 to {self.capacity} tokens at a time, not {num_tokens}."
        )
        ring = torch.arange(self._done, self._done + num_tokens, device=self.device) % self.capacity
        if self.config.temperature > 0:
            require(uniforms is not None, "decode needs uniforms to draw tokens with.")
            self._uniforms[ring] = uniforms.to(self._uniforms)
        with on_device_of(self._x):
            for _ in range(num_tokens):
                if self.device.type == "cuda":
                    self._replay()
                else:
                    self._step()
        self._done += num_tokens
        return self._tokens[ring]

    def _replay(self) -> None:
        if self._graph is None:
            state = (self._x, self._copy, self._positions, self._steps, self._tokens)
            kept = [tensor.clone() for tensor in state]
            self._step()  # compiles the kernels, and is undone
            for tensor, before in zip(state, kept, strict=True):
                tensor.copy_(before)
            self._graph = torch.cuda.CUDAGraph()
            # a stream of this device: PyTorch's default is one of the first device that anything was captured on
            with torch.cuda.graph(self._graph, stream=torch.cuda.Stream()):
                self._step()
        self._graph.replay()

    def _step(self) -> None:
        """One token for every row, from the residual stream of its last one."""
        x, copy, rope = self._x, self._copy, self._rope
        for index, layer in enumerate(self._layers):
            ops.norm_linear(copy, layer.qkv, self._qkv, overlap=index > 0)
            ops.attend(
                self._qkv, rope.cos, rope.sin, self.keys[index], self.values[index], self._positions,
                self._heads, self._parts, self._lse, overlap=True,
            )  # fmt: skip
            ops.linear_add(self._heads, layer.output, x, copy, self._sums, self._counts, overlap=True)
            ops.norm_swiglu(copy, layer.gate_up, self._hidden, overlap=True)
            ops.linear_add(self._hidden, layer.down, x, copy, self._sums, self._counts, overlap=True)
        ops.norm_linear(copy, self._head, self._logits, overlap=True)
        embedding = self.model.token_embeddings.weight
        sequences = ops.Sequences(self._tokens, self._steps, self._positions, embedding, x, copy, self.num_slots)
        if self.config.temperature == 0:
            ops.greedy(self._logits, self.num_ids, sequences, overlap=True)
        else:
            ops.sampled(self._logits, self.num_ids, self.config, self._uniforms, sequences, overlap=True)


class _Slots:
    """Takes the keys and values of a prompt from the plain model into the static cache."""

    def __init__(self, rows: Int[Tensor, "rows"], keys: Tensor, values: Tensor):
        self.rows, self.keys, self.values = rows, keys, values

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        length = k.shape[-2]
        self.keys[self.rows, :, :length] = k.to(self.keys.dtype)
        self.values[self.rows, :, :length] = v.to(self.values.dtype)
        return k, v


def _num_parts(num_heads: int, num_slots: int) -> int:
    """Into how many parts the keys of each of so many heads are split, a power of two: about 256 programs."""
    parts = 1
    while parts < 16 and parts * num_heads < 192 and 2 * parts * KEYS_PER_PART <= num_slots:
        parts *= 2
    return parts
