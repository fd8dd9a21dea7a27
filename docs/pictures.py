"""Draws the pictures that explain an idea in the notebooks: `python docs/pictures.py` writes figures/pictures/*.svg.

Each is a function named like its file. They have a light ground of their own, so that they are read on a dark page too,
and type that is read on a telephone. Numbers in them are computed by the library where it has them.
"""

import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib
import numpy as np
import torch
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from lmcore.accounting import num_parameters
from lmcore.config import GenerateConfig, model_config
from lmcore.functional import softmax
from lmcore.model import RotaryPositionalEmbedding
from lmcore.optimizer import get_lr_cosine_schedule
from lmcore.sampling import next_token_distribution
from workbook.report.figures import PALETTE, save_figure

BLUE, ORANGE, GREEN, VIOLET, YELLOW, WINE, SKY, TAN = PALETTE[:8]
INK, FAINT, GROUND, LINE = "#1d2530", "#6b7480", "#fbfbf9", "#c9ced6"
FOLDER = Path(__file__).parents[1] / "figures" / "pictures"


def canvas(width: float = 5.4, height: float = 2.6, x: float = 10.0, y: float = 4.0) -> Axes:
    """An empty sheet of `width` by `height` inches whose coordinates run from 0 to `x` and `y`."""
    figure, ax = plt.subplots(figsize=(width, height), facecolor=GROUND)
    ax.set(xlim=(0, x), ylim=(0, y))
    ax.axis("off")
    figure.subplots_adjust(0.01, 0.01, 0.99, 0.99)
    return ax


def plot(width: float = 5.4, height: float = 2.6, columns: int = 1, **labels: object) -> list[Axes]:
    """Axes side by side for curves of real numbers."""
    _, axes = plt.subplots(1, columns, figsize=(width, height), facecolor=GROUND, layout="constrained", squeeze=False)
    for ax in axes[0]:
        ax.set(facecolor=GROUND, **labels)
        ax.spines[["top", "right"]].set_visible(False)
    return [*axes[0]]


def box(
    ax: Axes,
    x: float,
    y: float,
    w: float,
    h: float,
    text: str = "",
    color: str = BLUE,
    alpha: float = 0.18,
    size: float = 9,
    edge: str = "",
) -> None:
    """A rounded box with its lower left corner at (x, y), its text in the middle."""
    style = "round,pad=0,rounding_size=0.08"
    ax.add_patch(FancyBboxPatch((x, y), w, h, boxstyle=style, facecolor=color, alpha=alpha, linewidth=0))
    ax.add_patch(FancyBboxPatch((x, y), w, h, boxstyle=style, fill=False, edgecolor=edge or color, linewidth=1))
    ax.text(x + w / 2, y + h / 2, text, ha="center", va="center", fontsize=size, color=INK)


def arrow(
    ax: Axes, start: tuple[float, float], end: tuple[float, float], color: str = FAINT, bend: float = 0.0
) -> None:
    """An arrow from one point to another."""
    style = {"arrowstyle": "-|>", "mutation_scale": 11, "linewidth": 1.3, "shrinkA": 0, "shrinkB": 0}
    ax.add_patch(FancyArrowPatch(start, end, color=color, connectionstyle=f"arc3,rad={bend}", **style))


def note(
    ax: Axes, x: float, y: float, text: str, color: str = FAINT, size: float = 8.5, ha: str = "left", va: str = "center"
) -> None:
    """Words beside something."""
    ax.text(x, y, text, color=color, fontsize=size, ha=ha, va=va)


def bpe_merges() -> None:
    ax = canvas(5.4, 2.9, 10, 5)
    steps = [
        ["n", "e", "w", "e", "s", "t"],
        ["n", "e", "w", "e", "st"],
        ["n", "e", "w", "est"],
        ["n", "ew", "est"],
        ["new", "est"],
    ]
    merged = ["", "s + t", "e + st", "e + w", "n + ew"]
    for level, (parts, rule) in enumerate(zip(steps, merged, strict=True)):
        at, y = 2.6, 4.3 - level * 0.95
        note(ax, 2.3, y + 0.28, f"merge {level}: {rule}" if rule else "bytes", ha="right")
        for part in parts:
            new = rule and part == rule.replace(" + ", "")
            box(ax, at, y, 0.95 * len(part) - 0.08, 0.56, part, ORANGE if new else BLUE)
            at += 0.95 * len(part)
    note(ax, 8.6, 0.78, "2 tokens for\n6 bytes", INK)


