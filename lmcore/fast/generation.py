"""The loop of `lmcore.generate.generate` around a `FusedDecoder`, which the host reads back every few tokens."""

import sys
from collections.abc import Callable

import torch

from lmcore.config import GenerateConfig
from lmcore.errors import require
from lmcore.fast.decoder import FusedDecoder, unsupported_reason
from lmcore.model import TransformerLM
from lmcore.sampling import require_finite

LOOK_EVERY = 32
"""Tokens from one look at whether all rows have ended to the next."""


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
    weight, context = model.token_embeddings.weight, model.config.context_length
    device, dtype = weight.device.type, weight.dtype
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    if (reason := unsupported_reason(model.config, dtype)) is not None:
        print(f"Decoding with plain operations, as the fused decoder does not cover {reason}.", file=sys.stderr)
        return None
    left, num_slots = config.max_new_tokens, min(context, max(map(len, windows)) + config.max_new_tokens)
    decoder = FusedDecoder(model, len(windows), num_slots, dtype, config, num_ids)
    generators = [torch.Generator().manual_seed(config.seed + row) for row in range(len(windows))]
    windows, outputs = [list(window) for window in windows], [[] for _ in windows]
    active = list(range(len(windows)))
    decoder.place(active, windows)
    while left and active:
        # the step after the last that fits gives one token more than the window holds
        steps = min(LOOK_EVERY, left, context + 1 - max(len(windows[row]) for row in active))
        left -= steps
        uniforms = None
        if config.temperature > 0:
            uniforms = torch.stack([torch.rand(steps, generator=each) for each in generators], dim=1)
        for tokens in decoder.decode(steps, uniforms).tolist():
            require_finite(all(tokens[row] >= 0 for row in active))
            active = [row for row in active if tokens[row] != eot_id]
            for row in active:
                outputs[row].append(tokens[row])
                windows[row].append(tokens[row])
                if on_token is not None:
                    on_token(row, tokens[row])
        if full := [row for row in active if len(windows[row]) > context]:
            for row in full:  # windows that have outgrown the context keep their last half, from position 0 again
                windows[row] = windows[row][-max(1, context // 2) :]
            decoder.place(full, [windows[row] for row in full])
    return outputs
