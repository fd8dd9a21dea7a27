"""Sentences of notebook 05 on shares of time: training against inference, softmax against matmuls (parts (d), (e))."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from lmcore.workbook.report.answers import format_seconds, format_significant, join_words
from lmcore.workbook.report.nsys.answers import missing_sentence, nothing_profiled
from lmcore.workbook.report.nsys.wording import (
    MISSING,
    all_cells,
    between,
    cell_label,
    device_time,
    given,
    kernel_word,
    listed,
    markdown,
    percent,
    place,
    size_label,
)

STEADY = 0.01
"""Changes of a share by less than this, one percentage point, are called none."""


def training_answer(table: pd.DataFrame, kinds: pd.DataFrame) -> str:
    """(d): the matmuls' share in a training step against inference, and what becomes of the other kinds."""
    trained = table[table["training_matmul_share"].notna() & table["inference_matmul_share"].notna()]
    if not len(trained):
        inference = table["inference_matmul_share"].dropna()
        only = f" In inference the matrix multiplications take {between(inference, percent)}." if len(inference) else ""
        return f"No training step could be profiled, so there is nothing to compare.{only} {missing_sentence(table)}"
    rows = [_shares_row(row, kinds) for row in table.to_dict("records") if given(row["inference_matmul_share"])]
    text = [
        "The last three columns are shares of the training step.",
        _kinds_sentence(trained, kinds),
        _optimizer_sentence(trained, kinds),
        *_trends(trained),
        missing_sentence(table),
    ]
    return f"{_matmul_sentence(trained)}\n\n{markdown(rows)}\n\n{' '.join(filter(None, text))}"


def _shares_row(row: Mapping[str, Any], kinds: pd.DataFrame) -> dict[str, str]:
    own = kinds[(kinds["cell"] == row["cell"]) & (kinds["range"] == "training")].set_index("kind")["share"]
    absent = row["training_outcome"] if given(row["training_outcome"]) else MISSING
    return place(row) | {
        "matmul, inference": percent(row["inference_matmul_share"]),
        "training step": percent(row["training_matmul_share"]) if len(own) else absent,
        "its forward": percent(row["forward_matmul_share"]),
        "its backward": percent(row["backward_matmul_share"]),
        **{
            title: percent(own.get(kind))
            for title, kind in (
                ("element-wise", "elementwise"),
                ("softmax etc.", "softmax/reduction"),
                ("optimizer", "optimizer"),
            )
        },
    }


def _matmul_sentence(trained: pd.DataFrame) -> str:
    change = (trained["training_matmul_share"] - trained["inference_matmul_share"]).astype(float)
    gpu = trained["gpu"].any()
    text = (
        f"Matrix multiplication takes **{between(trained['inference_matmul_share'], percent)}** of the "
        f"{device_time(gpu)} in inference and **{between(trained['training_matmul_share'], percent)}** in a whole "
        "training step: "
    )
    falls, rises = int((change < -STEADY).sum()), int((change > STEADY).sum())
    cells = len(trained)
    if falls == cells:
        return f"{text}the share **falls** in {all_cells(cells)}, by {_points(-change)} percentage points."
    if rises == cells:
        return f"{text}the share **rises** in {all_cells(cells)}, by {_points(change)} percentage points."
    steady = cells - falls - rises
    clauses = [
        f"{count} {how}" for count, how in ((falls, "fall"), (rises, "rise"), (steady, "stay within a point")) if count
    ]
    return f"{text}of {cells} {'cells' if cells > 1 else 'cell'}, {join_words(clauses)}."


def _points(change: pd.Series) -> str:
    return between(100 * change, lambda value: f"{value:.1f}")


def _kinds_sentence(trained: pd.DataFrame, kinds: pd.DataFrame) -> str:
    """How the other kinds' shares change, by their mean over the cells of each precision."""
    groups = list(trained.groupby("precision", sort=False))
    clauses = []
    for precision, cells in groups:
        moved = _moved(cells, kinds)
        where = f"in {precision} " if len(groups) > 1 else ""
        clauses.append(f"{where}{', '.join(moved) or 'hardly any change'}")
    if all(clause.endswith("hardly any change") for clause in clauses):
        return "The shares of the other kinds hardly change."
    mean = " (mean over the cells)" if len(trained) > len(groups) else ""
    return f"Other kinds, from inference to training step{mean}: {'; '.join(clauses)}."


def _moved(cells: pd.DataFrame, kinds: pd.DataFrame) -> list[str]:
    """The kinds whose mean share over some cells changes, that which changes most first."""
    own = kinds[kinds["cell"].isin(cells["cell"]) & (kinds["kind"] != "matmul")]
    means = own.pivot_table(index="kind", columns="range", values="share", aggfunc="sum").reindex(
        columns=["inference", "training"]
    )
    means = means.fillna(0.0) / len(cells)
    change = (means["training"] - means["inference"]).sort_values(key=abs, ascending=False)
    return [
        f"{kind} {percent(means['inference'][kind])} → {percent(means['training'][kind])}"
        for kind, value in change.items()
        if abs(value) > STEADY
    ]