def block_shapes() -> None:
    ax = canvas(5.4, 3.2, 12, 6)
    names = ["RMSNorm", "attention", "+", "RMSNorm", "SwiGLU", "+"]
    shapes = ["", "heads see\nother positions", "", "", "each position\nalone", ""]
    colors = [GREEN, BLUE, FAINT, GREEN, ORANGE, FAINT]
    at = [1.9, 3.7, 5.6, 6.7, 8.5, 10.4]
    width = [1.55, 1.5, 0.6, 1.55, 1.5, 0.6]
    for x, w, name, words, color in zip(at, width, names, shapes, colors, strict=True):
        box(ax, x, 2.4, w, 1.0, name, color)
        note(ax, x + w / 2, 1.8, words, ha="center", size=7.5)
    for first, second in zip(range(6), range(1, 6), strict=False):
        arrow(ax, (at[first] + width[first], 2.9), (at[second], 2.9))
    arrow(ax, (0.3, 2.9), (at[0], 2.9))
    arrow(ax, (at[5] + 0.6, 2.9), (11.8, 2.9))
    for begin, end in ((1.2, 5.9), (6.4, 10.7)):
        arrow(ax, (begin, 2.95), (end, 3.42), VIOLET, -0.35)
    note(ax, 0.1, 3.5, "(batch, seq,\n  d_model)", INK, 7.5)
    note(ax, 6.0, 5.2, "the residual stream goes around both branches: its shape never changes", VIOLET, ha="center")
    note(ax, 4.45, 0.9, "(batch, heads, seq, d_k)", INK, 7.5, ha="center")
    note(ax, 9.25, 0.9, "(batch, seq, d_ff)", INK, 7.5, ha="center")


def residual_stream() -> None:
    ax = canvas(5.4, 2.5, 12, 4)
    ax.plot([0.4, 11.4], [1.0, 1.0], color=VIOLET, linewidth=5, alpha=0.6)
    note(ax, 0.4, 0.45, "token embeddings", INK)
    note(ax, 11.5, 0.45, "logits", INK, ha="right")
    for layer in range(3):
        for number, (name, color) in enumerate((("attention", BLUE), ("SwiGLU", ORANGE))):
            x = 1.3 + layer * 3.4 + number * 1.7
            box(ax, x, 2.3, 1.3, 0.7, name, color, size=8)
            arrow(ax, (x + 0.2, 1.08), (x + 0.3, 2.28))
            arrow(ax, (x + 1.0, 2.28), (x + 1.2, 1.1), color)
        note(ax, 2.8 + layer * 3.4, 3.45, f"layer {layer + 1}", ha="center")
    note(ax, 6.4, 0.45, "each branch reads it, and adds to it", VIOLET, ha="center")


def causal_mask() -> None:
    ax = canvas(5.2, 3.0, 9, 6)
    words = ["Once", "upon", "a", "time", ","]
    for i, query in enumerate(words):
        note(ax, 2.6, 4.55 - i * 0.8, query, INK, ha="right")
        note(ax, 3.25 + i * 0.9, 5.3, words[i], INK, ha="center", size=8)
        for j in range(len(words)):
            seen = j <= i
            box(
                ax,
                2.85 + j * 0.9,
                4.2 - i * 0.8,
                0.8,
                0.7,
                "" if seen else "−∞",
                BLUE if seen else FAINT,
                0.45 if seen else 0.08,
                8,
            )
    note(ax, 1.2, 2.95, "query", ha="center")
    note(ax, 5.1, 5.8, "key", ha="center")
    note(ax, 7.6, 4.55, "sees itself", ha="left", size=8)
    note(ax, 7.6, 1.35, "sees all\nbefore it", ha="left", size=8)


