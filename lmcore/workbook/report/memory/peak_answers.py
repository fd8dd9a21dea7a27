"""Sentences of notebook 06 on peaks: by context, by precision, and why they lie where they do."""

from collections.abc import Mapping

import pandas as pd

from lmcore.workbook.report.answers import format_bytes, format_percent, format_significant, join_words
from lmcore.workbook.report.memory.answers import BASELINE, span_words
from lmcore.workbook.report.memory.figures import PASSES

NOTICEABLE = 0.1
"""Change of a peak that counts as one."""

NEGLIGIBLE = 0.01
"""Share of a peak below which a category, or a change of the peak, is not spoken of."""

HALF = ("bf16", "fp16")

PLURALS = {"temporary": "temporaries", "other": "other tensors"}

PLACES = {"loss": "the loss", "optimizer": "the optimizer's step"}
"""Stages in words; the others are passes."""


def peaks_answer(peaks: pd.DataFrame, stages: pd.DataFrame, precision: str = BASELINE) -> str:
    """memory_profiling (b): peak of a forward pass and of a training step by size and context, in one precision.

    `stages` says where the peaks lie, and with that why they grow with the context or do not.
    """
    rows = in_order(peaks[(peaks["precision"] == precision) & _plain(peaks)])
    if not len(rows):
        return f"No cell in {precision} was measured."
    kinds = [passes for passes in PASSES if passes in set(rows["passes"])]
    lines = []
    for (size, context), part in rows.groupby(["size", "context_length"], sort=False):
        cells = part.set_index("passes")
        levels = {PASSES[kind]: peak_words(cells.loc[kind]) if kind in cells.index else "–" for kind in kinds}
        lines.append({"size": size, "context": f"{context:,}"} | levels)
    table = pd.DataFrame(lines).to_markdown(index=False, disable_numparse=True)
    growth = " ".join(filter(None, [_growth(part) for _, part in rows.groupby("size", sort=False)]))
    placed = _placed(stages)
    placed = placed[placed["precision"] == precision]
    places = [
        _place_sentences(part) for size in dict.fromkeys(rows["size"]) if len(part := placed[placed["size"] == size])
    ]
    notes = " ".join(filter(None, [*places, _reserved(rows), lost_sentence(rows)]))
    return f"{growth}\n\nPeak of what tensors take, in {precision}:\n\n{table}\n\n{notes}".strip()