def _optimizer_sentence(trained: pd.DataFrame, kinds: pd.DataFrame) -> str:
    optimizer = kinds[
        (kinds["range"] == "training") & (kinds["kind"] == "optimizer") & kinds["cell"].isin(trained["cell"])
    ]
    if not len(optimizer):
        return ""
    shares = optimizer["share"]
    gpu = trained["gpu"].any()
    backward = [
        row["backward_kernel_seconds"] / row["forward_kernel_seconds"]
        for row in trained.to_dict("records")
        if given(row["backward_kernel_seconds"]) and row["forward_kernel_seconds"]
    ]
    text = (
        f"The optimizer, which multiplies no matrices, reads weights, gradients and both moments and writes "
        f"weights and moments, takes "
        f"{between(shares, percent)} of a step's {device_time(gpu)}"
    )
    if backward:
        text += f", and the backward pass {between(backward)} times the forward pass's, with twice its matrix products"
    return f"{text}."


def _trends(trained: pd.DataFrame) -> list[str]:
    """How the share in a training step goes with size and with context, where several were measured."""
    reference = trained[trained["precision"] == trained["precision"].iloc[0]]
    sentences = []
    cells = reference.groupby("context_length").size()
    context = max(cells.index, key=lambda length: (cells[length], length))
    sizes = reference[reference["context_length"] == context]
    if len(sizes) > 1:
        shares = [f"{size_label(row)} {percent(row['training_matmul_share'])}" for row in sizes.to_dict("records")]
        sentences.append(
            f"By size, at context {context:,}, the training step's share is {', '.join(shares)}{_way(sizes)}."
        )
    counts = reference.groupby("size", sort=False)["context_length"].nunique()
    if len(counts) and counts.max() > 1:
        size = counts[counts == counts.max()].index[-1]
        rows = reference[reference["size"] == size].sort_values("context_length")
        shares = [
            f"{row['context_length']:,}: {percent(row['training_matmul_share'])}" for row in rows.to_dict("records")
        ]
        sentences.append(f"By context, for {size}: {', '.join(shares)}{_way(rows)}.")
    return sentences


def _way(rows: pd.DataFrame) -> str:
    """Whether a share only rises or only falls along the rows."""
    change = rows["training_matmul_share"].astype(float).diff().dropna()
    if (change > 0).all():
        return ", rising throughout"
    return ", falling throughout" if (change < 0).all() else ""


def copy_ceiling(components: pd.DataFrame, table: pd.DataFrame) -> float | None:
    """Bytes per second of a large copy, as notebook 04 measured it on the device of the profiles; None where not."""
    if not len(components):
        return None
    rates = components.loc[components["device"].isin(table["device"].dropna()), "peak_bytes_per_second"].dropna()
    return float(rates.max()) if len(rates) else None


def softmax_answer(table: pd.DataFrame, attention: pd.DataFrame, ceiling: float | None = None) -> str:
    """(e): softmax against the two matmuls of attention, in time and FLOPs, by context, and why; `ceiling` is
    `copy_ceiling`."""
    if not len(attention):
        if not table["inference_seconds"].notna().any():
            return nothing_profiled(table)
        return (
            "The profiles show no parts of attention: it is fused or compiled, and its softmax is no kernel of its own."
        )
    pairs = softmax_pairs(attention)
    rows = [
        place(row)
        | {
            "softmax": format_seconds(row["softmax_seconds"]),
            "both matmuls": format_seconds(row["matmul_seconds"]),
            "ratio of times": format_significant(row["time_ratio"]),
            "ratio of FLOPs": format_significant(row["flop_ratio"]),
            "scale, mask and copies": format_seconds(row["rest_seconds"]),
            "FLOPs per byte, softmax": format_significant(row["softmax_intensity"], 2),
            "matmuls": format_significant(row["matmul_intensity"], 2),
        }
        for row in pairs.to_dict("records")
    ]
    gpu = bool(pairs["gpu"].any())
    text = [_intensity_sentence(pairs, gpu, ceiling), *_context_trend(pairs, gpu)]
    return f"{_ratio_sentence(pairs)}\n\n{markdown(rows)}\n\n{' '.join(filter(None, text))}".rstrip()