def rope_rotation() -> None:
    axes = plot(5.4, 2.9, 2, xlim=(-1.25, 1.25), ylim=(-0.35, 1.25), aspect="equal", xticks=[], yticks=[])
    vectors, rope = (
        torch.tensor([[1.0, 0.0], [math.cos(0.5), math.sin(0.5)]]),
        RotaryPositionalEmbedding(10_000.0, 2, 64),
    )
    for ax, first, title in zip(axes, (0, 1), ("positions 0 and 1", "positions 1 and 2"), strict=True):
        turned = rope(vectors, torch.tensor([first, first + 1]))
        for vector, name, color in zip(turned.tolist(), ("query", "key"), (BLUE, ORANGE), strict=True):
            ax.annotate("", vector, (0, 0), arrowprops={"arrowstyle": "-|>", "color": color, "linewidth": 2})
            ax.text(vector[0] * 1.12, vector[1] * 1.12, name, color=color, ha="center", va="center", fontsize=9)
        score = float(turned[0] @ turned[1])
        ax.set_title(title, fontsize=9, color=INK)
        ax.text(0, -0.27, f"score {score:.3f}", ha="center", fontsize=9, color=INK)
        ax.spines[:].set_visible(False)
        ax.axhline(0, color=LINE, linewidth=0.8, zorder=0)


def softmax_shift() -> None:
    axes = plot(5.4, 2.4, 3, ylim=(0, None), xticks=range(3))
    logits = torch.tensor([2.0, 1.0, -1.0])
    for ax, shift, words in zip(
        axes, (0.0, 1000.0, None), ("logits", "logits + 1,000", "softmax of both"), strict=True
    ):
        if shift is None:
            ax.bar(range(3), softmax(logits, -1), color=GREEN, width=0.6)
        else:
            ax.bar(range(3), logits + shift, color=BLUE if shift == 0 else ORANGE, width=0.6)
            ax.set_ylim(*((-1.5, 2.5) if shift == 0 else (998.5, 1002.5)))
            overflow = "exp fits" if shift == 0 else "exp overflows"
            ax.text(2.4, 2.2 + shift, overflow, fontsize=8, color=INK, ha="right")
        ax.set_title(words, fontsize=9, color=INK)
        ax.tick_params(labelsize=8)


def warmup_cosine() -> None:
    (ax,) = plot(5.4, 2.4, xlabel="step", ylabel="learning rate")
    rates = [get_lr_cosine_schedule(step, 1e-3, 1e-4, 100, 800) for step in range(1000)]
    ax.plot(rates, color=BLUE, linewidth=2)
    for x, words in ((104, "← warm-up"), (420, "half a cosine"), (820, "minimum")):
        ax.text(x, 1.04e-3, words, fontsize=9, color=FAINT)
    for x in (100, 800):
        ax.axvline(x, color=LINE, linewidth=1)
    ax.set(ylim=(0, 1.15e-3), xlim=(0, 1000))
    ax.ticklabel_format(axis="y", scilimits=(0, 0))


def step_memory() -> None:
    ax = canvas(5.4, 2.2, 10, 3.4)
    parameters = num_parameters(model_config("small"))
    at = 0.5
    for name, color, words in (
        ("weights", BLUE, "as long as\nthe model"),
        ("gradients", ORANGE, "from backward\nto zero_grad"),
        ("moment m", GREEN, "as long as\nthe optimizer"),
        ("moment v", GREEN, ""),
        ("activations", VIOLET, "from forward\nto backward"),
    ):
        width = 1.6 if name != "activations" else 2.6
        box(
            ax,
            at,
            1.5,
            width - 0.1,
            1.0,
            f"{name}\n{4 * parameters / 1e9:.2f} GB" if name != "activations" else "activations\ngrow with the batch",
            color,
        )
        note(ax, at + width / 2, 0.85, words, ha="center", size=8)
        at += width
    note(
        ax, 0.5, 2.95, f"GPT-2 small, float32: 4 bytes × {parameters / 1e6:.0f} million in each of the first four", INK
    )


def kv_cache() -> None:
    ax = canvas(5.4, 2.8, 11, 5)
    words = ["Once", "upon", "a", "time"]
    for step in range(3):
        y = 3.9 - step * 1.45
        note(ax, 0.2, y + 0.25, f"step {step + 1}")
        for j in range(4):
            state = "new" if j == step + 1 else "kept" if j <= step else ""
            if state:
                box(
                    ax,
                    1.6 + j * 1.3,
                    y,
                    1.2,
                    0.6,
                    words[j],
                    ORANGE if state == "new" else BLUE,
                    0.35 if state == "new" else 0.15,
                )
        note(ax, 7.1, y + 0.28, f"1 query, {step + 2} keys and values", INK)
    note(ax, 1.6, 0.35, "kept keys and values", BLUE)
    note(ax, 5.0, 0.35, "the only position that is computed", ORANGE)


