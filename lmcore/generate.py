"""Decoding: the key-value cache, the loop that samples one token after another, and texts (CSE599-O A1 section 6)."""

from codecs import getincrementaldecoder
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lmcore.config import GenerateConfig, named
from lmcore.device import autocast, require_precision
from lmcore.errors import require
from lmcore.model import TransformerLM, evaluating
from lmcore.sampling import sample_next
from lmcore.tokenizer import Tokenizer

FUSED = "lmcore.fast.generation:fused_generate"
"""Decoding for `GenerateConfig.ops` "fused"."""


class KVCache:
    """Keys and values of one layer, for rows of different lengths.

    Slot s of a row holds its position s, so that rows need no padding between them: a row writes where it stands, and
    the mask lets a query see the slots up to its own position. Memory for `num_slots` positions is taken at the first
    `append`, which brings the dtype (autocast chooses it).
    """

    def __init__(self, num_rows: int, num_slots: int):
        self.num_rows, self.num_slots = num_rows, num_slots
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def place(self, rows: Int[Tensor, "rows"], positions: Int[Tensor, "rows seq"], width: int) -> None:
        """Says which rows and positions the next `append` brings; it returns the first `width` slots of those rows."""
        self.rows, self.positions, self.width = rows, positions, width

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Stores (rows, H, T, K) keys and values at the place set before; returns (rows, H, width, K) of both."""
        if self.keys is None or self.values is None:
            # zeros: a masked slot has weight 0, and 0 times whatever is in fresh memory could be NaN
            shape = (self.num_rows, k.shape[1], self.num_slots, k.shape[3])
            self.keys, self.values = k.new_zeros(shape), v.new_zeros(shape)
        place = (self.rows.unsqueeze(-1), slice(None), self.positions)
        self.keys[place], self.values[place] = k.transpose(1, 2), v.transpose(1, 2)
        return self.keys[self.rows, :, : self.width], self.values[self.rows, :, : self.width]


def plain_forward(
    model: TransformerLM, rows: Sequence[int], windows: Sequence[list[int]]
) -> Float[Tensor, "rows vocab"]:
    """Logits after the last token of `windows[row]` for each of `rows`, by feeding the whole window: the definition."""
    tokens, last = _pad([windows[row] for row in rows], next(model.parameters()).device)
    return model(tokens)[torch.arange(len(rows), device=last.device), last]


class CachedForward:
    """The same logits from a `KVCache` for each layer: a row is fed the tokens that its cache does not hold yet."""

    def __init__(self, model: TransformerLM, num_rows: int, num_slots: int):
        self.model, self.device = model, next(model.parameters()).device
        self.caches = [KVCache(num_rows, num_slots) for _ in range(model.config.num_layers)]
        self.cached = [0] * num_rows

    def __call__(self, rows: Sequence[int], windows: Sequence[list[int]]) -> Float[Tensor, "rows vocab"]:
        for row in rows:
            if self.cached[row] != len(windows[row]) - 1:  # new, or cut to a new window
                self.cached[row] = 0
        logits: dict[int, Tensor] = {}
        for group in ([r for r in rows if self.cached[r]], [r for r in rows if not self.cached[r]]):
            if group:
                logits |= dict(zip(group, self._feed(group, windows), strict=True))
        return torch.stack([logits[row] for row in rows])

    def _feed(self, rows: list[int], windows: Sequence[list[int]]) -> Float[Tensor, "rows vocab"]:
        starts = [self.cached[row] for row in rows]
        tokens, last = _pad([windows[row][start:] for row, start in zip(rows, starts, strict=True)], self.device)
        width = max(starts) + tokens.shape[1]
        offsets = torch.arange(tokens.shape[1], device=self.device)
        positions = torch.tensor(starts, device=self.device).unsqueeze(-1) + offsets
        mask = torch.arange(width, device=self.device) <= positions.unsqueeze(-1)
        for cache in self.caches:
            cache.place(torch.tensor(rows, device=self.device), positions, width)
        for row in rows:
            self.cached[row] = len(windows[row])
        logits = self.model(tokens, positions, mask, self.caches)
        return logits[torch.arange(len(rows), device=self.device), last]


def _pad(sequences: list[list[int]], device: torch.device) -> tuple[Int[Tensor, "rows seq"], Int[Tensor, "rows"]]:
    """Sequences of different lengths as one tensor, filled up on the right, and the index of each one's last token.

    What comes after the last token of a row cannot be seen from it: attention is causal.
    """
    longest = max(map(len, sequences))
    tokens = torch.tensor([sequence + [0] * (longest - len(sequence)) for sequence in sequences], device=device)
    return tokens, torch.tensor([len(sequence) - 1 for sequence in sequences], device=device)


@dataclass(frozen=True)
class Generation:
    """One prompt and what the model made of it. `ids` and `text` are the continuation alone."""

    prompt: str
    text: str
    ids: list[int]
    stop: Literal["end_of_text", "max_new_tokens"]


def generate(
    model: TransformerLM,
    prompts: Sequence[Sequence[int]],
    config: GenerateConfig | None = None,
    eot_id: int | None = None,
    on_token: Callable[[int, int], None] | None = None,
    num_ids: int | None = None,
    on_logits: Callable[[Tensor], None] | None = None,
) -> list[list[int]]:
    """Samples a continuation of every prompt (lists of token ids, of any lengths), all in one batch.

    - Returns the new ids alone. A row ends before the first `eot_id`, if one is given, or at `config.max_new_tokens`.
    - An empty prompt begins a document: it becomes [eot_id].
    - Row i draws from a generator seeded `config.seed` + i: the prompt by itself with that seed gives the same tokens.
    - A window that has outgrown the model's context is cut to its last `context_length // 2` tokens, with positions
      from 0 again, and grows from there: with and without the KV cache.
    - `on_token(row, id)` is called as soon as a token is there, with `config.ops` "fused" a few tokens later.
    - `on_logits(logits)` is called before each draw with the logits of the rows not yet ended, with plain operations.
    - Ids from `num_ids` on are never sampled (a model's vocabulary may be padded to a round size).
    - With `config.ops` "fused" the decoder of `lmcore.fast` makes the same tokens (up to rounding of the logits) where
      it covers the model; a line on stderr says where it does not.

    The model is in evaluation mode meanwhile, and then as it was. Raises `UserError` for a prompt that is too long, or
    empty without `eot_id`, ids outside the vocabulary, no ids to sample from, a precision that the device lacks, and
    logits that are not finite.
    """
    config = config or GenerateConfig()
    windows = [_checked(i, prompt, model, eot_id) for i, prompt in enumerate(prompts)]
    require(num_ids is None or num_ids > 0, f"num_ids must be at least 1 or None, not {num_ids}.")
    if not windows:
        return []
    device = next(model.parameters()).device
    if config.precision != "fp32":
        require_precision(device, config.precision)
    if config.ops == "fused" and on_logits is None:
        with autocast(device, config.precision):
            outputs = named(FUSED)(model, windows, config, eot_id, on_token, num_ids)
        if outputs is not None:
            return outputs
    outputs = [[] for _ in windows]
    generators = [torch.Generator().manual_seed(config.seed + row) for row in range(len(windows))]
    context = model.config.context_length
    forward: Callable = partial(plain_forward, model)
    if config.kv_cache:
        forward = CachedForward(model, len(windows), min(context, max(map(len, windows)) + config.max_new_tokens))
    active = list(range(len(windows)))
    with autocast(device, config.precision), evaluating(model), torch.no_grad():
        while active:
            logits = forward(active, windows)[:, :num_ids]
            if on_logits is not None:
                on_logits(logits)
            ids = sample_next(logits, config, [generators[row] for row in active]).tolist()
            going = []
            for row, token in zip(active, ids, strict=True):
                if token == eot_id:
                    continue
                outputs[row].append(token)
                if on_token is not None:
                    on_token(row, token)
                windows[row].append(token)
                if len(windows[row]) > context:
                    windows[row] = windows[row][-max(1, context // 2) :]
                if len(outputs[row]) < config.max_new_tokens:
                    going.append(row)
            active = going
    return outputs


def _checked(index: int, prompt: Sequence[int], model: TransformerLM, eot_id: int | None) -> list[int]:
    """The prompt as a fresh list, or the reason why it cannot be continued."""
    ids, context, vocab = [int(token) for token in prompt], model.config.context_length, model.config.vocab_size
    if not ids:
        require(eot_id is not None, f"Prompt {index} is empty: give it a token, or eot_id to begin a document with.")
        ids = [int(eot_id or 0)]
    fits, known = len(ids) <= context, all(0 <= token < vocab for token in ids)
    require(fits, f"Prompt {index} has {len(ids)} tokens; the model's context_length is {context}: shorten it.")
    require(
        known, f"Prompt {index} holds ids that are not from 0 to {vocab - 1}: encode it with the model's tokenizer."
    )
    return ids


def generate_text(
    model: TransformerLM,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    config: GenerateConfig | None = None,
    *,
    stop_at_end_of_text: bool = True,
    stream: Callable[[int, str], None] | None = None,
) -> list[Generation]:
    """Continues every prompt with text; see `generate` for the rules. An empty prompt begins a document.

    With `stop_at_end_of_text` false, `<|endoftext|>` is part of the text and the next document follows it, until
    `config.max_new_tokens`. `stream(index, piece)` is called with pieces of whole characters as they are sampled.
    Raises `UserError` as `generate` does, and if the tokenizer has more tokens than the model.
    """
    config = config or GenerateConfig()
    require(
        tokenizer.vocab_size <= model.config.vocab_size,
        f"The tokenizer has {tokenizer.vocab_size} tokens, the model knows {model.config.vocab_size}: "
        "use the tokenizer that the model was trained with.",
    )
    prompt_ids = [tokenizer.encode(prompt) or [tokenizer.eot_id] for prompt in prompts]
    # a token may end in the middle of a character: its bytes wait for the rest
    decoders = [getincrementaldecoder("utf-8")("replace") for _ in prompts]

    def emit(row: int, data: bytes, final: bool = False) -> None:
        if stream is not None and (piece := decoders[row].decode(data, final)):
            stream(row, piece)

    eot_id = tokenizer.eot_id if stop_at_end_of_text else None
    on_token = None if stream is None else lambda row, token: emit(row, tokenizer.decode_bytes([token]))
    outputs = generate(model, prompt_ids, config, eot_id, on_token, num_ids=tokenizer.vocab_size)
    for row in range(len(prompts)):
        emit(row, b"", final=True)
    return [
        Generation(
            prompt=prompt,
            text=tokenizer.decode(ids),
            ids=ids,
            stop="max_new_tokens" if len(ids) == config.max_new_tokens else "end_of_text",
        )
        for prompt, ids in zip(prompts, outputs, strict=True)
    ]