def softmax_pairs(attention: pd.DataFrame) -> pd.DataFrame:
    """A row for each cell of `attention_rows`: the softmax beside both matmuls, in seconds, FLOPs and intensity.

    time_ratio and flop_ratio are softmax over matmuls; slowdown is how many times fewer FLOP/s the softmax reaches.
    """
    rows = []
    for _, part in attention.groupby("cell", sort=False):
        by = {row["part"]: row for row in part.to_dict("records")}
        soft, products = by["softmax"], [by["scores"], by["final matmul"]]
        matmul = {key: sum(row[key] for row in products) for key in ("seconds", "flops", "bytes")}
        if not matmul["seconds"] or not soft["seconds"]:
            continue
        time_ratio, flop_ratio = soft["seconds"] / matmul["seconds"], soft["flops"] / matmul["flops"]
        rows.append(
            {key: soft[key] for key in ("cell", "size", "context_length", "precision", "gpu")}
            | {
                "softmax_seconds": soft["seconds"],
                "matmul_seconds": matmul["seconds"],
                "rest_seconds": by["scale, mask and copies"]["seconds"],
                "time_ratio": time_ratio,
                "flop_ratio": flop_ratio,
                "slowdown": time_ratio / flop_ratio,
                "softmax_intensity": soft["intensity"],
                "matmul_intensity": matmul["flops"] / matmul["bytes"],
                "softmax_bytes_per_second": soft["bytes"] / soft["seconds"],
            }
        )
    return pd.DataFrame(rows)


def _ratio_sentence(pairs: pd.DataFrame) -> str:
    longer = pairs["time_ratio"] > 1
    text = (
        f"Inside attention the softmax takes **{between(pairs['time_ratio'])} times** as long as the two matrix "
        f"multiplications together, with **{between(pairs['flop_ratio'])} times** their FLOPs"
    )
    if longer.all() and len(pairs) > 1:
        text += ": it takes longer everywhere"
    elif longer.any() and len(pairs) > 1:
        text += f": it takes longer in {longer.sum()} of {len(pairs)} cells"
    slow = pairs["slowdown"]
    if (slow > 1).all():
        return f"{text}. For each FLOP it needs {between(slow)} times the time."
    if (slow < 1).all():
        return (
            f"{text}. For each FLOP it even needs less time than the products, as they are too small to be efficient."
        )
    fast = [cell_label(row) for row in pairs[slow <= 1].to_dict("records")]
    return (
        f"{text}. For each FLOP it needs {between(slow)} times the time; only in {listed(fast)} no more "
        "than the products."
    )


def _intensity_sentence(pairs: pd.DataFrame, gpu: bool, ceiling: float | None) -> str:
    if not (pairs["slowdown"] > 1).any():
        return ""
    word = kernel_word(gpu, plural=True)
    rates = f"{between(pairs['softmax_bytes_per_second'] / 1e9)} GB/s"
    if ceiling:
        shares = between(pairs["softmax_bytes_per_second"] / ceiling, lambda value: f"{value:.0%}")
        rates += f", {shares} of the {format_significant(ceiling / 1e9)} GB/s of a large copy (notebook 04)"
    half = sorted(set(pairs["precision"]) & {"bf16", "fp16"})
    casts = f" (in {join_words(half)} two more cast the scores to float32 and the result back)" if half else ""
    soft, products = (
        between(pairs[f"{name}_intensity"], lambda value: format_significant(value, 2))
        for name in ("softmax", "matmul")
    )
    # a GPU does tens of operations in the time of a byte; on a CPU, exponentials may cost more than the memory
    reason = "The reason is arithmetic intensity" if gpu else "They differ in arithmetic intensity"
    limit = (
        f": memory, not arithmetic, sets its time, as far as the {word} are long enough to be more than overhead"
        if gpu
        else ""
    )
    return (
        f"{reason}: the softmax is five {word}, each of which reads all scores and does one "
        f"operation on a number{casts}, {soft} FLOPs for each byte it moves, where the products do {products}. "
        f"Counted so, it moves {rates}{limit}."
    )


def _context_trend(pairs: pd.DataFrame, gpu: bool) -> list[str]:
    """How the ratio of times goes with the context, for the size with most contexts."""
    reference = pairs[pairs["precision"] == pairs["precision"].iloc[0]]
    counts = reference.groupby("size", sort=False)["context_length"].nunique()
    if not len(counts) or counts.max() < 2:
        return []
    size = counts[counts == counts.max()].index[-1]
    rows = reference[reference["size"] == size].sort_values("context_length")
    steps = [f"{row['context_length']:,}: {format_significant(row['time_ratio'])}" for row in rows.to_dict("records")]
    first, last = rows.iloc[0], rows.iloc[-1]
    growth = last["context_length"] / first["context_length"]
    own, soft = (last[f"{name}_seconds"] / first[f"{name}_seconds"] for name in ("matmul", "softmax"))
    return [
        f"By context, for {size}, the ratio of times is {', '.join(steps)}; the ratio of FLOPs stays, as both grow "
        f"with the square of the context. From {first['context_length']:,} to {last['context_length']:,} "
        f"({format_significant(growth**2)} times the scores) the softmax's time grows {format_significant(soft)}-fold, "
        f"the products' {format_significant(own)}-fold{_why_growth(own, soft, growth**2, gpu)}."
    ]


def _why_growth(own: float, soft: float, square: float, gpu: bool) -> str:
    slow = [name for name, value in (("products", own), ("softmax", soft)) if value < 0.75 * square]
    if not slow:
        return ""
    verb, device = "is" if slow == ["softmax"] else "are", "the GPU" if gpu else "the processor"
    return f": at short contexts the {join_words(slow)} {verb} too small to fill {device}"