def sampling_cuts() -> None:
    axes = plot(5.4, 2.5, 4, ylim=(0, 1), xticks=[])
    logits = torch.tensor([[3.2, 2.6, 2.0, 1.2, 0.6, 0.0]])
    for ax, (title, settings) in zip(
        axes,
        (
            ("temperature 1", {}),
            ("temperature 0.5", {"temperature": 0.5}),
            ("top-k 3", {"top_k": 3}),
            ("top-p 0.7", {"top_p": 0.7}),
        ),
        strict=True,
    ):
        q, _ = next_token_distribution(logits, GenerateConfig(**settings))
        ax.bar(range(6), q[0], color=[BLUE if p > 0 else LINE for p in q[0]], width=0.75)
        ax.bar(range(6), softmax(logits, -1)[0], fill=False, edgecolor=FAINT, width=0.75, linewidth=0.8)
        ax.set_title(title, fontsize=9, color=INK)
        ax.tick_params(labelsize=8)
    axes[0].set_ylabel("probability", fontsize=8)


def launch_bound() -> None:
    ax = canvas(5.4, 3.0, 12, 5.4)
    for y, title, kernel, gap in (
        (3.2, "small kernels: the GPU waits for the CPU", 0.5, 1.2),
        (0.5, "large kernels: the CPU is ahead of the GPU", 1.9, 0.9),
    ):
        note(ax, 0.1, y + 1.75, title, INK)
        note(ax, 0.1, y + 1.1, "CPU")
        note(ax, 0.1, y + 0.3, "GPU")
        free = 0.0
        for number in range(5):
            launch = 1.1 + number * gap
            box(ax, launch, y + 0.85, gap * 0.8, 0.5, "", BLUE, 0.3)
            begin = max(launch + gap * 0.8, free)
            if begin + kernel < 12:
                box(ax, begin, y + 0.05, kernel * 0.97, 0.5, "", ORANGE, 0.4)
            free = begin + kernel


def roofline() -> None:
    (ax,) = plot(5.4, 2.8, xlabel="FLOPs for each byte moved", ylabel="FLOP/s", xscale="log", yscale="log")
    peak, bandwidth = 989e12, 3.35e12
    x = np.logspace(0, 4, 100)
    ax.plot(x, np.minimum(peak, x * bandwidth), color=INK, linewidth=2)
    ax.axvline(peak / bandwidth, color=LINE, linewidth=1)
    ax.text(peak / bandwidth * 1.1, 4e12, f"ridge: {peak / bandwidth:.0f}", fontsize=8, color=FAINT)
    for intensity, name in ((1, "add two tensors"), (4096 / 3, "matmul, 4,096³"), (64, "decode, batch 64")):
        point = intensity, min(peak, intensity * bandwidth)
        ax.plot(*point, "o", color=ORANGE)
        ax.annotate(name, point, (8, -3), textcoords="offset points", fontsize=8, color=ORANGE, va="top")
    ax.set_ylim(1e12, 2e15)
    ax.set_title("H100: memory sets the bound on the left, arithmetic on the right", fontsize=9, color=INK)


def float_bits() -> None:
    ax = canvas(5.4, 2.7, 13.5, 5)
    for level, (name, exponent, mantissa, largest) in enumerate(
        (
            ("float32", 8, 23, "3.4e38"),
            ("bfloat16", 8, 7, "3.4e38"),
            ("float16", 5, 10, "65,504"),
            ("float8 e4m3", 4, 3, "448"),
        )
    ):
        y, w = 3.9 - level * 1.1, 0.2
        note(ax, 2.1, y + 0.3, name, INK, ha="right")
        for bit in range(1 + exponent + mantissa):
            color = FAINT if bit == 0 else ORANGE if bit <= exponent else BLUE
            box(ax, 2.3 + bit * w, y, w * 0.86, 0.6, "", color, 0.45)
        note(ax, 2.5 + (1 + exponent + mantissa) * w, y + 0.3, f"{exponent} + {mantissa} bits, up to {largest}", size=8)
    note(ax, 7.6, 0.75, "exponent: range", ORANGE)
    note(ax, 10.6, 0.75, "mantissa: digits", BLUE)


