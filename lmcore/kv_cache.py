"""Logits of the next token: of whole windows, and from a key-value cache (CSE599-O A1 section 6)."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lmcore.model import TransformerLM


class KVCache:
    """Keys and values of one layer, for rows of different lengths (implements `lmcore.model.Cache`).

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


class PlainForward:
    """Next-token logits by feeding the whole window of every row at every step: the definition."""

    def __init__(self, model: TransformerLM):
        self.model, self.device = model, next(model.parameters()).device

    def __call__(self, rows: Sequence[int], windows: Sequence[list[int]]) -> Float[Tensor, "rows vocab"]:
        """Logits after the last token of `windows[row]` for each of `rows`."""
        tokens, last = _pad([windows[row] for row in rows], self.device)
        return self._at(self.model(tokens), last)

    @staticmethod
    def _at(logits: Tensor, last: Tensor) -> Tensor:
        return logits[torch.arange(len(last), device=last.device), last]


class CachedForward(PlainForward):
    """The same logits from a `KVCache` for each layer: a row is fed the tokens that its cache does not hold yet."""

    def __init__(self, model: TransformerLM, num_rows: int, num_slots: int):
        super().__init__(model)
        self.caches = [KVCache(num_rows, num_slots) for _ in range(model.config.num_layers)]
        self.cached = [0] * num_rows

    def __call__(self, rows: Sequence[int], windows: Sequence[list[int]]) -> Float[Tensor, "rows vocab"]:
        for row in rows:
            if self.cached[row] != len(windows[row]) - 1:  # new, or cut to a new window
                self.cached[row] = 0
        logits = {}
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
        return self._at(self.model(tokens, positions, mask, self.caches), last)


def _pad(sequences: list[list[int]], device: torch.device) -> tuple[Int[Tensor, "rows seq"], Int[Tensor, "rows"]]:
    """Sequences of different lengths as one tensor, filled up on the right, and the index of each one's last token.

    What comes after the last token of a row cannot be seen from it: attention is causal.
    """
    longest = max(map(len, sequences))
    tokens = torch.tensor([sequence + [0] * (longest - len(sequence)) for sequence in sequences], device=device)
    return tokens, torch.tensor([len(sequence) - 1 for sequence in sequences], device=device)
