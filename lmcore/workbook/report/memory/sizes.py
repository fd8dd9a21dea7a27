"""Sentences of notebook 06 on sizes: the residual stream, the largest allocations, predictions against measurement."""

import pandas as pd

from lmcore.config import ModelConfig
from lmcore.profiling.memory.predicted import residual_stream_bytes
from lmcore.workbook.report.answers import format_bytes, format_percent, format_seconds, format_significant, join_words
from lmcore.workbook.report.memory.answers import BASELINE, NO_CELL, span_words
from lmcore.workbook.report.memory.figures import PASSES

MIB = 2**20
"""What the handout calls MB (memory_profiling d): bytes are divided by 1024 twice."""

CLAIM = 0.05
"""Relative error that the prediction claims to stay within."""

WORKSPACE = 2 * 32 * MIB
"""What cuBLAS may take for itself, which is not predicted (see `lmcore.profiling.memory.predicted`)."""


def residual_answer(configs: dict[str, ModelConfig], batch_size: int) -> str:
    """memory_profiling (d): bytes of one float32 tensor of the residual stream, derived; `configs` by size and context.

    MB are the handout's: bytes / 1024^2.
    """
    found = {name: residual_stream_bytes(c, batch_size) for name, c in configs.items()}
    lines = []
    for name, c in configs.items():
        factors = r" \cdot ".join(_in_math(n) for n in (batch_size, c.context_length, c.d_model, 4))
        size = found[name]
        lines.append(f"- {name}: ${factors} = {_in_math(size)}$ bytes, **{format_significant(size / MIB, 3)} MB**")
    listed = "\n".join(lines)
    return (
        "**$B \\cdot T \\cdot d_{\\text{model}} \\cdot 4$ bytes**: a vector of $d_{\\text{model}}$ numbers for each "
        "token of the batch, each of 4 bytes in single precision. MB are here the handout's, bytes divided by "
        f"$1024^2$, which elsewhere are called MiB.\n\n{listed}"
    )


def _in_math(number: int) -> str:
    return f"{number:,}".replace(",", "{,}")


def mebibytes(size: float) -> str:
    """Bytes in MiB, which the handout calls MB."""
    return f"{format_significant(size / MIB, 3)} MiB"


def largest_answer(largest: pd.DataFrame, passes: str = "forward") -> str:
    """memory_profiling (e): the largest allocations of each profiled pass, their source, and which shape is that size.

    In words for the longest context of each size; the table has all.
    """
    rows = largest[largest["passes"] == passes]
    if not len(rows):
        return NO_CELL
    told = rows[rows["precision"] == BASELINE] if BASELINE in set(rows["precision"]) else rows
    longest = told.groupby("size")["context_length"].transform("max") == told["context_length"]
    sentences = [_largest_sentence(part) for _, part in told[longest].groupby("cell", sort=False)]
    by_size = [part.sort_values("context_length", kind="stable") for _, part in rows.groupby("size", sort=False)]
    cells = (cell for part in by_size for _, cell in part.groupby("cell", sort=False))
    table = pd.DataFrame([line for cell in cells for line in _largest_lines(cell)])
    return (
        f"{' '.join(sentences)}\n\nThe three largest sizes of each, in MiB of $1024^2$ bytes (the handout's MB). "
        "Lifetimes are by the host's clock, and end with the record for what is kept:\n\n"
        f"{table.to_markdown(index=False, disable_numparse=True)}"
    )


def _largest_sentence(rows: pd.DataFrame) -> str:
    first = rows.iloc[0]
    top = rows[rows["bytes"] == rows["bytes"].max()]
    count = int(top["count"].sum())
    what = top.iloc[0]["shape"]
    just = f", which is just the size of {what}" if isinstance(what, str) else ""
    verb = "is one allocation" if count == 1 else f"are {count:,} allocations"
    return (
        f"In the {PASSES[first['passes']]} of {first['size']} at context {first['context_length']:,} in "
        f"{first['precision']}, the largest {verb} of **{mebibytes(top.iloc[0]['bytes'])}**{just}, from "
        f"{_sources(top)}."
    )