def gradient_checkpointing() -> None:
    ax = canvas(5.4, 2.8, 11, 5)
    for y, title, kept in (
        (3.0, "every block's activations are kept", range(6)),
        (0.7, "every third input is kept; the rest is computed again", (0, 3)),
    ):
        note(ax, 0.2, y + 1.55, title, INK)
        for number in range(6):
            x = 0.6 + number * 1.7
            box(
                ax,
                x,
                y,
                1.1,
                0.7,
                f"block {number + 1}",
                BLUE if number in kept else FAINT,
                0.35 if number in kept else 0.08,
                8,
            )
            if number in kept:
                ax.plot([x - 0.12], [y + 1.0], "v", color=ORANGE, markersize=7)
            if number < 5:
                arrow(ax, (x + 1.12, y + 0.35), (x + 1.68, y + 0.35))
    note(ax, 7.6, 4.75, "▼ kept in memory", ORANGE)


def flash_tiles() -> None:
    ax = canvas(5.4, 3.2, 11, 6)
    for i in range(4):
        for j in range(4):
            state = "done" if (i, j) in ((2, 0), (2, 1)) else "now" if (i, j) == (2, 2) else "skipped" if j > i else ""
            color = {"done": GREEN, "now": ORANGE, "skipped": FAINT}.get(state, BLUE)
            words = "skip" if j > i else "mask" if i == j else ""
            alpha = {"now": 0.5, "skipped": 0.06}.get(state, 0.18)
            box(ax, 1.6 + j * 1.05, 4.0 - i * 1.05, 0.97, 0.97, words, color, alpha, 8)
    note(ax, 3.7, 5.4, "tiles of keys and values", ha="center")
    note(ax, 1.4, 2.9, "tiles\nof\nqueries", ha="right")
    box(ax, 7.0, 1.7, 3.6, 2.6, "", VIOLET, 0.08)
    note(ax, 7.2, 3.9, "on the chip, for each query", INK)
    for number, words in enumerate(("m: largest score so far", "l: sum of exp(score − m)", "acc: weighted values")):
        note(ax, 7.2, 3.3 - number * 0.55, words, VIOLET)
    arrow(ax, (4.75, 2.4), (6.95, 2.8), ORANGE)
    note(ax, 1.6, 0.45, "a larger m shrinks l and acc: no seq × seq matrix is written")


def flash_recompute() -> None:
    ax = canvas(5.4, 2.6, 11, 4.6)
    for y, title, parts in (
        (
            2.7,
            "plain: the probabilities are kept",
            (("Q, K, V", BLUE, 1.5), ("S = QKᵀ", ORANGE, 2.4), ("P = softmax S", ORANGE, 2.4), ("O", BLUE, 0.9)),
        ),
        (
            0.4,
            "flash: they are computed again from Q, K and the row sums L",
            (("Q, K, V", BLUE, 1.5), ("L", GREEN, 0.7), ("O", BLUE, 0.9)),
        ),
    ):
        note(ax, 0.3, y + 1.4, title, INK)
        at = 0.3
        for name, color, w in parts:
            box(ax, at, y, w, 0.9, name, color, 0.3)
            at += w + 0.2
    note(ax, 8.4, 3.15, "seq × seq numbers", ORANGE)
    note(ax, 4.2, 0.85, "only numbers per position: seq × d and seq", GREEN)


def loss_without_logits() -> None:
    ax = canvas(5.4, 2.8, 11, 5)
    box(ax, 0.4, 1.0, 1.2, 3.0, "hidden\nstates", BLUE)
    box(ax, 2.4, 1.0, 5.0, 3.0, "", FAINT, 0.06)
    for number in range(4):
        now = number == 1
        box(
            ax,
            2.5,
            3.3 - number * 0.73,
            4.8,
            0.64,
            "logits of these rows" if now else "",
            ORANGE if now else FAINT,
            0.4 if now else 0.04,
            8,
        )
    for number in range(4):
        box(ax, 8.2, 3.3 - number * 0.73, 1.0, 0.64, "", GREEN, 0.5 if number < 2 else 0.08)
    note(ax, 4.9, 4.4, "tokens × vocabulary: never whole in memory", INK, ha="center")
    note(ax, 9.4, 2.5, "losses and\ngradients\nstay", GREEN)
    arrow(ax, (1.65, 2.9), (2.45, 2.9))
    arrow(ax, (7.35, 2.9), (8.15, 2.9))


