"""Figures of notebook 01: what the components do, how a fresh model looks inside, and what models cost."""

from collections.abc import Mapping, Sequence

import matplotlib
import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from lmcore import accounting
from lmcore.config import ModelConfig
from lmcore.functional import silu
from lmcore.model import RotaryPositionalEmbedding
from lmcore.workbook.report.build.answers import KINDS
from lmcore.workbook.report.figures import LEGEND_BESIDE, MUTED, WARNING, category_colors, panels
from lmcore.workbook.report.notebook import token_label

MIN_LABELLED_SHARE = 0.045
"""Smallest part of a bar that has room for its percentage."""


def compression_figure(curve: pd.DataFrame, reference: Mapping[str, float] | None = None) -> Figure:
    """Bytes per token by vocabulary size, with the ratios of other tokenizers as dashed lines."""
    figure, ((axes,),) = panels(1, 1, 2.6)
    axes.plot(curve["vocab_size"], curve["bytes_per_token"], marker="o", markersize=4, label="trained here")
    for label, value in (reference or {}).items():
        axes.axhline(value, color=MUTED, linestyle="--", linewidth=1, label=f"{label} ({value:.2f})")
    axes.set(xlabel="vocabulary size", ylabel="bytes per token")
    axes.set_ylim(bottom=0)
    axes.legend(loc="lower right")
    return figure


def silu_figure() -> Figure:
    """SiLU and ReLU with their derivatives."""
    x = torch.linspace(-6, 6, 481, requires_grad=True)
    figure, ((values, slopes),) = panels(1, 2, 2.5)
    for label, function in (("SiLU", silu), ("ReLU", lambda x: x.clamp(min=0))):
        y = function(x)
        (slope,) = torch.autograd.grad(y.sum(), x)
        values.plot(x.detach(), y.detach(), label=label)
        slopes.plot(x.detach(), slope, label=label)
    values.set(xlabel="x", title="value")
    slopes.set(xlabel="x", title="derivative")
    values.legend(loc="upper left")
    return figure


def rope_figure(rope: RotaryPositionalEmbedding, q: torch.Tensor, k: torch.Tensor, starts: Sequence[int]) -> Figure:
    """Cosines of the angles by position and pair, and the product of q and k by their distance.

    The query stands `distance` after the key, the key at each of `starts`: the lines lie on one another.
    """
    figure, ((angles, products),) = panels(1, 2, 2.7)
    image = angles.imshow(
        rope.cos.T.cpu().numpy(), aspect="auto", cmap="RdBu_r", vmin=-1, vmax=1, interpolation="nearest"
    )
    angles.set(xlabel="position", ylabel="pair of features", title="cosine of the angle")
    angles.grid(visible=False)
    figure.colorbar(image, ax=angles, shrink=0.9)
    distances = torch.arange(len(rope.cos) - max(starts))
    for start, line in zip(starts, ("-", "--", ":"), strict=True):
        turned_q = rope(q.expand(len(distances), -1), distances + start)
        turned_k = rope(k.unsqueeze(0), torch.tensor([start]))
        products.plot(distances, (turned_q * turned_k).sum(-1), line, linewidth=2.4 - 0.5 * starts.index(start))
    products.legend([f"key at {start}" for start in starts], loc="upper right")
    products.set(xlabel="distance of query from key", title="product of query and key")
    return figure


