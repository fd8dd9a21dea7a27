"""The loop of `lmcore.generate.generate` around a `FusedDecoder`: the host runs ahead and reads tokens back later."""

import sys
from collections.abc import Callable

import torch
from torch import Tensor

from lmcore.config import GenerateConfig
from lmcore.errors import require
from lmcore.fast.decoder import FusedDecoder, unsupported_reason
from lmcore.model import TransformerLM
from lmcore.sampling import require_finite

LOOK_EVERY = 16
"""So many tokens are on their way before the host looks at those before them: whether all rows have ended."""


def fused_generate(
    model: TransformerLM,
    windows: list[list[int]],
    config: GenerateConfig,
    eot_id: int | None = None,
    on_token: Callable[[int, int], None] | None = None,
    num_ids: int | None = None,
) -> list[list[int]] | None:
    """The same tokens, up to rounding of the logits, as `lmcore.generate.generate` with checked `windows`.

    Rows that have ended are computed on until all have; what they say then is dropped. `on_token` is called in the
    same order, a few tokens later. None where the decoder does not cover the model, with a line on stderr that says
    why. Raises `UserError` where `generate` does, and for a `config` without a KV cache.
    """
    require(config.kv_cache, "The fused decoder always has a KV cache: leave kv_cache on, or take ops=plain.")
    weight = model.token_embeddings.weight
    device, dtype = weight.device.type, weight.dtype
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    if (reason := unsupported_reason(model.config, dtype)) is not None:
        print(f"Decoding with plain operations, as the fused decoder does not cover {reason}.", file=sys.stderr)
        return None
    return _Generation(model, windows, config, dtype, eot_id, on_token, num_ids).run()


class _Generation:
    def __init__(self, model, windows, config, dtype, eot_id, on_token, num_ids):
        self.windows, self.config, self.eot_id, self.on_token = [list(w) for w in windows], config, eot_id, on_token
        self.context = model.config.context_length
        num_slots = min(self.context, max(map(len, windows)) + config.max_new_tokens)
        self.decoder = FusedDecoder(model, len(windows), num_slots, dtype, config, num_ids)
        self.generators = [torch.Generator().manual_seed(config.seed + row) for row in range(len(windows))]
        self.outputs: list[list[int]] = [[] for _ in windows]
        self.active = list(range(len(windows)))
        self.lengths = [len(window) for window in windows]
        """Of each row's window, with the tokens that are on their way."""

    def run(self) -> list[list[int]]:
        self.decoder.place(self.active, self.windows)
        waiting, left = [], self.config.max_new_tokens
        while left and self.active:
            room = min(self.context - self.lengths[row] for row in self.active)
            # the step after the last that fits gives one token more than the window holds
            steps = min(LOOK_EVERY, left, room + 1)
            left -= steps
            waiting.append(self._launch(steps))
            if len(waiting) > 1:
                self._read(*waiting.pop(0))
            if room < steps:
                self._read(*waiting.pop())
                self._cut()
        for chunk in waiting:
            self._read(*chunk)
        return self.outputs

    def _launch(self, steps: int) -> tuple[Tensor, torch.cuda.Event | None]:
        """The tokens of the next steps, (steps, B), on their way to the host, and when they have arrived."""
        uniforms = None
        if self.config.temperature > 0:
            uniforms = torch.stack([torch.rand(steps, generator=each) for each in self.generators], dim=1)
        tokens = self.decoder.decode(steps, uniforms)
        self.lengths = [length + steps for length in self.lengths]
        if tokens.device.type != "cuda":
            return tokens, None
        on_host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
        on_host.copy_(tokens, non_blocking=True)
        return on_host, torch.cuda.current_stream(tokens.device).record_event()

    def _read(self, chunk: Tensor, arrived: torch.cuda.Event | None) -> None:
        if arrived is not None:
            arrived.synchronize()
        for tokens in chunk.tolist():
            require_finite(all(tokens[row] >= 0 for row in self.active))
            going = []
            for row in self.active:
                if tokens[row] == self.eot_id:
                    continue
                self.outputs[row].append(tokens[row])
                self.windows[row].append(tokens[row])
                if self.on_token is not None:
                    self.on_token(row, tokens[row])
                going.append(row)
            self.active = going

    def _cut(self) -> None:
        """Windows that have outgrown the context keep their last half, from position 0 again."""
        full = [row for row in self.active if len(self.windows[row]) > self.context]
        for row in full:
            self.windows[row] = self.windows[row][-max(1, self.context // 2) :]
            self.lengths[row] = len(self.windows[row])
        if full:
            self.decoder.place(full, [self.windows[row] for row in full])