def ring_all_reduce() -> None:
    ax = canvas(5.4, 3.0, 12, 6)
    for number, (title, states) in enumerate(
        (
            ("begin", ("abc",) * 3),
            ("after 2 messages:\na sum of one part each", ("·bc", "ab·", "a·c")),
            ("after 4: all sums\neverywhere", ("···",) * 3),
        )
    ):
        x = 0.4 + number * 4.1
        for rank, state in enumerate(states):
            note(ax, x, 3.9 - rank * 1.2, f"rank {rank}", size=8)
            for part in range(3):
                full = state[part] == "·"
                box(
                    ax,
                    x + 1.0 + part * 0.75,
                    3.55 - rank * 1.2,
                    0.68,
                    0.7,
                    "Σ" if full else "",
                    GREEN if full else BLUE,
                    0.5 if full else 0.15,
                )
        note(ax, x + 1.6, 5.2, title, INK, ha="center")
        if number < 2:
            arrow(ax, (x + 3.35, 2.7), (x + 4.0, 2.7))
    note(ax, 6, 0.4, "each message is a third of the tensor, and each rank sends to the next one only", ha="center")


def overlapped_buckets() -> None:
    ax = canvas(5.4, 2.9, 12, 5.2)
    for y, title, begins in (
        (3.0, "one message after the backward pass", None),
        (0.5, "a message as soon as a bucket is full", (3.3, 5.3, 7.3)),
    ):
        note(ax, 0.2, y + 1.75, title, INK)
        for number in range(3):
            box(ax, 1.3 + number * 2.0, y + 0.85, 1.9, 0.55, f"layers {3 - number}", BLUE, 0.3, 8)
        note(ax, 0.2, y + 1.1, "GPU", size=8)
        note(ax, 0.2, y + 0.35, "links", size=8)
        if begins is None:
            box(ax, 7.3, y + 0.1, 3.9, 0.5, "all gradients", ORANGE, 0.4, 8)
        else:
            for number, begin in enumerate(begins):
                box(ax, begin, y + 0.1, 1.3, 0.5, f"bucket {number + 1}", ORANGE, 0.4, 8)


def zero_partitions() -> None:
    ax = canvas(5.4, 3.0, 12, 6)
    note(ax, 3.4, 5.6, "weights", ha="center")
    note(ax, 5.6, 5.6, "gradients", ha="center")
    note(ax, 9.0, 5.6, "optimizer state", ha="center")
    for level, (name, divided) in enumerate(
        (("data parallel", (0, 0, 0)), ("ZeRO 1", (0, 0, 1)), ("ZeRO 2", (0, 1, 1)), ("ZeRO 3, FSDP", (1, 1, 1)))
    ):
        y = 4.3 - level * 1.25
        note(ax, 2.2, y + 0.4, name, INK, ha="right", size=8.5)
        for (x, w, color), part in zip(((2.4, 2.0, BLUE), (4.6, 2.0, ORANGE), (6.8, 4.2, GREEN)), divided, strict=True):
            box(ax, x, y, w, 0.8, "", FAINT, 0.05)
            box(ax, x, y, w / 4 if part else w, 0.8, "¼" if part else "", color, 0.4)
    note(ax, 7.0, 0.2, "what one of four ranks keeps", ha="center")


def fsdp_gather() -> None:
    ax = canvas(5.4, 2.8, 12, 5)
    for number, (name, filled) in enumerate(
        (("a quarter of the layer", 1), ("all-gather: whole", 4), ("compute", 4), ("free", 1))
    ):
        x = 0.5 + number * 2.95
        for part in range(4):
            box(
                ax,
                x + part * 0.55,
                2.0,
                0.5,
                1.2,
                "",
                BLUE if part < filled else FAINT,
                0.45 if part < filled else 0.05,
            )
        note(ax, x + 1.1, 3.7, name, INK, ha="center", size=8.5)
        if number < 3:
            arrow(ax, (x + 2.3, 2.6), (x + 2.9, 2.6))
    note(ax, 6, 1.2, "layer by layer: while one is computed, the next is gathered", ha="center")
    note(ax, 6, 0.5, "backward: gather again, then reduce-scatter the gradients", ORANGE, ha="center")


