"""All cells of the benchmark, the most important first, and small ones of every kind to try the command with."""

from dataclasses import replace

from . import attention, decode, steps
from .rows import Cell

HF_BEST, OURS = "HF compiled + CUDA graph", steps.OURS

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
TOKENS = 16384
"""Tokens of an attention call in the figure by length: the batch shrinks as the sequences grow."""


def cells() -> list[Cell]:
    """The cells that an H200 is measured with; `estimate` is what each takes there with 2.5 seconds of turns."""
    return [
        *(attention_cell(128, length, passes) for length in (4096, 16384) for passes in ("both", "forward")),
        attention_cell(64, 16384, "both"),
        Cell("adamw", "optimizer", "AdamW, 1.07 B fp32 parameters", "speed.optimizer:measure",
             {"d_model": 2560, "d_ff": 10496, "blocks": 10, "parameters": 1_068_288_000}, 6),
        Cell("loss", "loss", "linear + cross-entropy, 16,384 × 50,257, d 768, forward + backward",
             "speed.loss:measure", {"rows": 16384, "d_model": 768, "vocab_size": 50_257, "precision": "bf16"}, 14),
        step_cell("tinystories", 32, 256, ("HF eager", HF_BEST, OURS), 32),
        step_cell("tinystories", 256, 256, (HF_BEST, OURS), 24),
        step_cell("small", 4, 1024, (HF_BEST, OURS), 34),
        step_cell("small", 4, 256, (HF_BEST, OURS), 34),
        step_cell("large", 4, 1024, (HF_BEST, OURS), 34),
        step_cell("2.7b", 4, 256, (HF_BEST, OURS), 32),
        decode_cell("small", 1, (decode.GRAPH, OURS), 24),
        decode_cell("2.7b", 1, (decode.GRAPH, OURS), 50),
        *(sweep_cell(head_size, passes) for head_size in (64, 128) for passes in ("both", "forward")),
        memory_cell(),
        step_memory_cell(),
        Cell("study", "study", "TinyStories model, 8 × 1,024, one change after the other", "speed.steps:measure",
             steps.settings("tinystories", 8, 1024, steps.LADDER), 48),
        *(kernel_cell(name) for name in KERNELS),
        decode_cell("small", 64, (decode.GRAPH, OURS), 24),
        decode_cell("small", 8, (decode.GRAPH, OURS), 24),
        generate_cell(),
    ]  # fmt: skip


