"""All cells of the benchmark, the most important first; small ones of every kind to try the command with; targets."""

from dataclasses import replace
from typing import Any

from .rows import CUDNN, FLASH, OURS, Cell

HUGGING_FACE = ("HF eager", "HF compiled", "HF compiled + CUDA graph")
HF_BEST = HUGGING_FACE[-1]
GENERATE, GRAPH = "HF generate, static cache", "HF static cache, compiled + CUDA graph"
CUMULATIVE = (
    "plain, eager", "+ sdpa", "+ flash attention", "+ torch.compile", "+ fused loss", "+ fused AdamW",
    "+ one CUDA graph",
)  # fmt: skip
"""Cumulative optimizations of a step: each adds to the last."""

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
TOKENS = 16384
"""Tokens of an attention call in the figure by length: the batch shrinks as the sequences grow."""
SWEPT = (CUDNN, FLASH, "lmcore flash")


def cells() -> list[Cell]:
    """The cells that an H200 is measured with; `estimate` is what each takes there with 2.5 seconds of turns."""
    adamw = {"d_model": 2560, "d_ff": 10496, "blocks": 10, "parameters": 1_068_288_000}
    loss = {"rows": 16384, "d_model": 768, "vocab_size": 50_257, "precision": "bf16"}
    return [
        *(attention_cell(128, n, passes, TOKENS // n) for n in (4096, 16384) for passes in ("both", "forward")),
        attention_cell(64, 16384, "both", 1),
        Cell("adamw", "optimizer", "AdamW, 1.07 B fp32 parameters", "speed.kernels:optimizer", adamw, 6),
        Cell("loss", "loss", "linear + cross-entropy, 16,384 × 50,257, d 768, forward + backward",
             "speed.kernels:loss", loss, 14),
        step_cell("tinystories", 32, 256, ("HF eager", HF_BEST, OURS), 32),
        step_cell("tinystories", 256, 256, (HF_BEST, OURS), 24),
        step_cell("small", 4, 1024, (HF_BEST, OURS), 34),
        step_cell("small", 4, 256, (HF_BEST, OURS), 34),
        step_cell("large", 4, 1024, (HF_BEST, OURS), 34),
        step_cell("2.7b", 4, 256, (HF_BEST, OURS), 32),
        decode_cell("small", 1, (GRAPH, OURS), 24),
        decode_cell("2.7b", 1, (GRAPH, OURS), 50),
        *(sweep_cell(head_size, passes) for head_size in (64, 128) for passes in ("both", "forward")),
        Cell("memory-attention", "memory", "memory of attention forward + backward by length",
             "speed.kernels:attention_memory", {"head_size": 64, "heads": 16, "lengths": [*LENGTHS[1:], 32768]}, 16),
        Cell("memory-step", "memory", "memory of a full step by length", "speed.steps:memory",
             {"size": "small", "batch_size": 4, "lengths": [*LENGTHS[:-1]]}, 25),
        replace(step_cell("tinystories", 8, 1024, CUMULATIVE, 48), row="study", group="study",
                work="TinyStories model, 8 × 1,024, one change after the other"),
        *(Cell(f"elementwise-{name}", "elementwise", f"{name}{' forward + backward' * (name != 'rope')}",
               "speed.kernels:elementwise", {"kernel": name, "precision": "bf16"} | sizes, 8)
          for name, sizes in KERNELS.items()),
        decode_cell("small", 64, (GRAPH, OURS), 24),
        decode_cell("small", 8, (GRAPH, OURS), 24),
        # Hugging Face's own loop, with nobody beside it: where it has run, CUDA graphs of others take twice as long
        replace(decode_cell("small", 1, (GENERATE,), 40), row="decode-small-1-generate",
                work="decode, batch 1, small, Hugging Face's own loop"),
    ]  # fmt: skip


KERNELS = {
    "rmsnorm": {"rows": 65536, "d_model": 768},
    "rope": {"rows": 65536, "heads": 12, "head_size": 64, "context_length": 1024},
    "swiglu": {"rows": 32768, "d_ff": 3072},
}
"""Elementwise kernels and their sizes, all well beyond a cache's."""


def attention_cell(
    head_size: int, length: int, passes: str, batch_size: int, heads: int = 16, contestants: tuple[str, ...] = ()
) -> Cell:
    """Causal attention. Compiling FlexAttention takes seconds: it takes part where both passes are measured."""
    both = passes == "both"
    flex = ("FlexAttention",) if both else ()
    settings = {"batch_size": batch_size, "heads": heads, "context_length": length, "head_size": head_size,
                "causal": True, "passes": passes, "precision": "bf16",
                "contestants": list(contestants or (CUDNN, FLASH, *flex, "lmcore flash"))}  # fmt: skip
    words = "forward + backward" if both else "forward"
    work = f"attention {words}, causal, head size {head_size}, {length:,} positions"
    name = f"attention-{head_size}-{length}-{passes}"
    return Cell(name, "attention", work, "speed.kernels:attention", settings, 16 if both else 9)


def sweep_cell(head_size: int, passes: str) -> Cell:
    """The lengths that have no cell of their own, for the figure."""
    done = {(128, 4096, passes), (128, 16384, passes), (64, 16384, "both")}
    lengths = [length for length in LENGTHS if (head_size, length, passes) not in done]
    settings = {"head_size": head_size, "passes": passes, "lengths": lengths, "tokens": TOKENS, "heads": 16}
    return Cell(f"attention-{head_size}-sweep-{passes}", "sweep", f"attention by length, head size {head_size}",
                "speed.kernels:lengths", settings, 9)  # fmt: skip


def step_cell(size: str, batch_size: int, length: int, contestants: tuple[str, ...], estimate: float) -> Cell:
    """A full training step; the vocabulary is that of CS336 A2 (section 1.1.2)."""
    settings = {"size": size, "batch_size": batch_size, "context_length": length, "vocab_size": 10_000,
                "precision": "bf16", "contestants": list(contestants)}  # fmt: skip
    name = {"tinystories": "TinyStories"}.get(size, size)
    return Cell(f"step-{size}-{batch_size}x{length}", "step", f"{name} model, {batch_size} × {length:,}, full step",
                "speed.steps:measure", settings, estimate)  # fmt: skip


def decode_cell(size: str, batch_size: int, contestants: tuple[str, ...], estimate: float) -> Cell:
    """Decoding of 256 tokens after a prompt of 16."""
    settings = {"size": size, "batch_size": batch_size, "prompt_tokens": 16, "new_tokens": 256, "context_length": 512,
                "vocab_size": 10_000, "precision": "bf16", "contestants": list(contestants)}  # fmt: skip
    return Cell(f"decode-{size}-{batch_size}", "decode", f"decode, batch {batch_size}, {size}",
                "speed.decode:measure", settings, estimate)  # fmt: skip


TOY = {
    "size": "smoke", "batch_size": 2, "context_length": 16, "vocab_size": 512, "prompt_tokens": 4, "new_tokens": 4,
    "heads": 2, "head_size": 16, "rows": 32, "d_model": 32, "d_ff": 64, "blocks": 2, "lengths": [16, 32], "tokens": 64,
}  # fmt: skip


def toy_cells() -> list[Cell]:
    """One cell of every kind at sizes that take seconds on a CPU."""
    kinds: dict[Any, Cell] = {}
    for cell in cells():
        small = {name: TOY.get(name, value) for name, value in cell.settings.items()}
        kind = (cell.group, cell.measure, cell.settings.get("kernel"), str(cell.settings.get("contestants")))
        kinds.setdefault(kind, replace(cell, work=f"{cell.work}, at toy size", settings=small, estimate=1))
    return [*kinds.values()]


def targets() -> list[dict[str, Any]]:
    """What has to be reached, on one H200 in bf16.

    `measure` is a field of our row, or `rate over NAME`: our rate divided by that contestant's in the same row.
    """
    beside = [
        (f"attention-128-{length}-{passes}", f"rate over {peer}", factor, text)
        for length in (4096, 16384)
        for passes in ("forward", "both")
        for peer, factor, text in ((CUDNN, 1.0, "≥ cuDNN"), (FLASH, 1.3, "≥ 1.3 × FA2"))
    ]
    rows = [
        ("step-tinystories-32x256", "median", 2.4, "≤ 2.4 ms"),
        ("step-tinystories-256x256", "median", 14.5, "≤ 14.5 ms"),
        ("step-tinystories-256x256", "share", 0.50, "≥ 50 % MFU"),
        ("step-small-4x256", "median", 3.0, "≤ 3.0 ms"),
        ("step-small-4x1024", "median", 7.4, "≤ 7.4 ms"),
        ("step-large-4x1024", "median", 43.0, "≤ 43 ms"),
        ("step-large-4x1024", "share", 0.60, "≥ 60 % MFU"),
        ("step-2.7b-4x256", "median", 57.0, "≤ 57 ms"),
        ("attention-64-16384-both", "median", 4.4, "≤ 4.4 ms"),
        *beside,
        ("adamw", "median", 7.5, "≤ 7.5 ms"),
        ("adamw", "share", 0.93, "≥ 93 % of copy"),
        ("loss", "median", 7.0, "≤ 7 ms"),
        ("loss", "peak_bytes", 0.7 * 2**30, "≤ 0.7 GiB extra"),
        ("decode-small-1", "rate", 5000, "≥ 5,000 tok/s"),
        ("decode-2.7b-1", "rate", 480, "≥ 480 tok/s"),
    ]
    bounds = {"≤": "at_most", "≥": "at_least"}
    return [
        {"row": row, "measure": measure, bounds[text[0]]: number, "text": text} for row, measure, number, text in rows
    ]