def tensor_parallel() -> None:
    ax = canvas(5.4, 3.0, 12, 5.6)
    for rank, y in ((0, 3.2), (1, 1.0)):
        color = BLUE if rank == 0 else ORANGE
        note(ax, 0.2, y + 0.6, f"rank {rank}", color)
        for x, w, words in (
            (1.6, 1.2, "x\n(whole)"),
            (3.4, 2.0, "rows of W1,\nhalf of d_ff"),
            (6.0, 2.0, "columns\nof W2"),
            (8.6, 1.4, "partial\nsums"),
        ):
            box(ax, x, y, w, 1.2, words, color, 0.2, 8)
        for a, b in ((2.8, 3.4), (5.4, 6.0), (8.0, 8.6)):
            arrow(ax, (a, y + 0.6), (b, y + 0.6))
        arrow(ax, (10.0, y + 0.6), (10.6, 2.7), color)
    box(ax, 10.5, 2.1, 1.3, 1.2, "all-\nreduce", GREEN, 0.3, 8)
    note(ax, 6, 5.1, "a feed-forward network on two ranks: one message in the forward pass", INK, ha="center")
    note(ax, 6, 0.4, "SiLU acts on hidden features alone, so nothing is exchanged in between", ha="center")


def pipeline_bubble() -> None:
    ax = canvas(5.4, 2.8, 12, 5)
    stages, batches, w = 4, 4, 0.72
    for stage in range(stages):
        y = 3.6 - stage * 0.85
        note(ax, 0.2, y + 0.3, f"stage {stage + 1}")
        for batch in range(batches):
            box(ax, 1.6 + (stage + batch) * w, y, w * 0.9, 0.6, str(batch + 1), BLUE, 0.35, 8)
            box(
                ax,
                1.6 + (stages + batches - 1 + (stages - 1 - stage) + batch) * w,
                y,
                w * 0.9,
                0.6,
                str(batch + 1),
                ORANGE,
                0.35,
                8,
            )
    note(ax, 1.6, 4.6, "forward", BLUE)
    note(ax, 8.2, 4.6, "backward", ORANGE)
    share = (stages - 1) / (batches + stages - 1)
    note(ax, 1.6, 0.5, f"empty: (stages − 1) / (micro-batches + stages − 1) = {share:.0%}", INK)


def data_splits() -> None:
    ax = canvas(5.4, 2.3, 12, 4)
    for x, w, name, color, words in (
        (0.4, 7.4, "training", BLUE, "weights are fitted to it"),
        (7.9, 1.5, "dev", ORANGE, "chooses rates,\nsteps, recipes"),
        (9.9, 1.8, "validation", GREEN, "read once,\nat the end"),
    ):
        box(ax, x, 2.0, w, 1.0, name, color, 0.3)
        note(ax, x + w / 2, 1.35, words, color, ha="center", size=8)
    note(ax, 4.9, 3.5, "training documents, the last of which are kept apart", ha="center")
    note(
        ax, 6, 0.35, "a choice made on the validation text would make its loss look better than it is", INK, ha="center"
    )


def pictures() -> dict[str, Callable[[], None]]:
    """The functions above that draw a picture, by the name of its file."""
    tools = {"canvas", "plot", "box", "arrow", "note", "pictures", "draw", "save_figure"}
    own = {name: value for name, value in globals().items() if getattr(value, "__module__", "") == __name__}
    return {name: value for name, value in own.items() if callable(value) and name not in tools}


def draw(names: Sequence[str], folder: Path = FOLDER) -> None:
    """Draws the pictures of these names, or all, into a folder."""
    style = {"font.family": "DejaVu Sans", "text.color": INK, "axes.edgecolor": LINE, "axes.labelcolor": INK}
    for name, picture in pictures().items():
        if not names or name in names:
            with matplotlib.rc_context():
                matplotlib.rcdefaults()
                plt.rcParams.update(style)
                picture()
                save_figure(plt.gcf(), folder / f"{name}.svg", facecolor=GROUND)
            plt.close("all")


if __name__ == "__main__":
    draw(sys.argv[1:])