def attention_cell(head_size: int, length: int, passes: str) -> Cell:
    """Attention of 16 heads on 16,384 tokens."""
    settings = attention.settings(head_size, length, passes, TOKENS // length)
    return Cell(attention_row(head_size, length, passes), "attention", attention_work(head_size, length, passes),
                "speed.attention:measure", settings, 16 if passes == "both" else 9)  # fmt: skip


def attention_row(head_size: int, length: int, passes: str) -> str:
    """Name of an attention cell."""
    return f"attention-{head_size}-{length}-{passes}"


def attention_work(head_size: int, length: int, passes: str) -> str:
    """An attention cell in words."""
    both = "forward + backward" if passes == "both" else "forward"
    return f"attention {both}, causal, head size {head_size}, {length:,} positions"


def sweep_cell(head_size: int, passes: str) -> Cell:
    """The lengths that have no cell of their own, for the figure."""
    done = {(128, 4096, passes), (128, 16384, passes), (64, 16384, "both")}
    lengths = [length for length in LENGTHS if (head_size, length, passes) not in done]
    settings = {"head_size": head_size, "passes": passes, "lengths": lengths, "tokens": TOKENS, "heads": 16}
    return Cell(f"attention-{head_size}-sweep-{passes}", "sweep", f"attention by length, head size {head_size}",
                "speed.sweeps:lengths", settings, 9)  # fmt: skip


def memory_cell() -> Cell:
    """Attention's memory by length."""
    settings = {"head_size": 64, "heads": 16, "lengths": [1024, 2048, 4096, 8192, 16384, 32768]}
    return Cell("memory-attention", "memory", "memory of attention forward + backward by length",
                "speed.sweeps:attention_memory", settings, 16)  # fmt: skip


def step_memory_cell() -> Cell:
    """A whole step's memory by length."""
    settings = {"size": "small", "batch_size": 4, "lengths": [512, 1024, 2048, 4096, 8192]}
    return Cell("memory-step", "memory", "memory of a full step by length", "speed.sweeps:step_memory",
                settings, 25)  # fmt: skip


def step_cell(size: str, batch_size: int, length: int, contestants: tuple[str, ...], estimate: float) -> Cell:
    """A full training step."""
    name = {"tinystories": "TinyStories"}.get(size, size)
    return Cell(f"step-{size}-{batch_size}x{length}", "step", f"{name} model, {batch_size} × {length:,}, full step",
                "speed.steps:measure", steps.settings(size, batch_size, length, contestants), estimate)  # fmt: skip


def decode_cell(size: str, batch_size: int, contestants: tuple[str, ...], estimate: float) -> Cell:
    """Decoding of 256 tokens after a prompt of 16."""
    settings = {"size": size, "batch_size": batch_size, "prompt_tokens": 16, "new_tokens": 256, "context_length": 512,
                "vocab_size": 10_000, "precision": "bf16", "contestants": list(contestants)}  # fmt: skip
    return Cell(f"decode-{size}-{batch_size}", "decode", f"decode, batch {batch_size}, {size}",
                "speed.decode:measure", settings, estimate)  # fmt: skip


def generate_cell() -> Cell:
    """Hugging Face's own loop, with nobody beside it: where it has run, CUDA graphs of others take twice as long."""
    cell = decode_cell("small", 1, (decode.GENERATE,), 40)
    return replace(cell, row="decode-small-1-generate", work=f"{cell.work}, Hugging Face's own loop")


KERNELS = {
    "rmsnorm": {"rows": 65536, "d_model": 768},
    "rope": {"rows": 65536, "heads": 12, "head_size": 64, "context_length": 1024},
    "swiglu": {"rows": 32768, "d_ff": 3072},
}
"""Elementwise kernels and their sizes, all well beyond a cache's."""


def kernel_cell(name: str) -> Cell:
    """One of our elementwise kernels beside torch.compile."""
    return Cell(f"elementwise-{name}", "elementwise", f"{name} forward + backward" if name != "rope" else "rope",
                "speed.elementwise:measure", {"kernel": name, "precision": "bf16"} | KERNELS[name], 8)  # fmt: skip


def toy_cells() -> list[Cell]:
    """The same work at sizes that take seconds on a CPU."""
    small = {"d_model": 32, "d_ff": 64, "blocks": 2}
    shape = {"size": "smoke", "batch_size": 2, "prompt_tokens": 4, "new_tokens": 4, "context_length": 16}
    return [
        Cell("attention-16-48-forward", "attention", attention_work(16, 48, "forward"), "speed.attention:measure",
             attention.settings(16, 48, "forward", 2, heads=2), 1),
        Cell("attention-16-48-both", "attention", attention_work(16, 48, "both"), "speed.attention:measure",
             attention.settings(16, 48, "both", 2, heads=2), 1),
        Cell("adamw", "optimizer", "AdamW of two small blocks", "speed.optimizer:measure", small, 1),
        Cell("loss", "loss", "linear + cross-entropy, 40 × 130, d 32", "speed.loss:measure",
             {"rows": 40, "d_model": 32, "vocab_size": 130, "precision": "bf16"}, 1),
        step_cell("smoke", 2, 16, ("HF eager", HF_BEST, "lmcore plain", "lmcore compiled", OURS), 1),
        Cell("decode-smoke-2", "decode", "decode, batch 2, smoke", "speed.decode:measure",
             shape | {"vocab_size": 512, "contestants": [decode.GENERATE, decode.GRAPH, OURS]}, 1),
        Cell("attention-16-sweep-both", "sweep", "attention by length, head size 16", "speed.sweeps:lengths",
             {"head_size": 16, "passes": "both", "lengths": [16, 32], "tokens": 64, "heads": 2}, 1),
        Cell("memory-attention", "memory", "memory of attention by length", "speed.sweeps:attention_memory",
             {"head_size": 16, "heads": 2, "lengths": [16, 32]}, 1),
        Cell("memory-step", "memory", "memory of a step by length", "speed.sweeps:step_memory",
             {"size": "smoke", "batch_size": 1, "lengths": [16]}, 1),
        Cell("study", "study", "smoke model, 2 × 16, one change after the other", "speed.steps:measure",
             steps.settings("smoke", 2, 16, steps.LADDER), 1),
        Cell("elementwise-rmsnorm", "elementwise", "rmsnorm forward + backward", "speed.elementwise:measure",
             {"kernel": "rmsnorm", "rows": 32, "d_model": 24}, 1),
        Cell("elementwise-rope", "elementwise", "rope", "speed.elementwise:measure",
             {"kernel": "rope", "rows": 32, "heads": 2, "head_size": 8, "context_length": 16}, 1),
        Cell("elementwise-swiglu", "elementwise", "swiglu forward + backward", "speed.elementwise:measure",
             {"kernel": "swiglu", "rows": 32, "d_ff": 24}, 1),
    ]  # fmt: skip
