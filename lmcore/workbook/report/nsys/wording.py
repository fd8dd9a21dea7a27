"""Words that the sentences of notebook 05 share: cells, kernels and ranges of numbers."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from lmcore.workbook.report.answers import format_percent, format_significant, join_words

MISSING = "–"

WORDS: tuple[tuple[str, str], ...] = (
    (r"arange", "positions"),
    (r"Cat", "concatenation"),
    (r"(?i)soft_?max", "softmax"),
    (r"(?i)sigmoid|silu", "sigmoid and SiLU"),
    (r"(?i)\(?max|amax|argmax", "maxima"),
    (r"(?i)mean", "means"),
    (r"(?i)masked_fill|where|bitwise_not|tril|triu|compare|\b(le|lt|ge|gt)\b", "masking"),
    (r"(?i)\(r?sqrt|aten::r?sqrt|\(pow|aten::pow|square", "powers and roots"),
    (r"(?i)\(exp|aten::exp|\(log|aten::log", "exponentials and logarithms"),
    (r"(?i)\(mul|multiplies|aten::mul|_mul_", "multiplication"),
    (r"(?i)\(div|divides|aten::div|trueDiv", "division"),
    (r"(?i)\(add|plus|minus|\(sub|aten::(add|sub|rsub)", "addition and subtraction"),
    (r"(?i)\(neg|aten::neg", "negation"),
    (r"(?i)\(sum|aten::sum|reduce_kernel", "sums"),
    (r"(?i)index|gather|scatter|embedding", "indexing"),
    (r"(?i)copy|clone|memcpy|_to_copy", "copies and casts"),
    (r"(?i)fill|memset|zero", "filling"),
)
"""What PyTorch's kernels and operators compute, by their short names; the first that is found."""


def in_words(short_name: str, kind: str, name: str = "") -> str:
    """What a kernel does, for a sentence: by its short name, else by its full one; its kind where neither says."""
    if kind == "matmul":
        return "matrix multiplication"
    return next(
        (words for each in (short_name, name) for pattern, words in WORDS if re.search(pattern, each)),
        f"other {kind}" if kind != "other" else "other",
    )


def telling(short_name: str, name: str) -> str:
    """A kernel's short name, with the function that its full one quotes where the short one is a launcher's alone."""
    quoted = re.search(r"::(\w+)_kernel\(", name) if re.fullmatch(r"\w*elementwise_kernel", short_name) else None
    return f"{short_name} ({quoted[1]})" if quoted else short_name


GEMM = re.compile(r"sm\d+_(xmma)_gemm_\w*?_([nt]{2})_[nt]_tilesize(\d+x\d+x\d+)\w*")
"""A matrix multiplication of cuBLAS: its family, how its operands lie, its tile; then stages, warps, alignments."""

CUTLASS = re.compile(r"cutlass_\d+_(?:simt_|tensorop_)?(\w*?gemm)_(\d+x\d+)_\w*?_([nt]{2})_align\d+")
"""The same of CUTLASS: what it computes, its tile, how its operands lie."""

ELEMENTWISE = re.compile(r"\b(vectorized_|unrolled_)?elementwise_kernel\b")

LONGEST_NAME = 36


def compact(short_name: str) -> str:
    """A kernel's short name, short enough for a table: of the long ones what tells most of them apart."""
    name = CUTLASS.sub(r"cutlass \1 \3 \2", GEMM.sub(r"\1 gemm \2 \3", short_name))
    name = ELEMENTWISE.sub(lambda found: f"{found[1] or ''}elementwise".replace("_", " "), name)
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…"


def given(value: Any) -> bool:
    """Whether a cell of a table holds a value."""
    return value is not None and not pd.isna(value)


def cell_label(row: Mapping[str, Any]) -> str:
    """A cell in a sentence: small at context 256, with its precision unless that is fp32."""
    precision = "" if row["precision"] == "fp32" else f" in {row['precision']}"
    return f"{size_label(row)} at context {row['context_length']:,}{precision}"


def size_label(row: Mapping[str, Any]) -> str:
    """The name of a model's size, or that of its cell."""
    return row["size"] if given(row["size"]) else row["cell"]


def place(row: Mapping[str, Any]) -> dict[str, str]:
    """First columns of a table for readers."""
    return {"size": size_label(row), "context": f"{row['context_length']:,}", "precision": row["precision"]}


def listed(labels: Sequence[str], most: int = 6) -> str:
    """Labels in a sentence; of many, the first ones and how many more."""
    labels = list(labels)
    if len(labels) <= most:
        return join_words(labels)
    return join_words([*labels[:most], f"{len(labels) - most} more"])


def labels(rows: Iterable[Mapping[str, Any]]) -> str:
    """Cells in a sentence."""
    return listed([cell_label(row) for row in rows])


def percent(value: Any, digits: int = 3) -> str:
    """A share as a percentage, to a tenth of a percent at most."""
    if not given(value):
        return MISSING
    return f"{100 * value:.1f}%" if digits == 3 else format_percent(value, digits)


def between(values: Iterable[float], form: Any = format_significant) -> str:
    """The span of some values: "3.1 to 4.2", or one where they look alike."""
    values = [value for value in values if given(value)]
    low, high = form(min(values)), form(max(values))
    return low if low == high else f"{low} to {high}"


def markdown(rows: Sequence[Mapping[str, str]]) -> str:
    """Rows of text as a Markdown table; columns that say nothing, or the same precision everywhere, are left out."""
    table = pd.DataFrame(rows).fillna(MISSING)
    empty = [name for name in table if (table[name] == MISSING).all()]
    if "precision" in table and set(table["precision"]) == {"fp32"}:
        empty.append("precision")
    return (
        table.drop(columns=empty)
        .map(lambda text: str(text).replace("|", r"\|"))
        .to_markdown(index=False, disable_numparse=True)
    )


def kernel_word(gpu: Any, plural: bool = False) -> str:
    """What was timed: kernels on a GPU, operators on a CPU."""
    return ("kernel" if gpu else "operator") + ("s" if plural else "")


def device_time(gpu: Any) -> str:
    """Whose time it is."""
    return "GPU time" if gpu else "operator time"


def all_cells(count: int) -> str:
    """All of so many cells, in a sentence."""
    return {1: "the one cell", 2: "both cells"}.get(count, f"all {count} cells")