def _largest_lines(rows: pd.DataFrame) -> list[dict[str, str]]:
    """Lines of the table for one cell: the three largest sizes, each category of them by itself."""
    sizes = sorted(rows["bytes"].unique(), reverse=True)[:3]
    lines = []
    for (size, category), part in rows[rows["bytes"].isin(sizes)].groupby(["bytes", "category"], sort=False):
        shape = part.iloc[0]["shape"]
        lines.append(
            {
                "cell": f"`{part.iloc[0]['cell']}`",
                "each": mebibytes(size),
                "count": f"{int(part['count'].sum()):,}",
                "category": category,
                "lifetime": _lifetime(part),
                "from": _sources(part, most=2),
                "the size of": shape if isinstance(shape, str) else "–",
            }
        )
    return lines


def _lifetime(rows: pd.DataFrame) -> str:
    """The medians of the lifetimes by source line, from the shortest to the longest, and how many were kept."""
    text = span_words(rows["seconds"].min(), rows["seconds"].max(), format_seconds)
    kept, count = int(rows["kept"].sum()), int(rows["count"].sum())
    return f"{text}{f'; {kept:,} kept' if kept < count else ', kept'}" if kept else text


def _sources(rows: pd.DataFrame, most: int = 3) -> str:
    sources = list(dict.fromkeys(rows["source"]))
    named = [f"`{source}`" for source in sources[:most]]
    return join_words(named) if len(sources) <= most else f"{', '.join(named)} and {len(sources) - most} more"


def accounting_answer(peaks: pd.DataFrame, composition: pd.DataFrame) -> str:
    """Predicted peaks (`profiling.memory.predicted`) against the measured ones, and what makes the difference."""
    rows = peaks[(peaks["outcome"] == "complete") & peaks["claimed"].astype(bool)]
    if not len(rows):
        return NO_CELL
    errors = rows["relative_error"].astype(float)
    within = int((errors.abs() <= CLAIM).sum())
    worst = rows.loc[errors.abs().idxmax()]
    counted = f"all {len(rows)} cells" if within == len(rows) else f"{within} of {len(rows)} cells"
    text = (
        f"The predicted peak is within {format_percent(CLAIM, 1)} of the measured one in **{counted}**; the largest "
        f"deviation is {_signed(worst['relative_error'])}, of `{worst['cell']}`."
    )
    differences = rows["peak_bytes"].astype(float) - rows["predicted_bytes"].astype(float)
    least, most = differences.min(), differences.max()
    text += f" Measured minus predicted lies between {_signed_bytes(least)} and {_signed_bytes(most)}"
    gpu = rows["reserved_peak_bytes"].notna().any()
    if gpu and least >= 0 and most <= WORKSPACE:
        text += f", within the {format_bytes(WORKSPACE)} that cuBLAS may take as workspace, which is not predicted"
    text += f". {_difference_by_category(composition)}"
    outside = rows[errors.abs() > CLAIM]
    if len(outside):
        named = [f"`{row['cell']}` ({_signed(row['relative_error'])})" for row in outside.to_dict("records")]
        text += f" Outside: {join_words(named)}."
    return f"{text} {_unfit(peaks)}".strip()


def _unfit(peaks: pd.DataFrame) -> str:
    """What was predicted for the cells that did not fit."""
    lost = peaks[peaks["outcome"] == "out of memory"]
    if not len(lost):
        return ""
    named = [f"`{row['cell']}` {format_bytes(row['predicted_bytes'])}" for row in lost.to_dict("records")]
    return f"Predicted for what did not fit into the memory: {join_words(named)}."


def _difference_by_category(composition: pd.DataFrame) -> str:
    """Which category makes most of the difference, summed over all profiled cells without regard to sign."""
    if not len(composition):
        return ""
    difference = (composition["bytes"].astype(float) - composition["predicted_bytes"].astype(float)).abs()
    by_category = difference.groupby(composition["category"]).sum()
    if not by_category.sum():
        return "Where the peak was taken apart, no category differs."
    name = by_category.idxmax()
    share = by_category[name] / by_category.sum()
    return f"Where the peak was taken apart, {format_percent(share, 2)} of the differences are in the category {name}."


def _signed(value: float) -> str:
    return f"{'+' if value >= 0 else '−'}{format_percent(abs(value), 2)}" if value else "0%"


def _signed_bytes(value: float) -> str:
    return f"{'−' if value < 0 else ''}{format_bytes(abs(value))}"