def attention_figure(maps: Mapping[str, torch.Tensor], tokens: Sequence[str] | None = None) -> Figure:
    """Attention weights, or masks, side by side: queries down, keys across, white 0 to dark 1.

    With `tokens`, the texts of the positions stand at the axes.
    """
    columns = min(len(maps), 2 if tokens else 4)
    rows = -(-len(maps) // columns)
    figure, grid = panels(rows, columns, rows * (3.2 if tokens else 1.6) + 0.3, sharey=True)
    for axes, (label, weights) in zip(grid.flat, maps.items(), strict=False):
        image = axes.imshow(weights.cpu().numpy(), cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
        axes.set_title(label, fontweight="normal")
        axes.grid(visible=False)
        if tokens:
            places, labels = range(len(tokens)), [token_label(token) for token in tokens]
            axes.set_xticks(places, labels, rotation=90, fontsize=6, fontfamily="DejaVu Sans Mono")
            axes.set_yticks(places, labels, fontsize=6, fontfamily="DejaVu Sans Mono")
        else:
            axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
            axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    for axes in list(grid.flat)[len(maps) :]:
        axes.set_visible(False)
    figure.supxlabel("key", fontsize=9)
    figure.supylabel("query", fontsize=9)
    figure.colorbar(image, ax=grid, shrink=0.8, aspect=30 if tokens else 15, label="weight")
    return figure


def initialization_figure(weights: Mapping[str, tuple[torch.Tensor, float]]) -> Figure:
    """Histogram of each weight and the density of its truncated normal distribution; label -> (weight, sigma)."""
    figure, grid = panels(1, len(weights), 2.5)
    for axes, (label, (weight, std)) in zip(grid[0], weights.items(), strict=True):
        values = weight.detach().flatten().float().cpu()
        axes.hist(values, bins=60, range=(-3.3 * std, 3.3 * std), density=True, color="C0", alpha=0.55, linewidth=0)
        x = torch.linspace(-3.3 * std, 3.3 * std, 400)
        inside = torch.erf(torch.tensor(3 / 2**0.5))
        density = torch.exp(-0.5 * (x / std) ** 2) / (std * (2 * torch.pi) ** 0.5 * inside)
        axes.plot(x, torch.where(x.abs() <= 3 * std, density, 0), color="black", linewidth=1.2)
        for edge in (-3 * std, 3 * std):
            axes.axvline(edge, color=WARNING, linestyle=":", linewidth=1)
        axes.set_title(f"{label}\nσ = {std:.3g}, measured {values.std():.3g}", fontweight="normal")
        axes.set(xlabel="weight", yticks=[])
        axes.xaxis.set_major_locator(MaxNLocator(5))
    grid[0][0].set_ylabel("density")
    return figure


def norms_figure(tables: Mapping[str, pd.DataFrame], logarithmic: bool = False) -> Figure:
    """Activation size and gradient norm by layer (`lmcore.workbook.inspection.norms_by_layer`) of several models."""
    figure, ((activations, gradients),) = panels(1, 2, 2.7)
    for label, table in tables.items():
        blocks = table[table["layer"] > 0]  # the embedding's gradient is of another kind
        activations.plot(table["layer"], table["activation_rms"], marker="o", markersize=3, label=label)
        gradients.plot(blocks["layer"], blocks["gradient_norm"], marker="o", markersize=3, label=label)
    activations.set(title="size of the residual stream", ylabel="root mean square", xlabel="layer (0: embedding)")
    gradients.set(title="gradient of the block's weights", ylabel="l2 norm", xlabel="layer")
    for axes in (activations, gradients):
        if logarithmic:
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    activations.legend(loc="best")
    return figure


def one_batch_figure(losses: Mapping[str, Sequence[float]], start: float) -> Figure:
    """Loss on one batch that is learned by heart, with the loss of a uniform guess dashed."""
    figure, ((axes,),) = panels(1, 1, 2.6)
    for label, values in losses.items():
        axes.plot(np.arange(len(values)), values, label=label)
    axes.axhline(start, color=MUTED, linestyle="--", linewidth=1, label=f"uniform guess ({start:.2f})")
    axes.set_yscale("log")
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.set_xlim(left=0)
    axes.legend(**LEGEND_BESIDE)
    return figure


def flop_shares_figure(shares: pd.DataFrame) -> Figure:
    """Stacked bars of `lmcore.workbook.report.build.answers.flop_shares`: a bar for each model."""
    figure, ((axes,),) = panels(1, 1, 0.42 * len(shares) + 1.1)
    left = np.zeros(len(shares))
    place = np.arange(len(shares))[::-1]
    for color, (component, column) in zip(category_colors(shares.shape[1]), shares.items(), strict=True):
        axes.barh(place, column, left=left, color=color, height=0.72, label=component, linewidth=0)
        for y, start, share in zip(place, left, column, strict=True):
            if share >= MIN_LABELLED_SHARE:
                ink = "white" if _is_dark(color) else "black"
                axes.text(
                    start + share / 2, y, f"{100 * share:.0f}%", ha="center", va="center", fontsize=7.5, color=ink
                )
        left += column.to_numpy()
    axes.set_yticks(place, shares.index)
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{100 * x:.0f}%"))
    axes.set_xlabel("share of the forward pass's matmul FLOPs")
    axes.grid(visible=False, axis="y")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=3)
    return figure


def memory_figure(config: ModelConfig, batch_sizes: Sequence[int], limit_bytes: float) -> Figure:
    """Memory of a training step with AdamW by kind and batch size (`accounting.adamw_memory`), and a limit."""
    figure, ((axes,),) = panels(1, 1, 3.0)
    memory = pd.DataFrame([accounting.adamw_memory(config, batch_size) for batch_size in batch_sizes]) / 1e9
    bottom = np.zeros(len(batch_sizes))
    for color, (kind, sizes) in zip(category_colors(memory.shape[1]), memory.items(), strict=True):
        axes.bar(range(len(batch_sizes)), sizes, bottom=bottom, color=color, width=0.72, label=KINDS[kind], linewidth=0)
        bottom += sizes.to_numpy()
    for place, total in enumerate(bottom):
        axes.annotate(f"{total:.0f}", (place, total), (0, 2), textcoords="offset points", ha="center", fontsize=8)
    axes.axhline(limit_bytes / 1e9, color=WARNING, linestyle="--", linewidth=1.2, label=f"{limit_bytes / 1e9:.0f} GB")
    axes.set_xticks(range(len(batch_sizes)), [f"{size:,}" for size in batch_sizes])
    axes.set(xlabel="batch size (sequences)", ylabel="GB")
    axes.grid(visible=False, axis="x")
    axes.margins(y=0.08)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], **LEGEND_BESIDE)
    return figure


def _is_dark(color: tuple[float, float, float]) -> bool:
    """Whether white is read better than black on the color."""
    red, green, blue = matplotlib.colors.to_rgb(color)
    return 0.299 * red + 0.587 * green + 0.114 * blue < 0.55