def in_order(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of cells by size of the model, then context, then passes."""
    passes = rows["passes"].map(list(PASSES).index)
    ordered = rows.assign(passes_order=passes).sort_values(
        ["num_parameters", "size", "context_length", "passes_order"], kind="stable"
    )
    return ordered.drop(columns="passes_order")


def _placed(stages: pd.DataFrame) -> pd.DataFrame:
    """A row for each training step that has a timeline: where its peak lies, and what it holds before and after.

    `activations` are those at the beginning of the backward pass, `gradients` those at its end, and `standing` what
    parameters, optimizer state and gradients then take, in bytes.
    """
    rows = []
    for _, part in stages[(stages["passes"] == "train_step") & _plain(stages)].groupby("cell", sort=False):
        by_name = {row["stage"]: row for row in part.to_dict("records")}
        if {"backward", "optimizer"} <= by_name.keys():
            backward, highest = by_name["backward"], max(by_name.values(), key=lambda row: row["peak_bytes"])
            found = {
                "activations": backward["start activations"],
                "gradients": backward["end gradients"],
                "standing": sum(backward[f"end {name}"] for name in ("parameters", "optimizer state", "gradients")),
            }
            keys = ("size", "context_length", "precision", "stage", "peak_bytes")
            rows.append({key: highest[key] for key in keys} | found)
    columns = ["size", "context_length", "precision", "stage", "peak_bytes", "activations", "gradients", "standing"]
    return pd.DataFrame(rows, columns=columns).sort_values("context_length", kind="stable")


def _place_sentences(placed: pd.DataFrame) -> str:
    """Where the peaks of one size in one precision lie, and whether the context changes them there."""
    sentences = []
    for stage, part in placed.groupby("stage", sort=False):
        size, low, high = part.iloc[0]["size"], part.min(numeric_only=True), part.max(numeric_only=True)
        text = f"At {_contexts(part)} the peak of {size} lies in {_place(stage)}"
        if stage == "optimizer":
            standing = span_words(low["standing"], high["standing"], format_bytes)
            text += f": parameters, gradients and optimizer state take {standing}"
            if (part["activations"] < part["gradients"]).all():
                text += (
                    f"; the activations came to less, at most {format_bytes(high['activations'])}, than the gradients "
                    f"that follow them, {format_bytes(high['gradients'])}"
                )
            if len(part) > 1 and high["peak_bytes"] < (1 + NEGLIGIBLE) * low["peak_bytes"]:
                text += ", so that **the context does not change it**"
        elif (part["activations"] > part["gradients"]).all():
            text += (
                f": the activations, {span_words(low['activations'], high['activations'], format_bytes)} before the "
                f"backward pass, come to more than the gradients that follow them, {format_bytes(high['gradients'])}"
            )
        sentences.append(f"{text}.")
    return " ".join(sentences)


def _contexts(rows: pd.DataFrame) -> str:
    return f"context {join_words([f'{context:,}' for context in rows['context_length']])}"


def _place(stage: str) -> str:
    return PLACES.get(stage, f"the {stage} pass")


def _reserved(rows: pd.DataFrame) -> str:
    """How much more the caching allocator took from the device; empty where that is not known."""
    known = rows.dropna(subset=["peak_bytes", "reserved_peak_bytes"])
    if not len(known):
        return ""
    ratios = known["reserved_peak_bytes"].astype(float) / known["peak_bytes"].astype(float)
    worst = known.loc[ratios.idxmax()]
    return (
        f"The allocator keeps what it has once taken from the device, so that nvidia-smi shows more: at most "
        f"{format_significant(ratios.max(), 3)} times as much, {format_bytes(worst['reserved_peak_bytes'])} for "
        f"`{worst['cell']}`."
    )


def _growth(rows: pd.DataFrame) -> str:
    """The peaks of one size from its shortest to its longest context, and by how much they grow."""
    clauses = []
    for passes, part in rows[rows["outcome"] == "complete"].groupby("passes", sort=False):
        part = part.sort_values("context_length")
        first, last = part.iloc[0], part.iloc[-1]
        levels = span_words(first["peak_bytes"], last["peak_bytes"], format_bytes)
        clause = f"**{levels}** in a {PASSES[passes]}"
        if first["context_length"] < last["context_length"]:
            clause += f" ({format_significant(last['peak_bytes'] / first['peak_bytes'], 3)} times"
            clause += f", from context {first['context_length']:,} to {last['context_length']:,})"
        else:
            clause += f" (context {first['context_length']:,})"
        clauses.append(clause)
    return f"Size {rows.iloc[0]['size']} takes {join_words(clauses)}." if clauses else ""


def lost_sentence(rows: pd.DataFrame) -> str:
    """Names the cells that did not fit, and those that failed otherwise; empty without any."""
    text = ""
    lost = rows[rows["outcome"] == "out of memory"]
    if len(lost):
        cells = join_words([f"`{cell}`" for cell in lost["cell"]])
        asked = "; ".join(dict.fromkeys(str(reason) for reason in lost["reason"].dropna()))
        text = f"**Out of memory** on {lost.iloc[0]['device']}: {cells} ({asked})."
    failed = rows[~rows["outcome"].isin(["complete", "out of memory"])]
    if len(failed):
        text += f" Failed: {join_words([f'`{cell}`' for cell in failed['cell']])}."
    return text.strip()


def peak_words(row: Mapping) -> str:
    """The peak of a cell, or how else it ended."""
    return format_bytes(row["peak_bytes"]) if row["outcome"] == "complete" else f"**{row['outcome']}**"


def _plain(table: pd.DataFrame) -> pd.Series:
    """Rows of the model as it is defined: no fused attention, no checkpointing."""
    return (table["attention"] == "plain") & table["checkpoint_every"].isna()


def precision_answer(peaks: pd.DataFrame, composition: pd.DataFrame, stages: pd.DataFrame) -> str:
    """memory_profiling (c): peaks in mixed precision against float32, and why."""
    rows = peaks[_plain(peaks)]
    mixed = [name for name in HALF if name in set(rows["precision"])]
    if not mixed or BASELINE not in set(rows["precision"]):
        return f"Only {join_words(list(dict.fromkeys(rows['precision'])))} was measured, so nothing can be compared."
    pairs = precision_pairs(rows, mixed[0])
    verdicts = [_verdict(pairs, passes, mixed[0]) for passes in PASSES if passes in set(pairs["passes"])]
    lost = lost_sentence(rows[rows["precision"].isin([BASELINE, mixed[0]])])
    reasons = [_why(composition[_plain(composition)], mixed[0]), _moves(_placed(stages), mixed[0]), lost]
    parts = [" ".join(filter(None, verdicts)), _pairs_markdown(pairs, mixed[0]), " ".join(filter(None, reasons))]
    return "\n\n".join(filter(None, parts))


def precision_pairs(rows: pd.DataFrame, mixed: str) -> pd.DataFrame:
    """A row for each cell of the baseline that was also measured in `mixed`; `ratio` is missing where one is."""
    keys = ["size", "num_parameters", "context_length", "passes"]
    columns = [*keys, "outcome", "peak_bytes"]
    parts = [rows.loc[rows["precision"] == precision, columns] for precision in (BASELINE, mixed)]
    pairs = in_order(parts[0].merge(parts[1], on=keys, suffixes=("", "_mixed")))
    return pairs.assign(ratio=pairs["peak_bytes_mixed"].astype(float) / pairs["peak_bytes"].astype(float))


def _moves(placed: pd.DataFrame, mixed: str) -> str:
    """Where the optimizer's step holds the peak in one precision or in both, and what follows from that."""
    parts = [placed[placed["precision"] == precision] for precision in (BASELINE, mixed)]
    pairs = parts[0].merge(parts[1], on=["size", "context_length"], suffixes=("", "_mixed"))
    pairs = pairs.assign(change=pairs["peak_bytes_mixed"] / pairs["peak_bytes"] - 1)
    sentences = []
    before, after = pairs["stage"] == "optimizer", pairs["stage_mixed"] == "optimizer"
    for size, part in pairs[before & after & (pairs["change"].abs() < NEGLIGIBLE)].groupby("size", sort=False):
        sentences.append(
            f"At {_contexts(part)} both peaks of {size} lie in {_place('optimizer')}, where no activations are left, "
            "so that the precision changes nothing."
        )
    for row in pairs[before != after].to_dict("records"):
        activations = (
            f"{format_bytes(row['activations_mixed'])} before the backward pass against "
            f"{format_bytes(row['activations'])} in {BASELINE}"
        )
        more = row["activations_mixed"] > row["activations"]
        what = f"activations with the copies of weights that {mixed} keeps" if more else "smaller activations"
        sign = "+" if row["change"] >= 0 else "−"
        sentences.append(
            f"At context {row['context_length']:,} the {what} ({activations}) move the peak of {row['size']} from "
            f"{_place(row['stage'])} to {_place(row['stage_mixed'])} ({sign}{format_percent(abs(row['change']), 2)})."
        )
    return " ".join(sentences)


def _pairs_markdown(pairs: pd.DataFrame, mixed: str) -> str:
    rows = [
        {
            "size": row["size"],
            "context": f"{row['context_length']:,}",
            "passes": PASSES[row["passes"]],
            BASELINE: peak_words(row),
            mixed: peak_words({"peak_bytes": row["peak_bytes_mixed"], "outcome": row["outcome_mixed"]}),
            f"{mixed} / {BASELINE}": "–" if pd.isna(row["ratio"]) else format_significant(row["ratio"], 3),
        }
        for row in pairs.to_dict("records")
    ]
    return pd.DataFrame(rows).to_markdown(index=False, disable_numparse=True)


def _verdict(pairs: pd.DataFrame, passes: str, mixed: str) -> str:
    ratios = pairs.loc[pairs["passes"] == passes, "ratio"].dropna()
    if not len(ratios):
        return ""
    low, high = ratios.min(), ratios.max()
    spread = format_significant(low, 3)
    if format_significant(high, 3) != spread:
        spread = f"{spread} to {format_significant(high, 3)}"
    if high <= 1 - NOTICEABLE:
        judged = "**less memory** throughout"
    elif low >= 1 + NOTICEABLE:
        judged = "**more memory** throughout"
    elif low > 1 - NOTICEABLE and high < 1 + NOTICEABLE:
        judged = "**hardly any difference**"
    else:
        judged = "a difference that depends on size and context"
    return f"For a {PASSES[passes]}, {mixed} means {judged}: {spread} times the peak in {BASELINE}."


def _why(composition: pd.DataFrame, mixed: str) -> str:
    """From the make-up of the peaks of one cell in both precisions."""
    keys = ["size", "context_length", "passes"]
    both = composition[composition["precision"].isin([BASELINE, mixed])]
    sentences = []
    for (size, context, passes), part in both.groupby(keys, sort=False):
        table = part.pivot_table(index="category", columns="precision", values="bytes", aggfunc="first")
        if {BASELINE, mixed} <= set(table.columns):
            where = f"In the {PASSES[passes]} of {size} at context {context:,}"
            sentences.append(f"{where}, {_changes(table[BASELINE], table[mixed], mixed)}.")
    if not sentences:
        return ""
    return (
        f"Autocast keeps weights, gradients and AdamW's moments in float32 and adds {mixed} copies of weights for "
        "the matrix products; only the activations that these products take and make become half as large. "
        f"{' '.join(sentences)}"
    )


def _changes(before: pd.Series, after: pd.Series, mixed: str) -> str:
    total = max(before.sum(), after.sum())
    weights = ("parameters", "optimizer state", "gradients")
    large = [name for name in before.index if max(before[name], after[name]) >= NEGLIGIBLE * total]
    same = [name for name in weights if name in large and abs(after[name] - before[name]) < NEGLIGIBLE * total]
    share = before[same].sum() / before.sum()
    text = f"{join_words(same)} make {format_percent(share, 2)} of the peak in {BASELINE} and stay" if same else ""
    moved = [
        f"{PLURALS.get(name, name)} go from {format_bytes(before[name])} to {format_bytes(after[name])}"
        for name in before.index
        if name not in same and abs(after[name] - before[name]) >= NEGLIGIBLE * total
    ]
    return ", while ".join(filter(None, [text, join_words(moved)]))
