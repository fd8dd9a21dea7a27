"""Sentences of notebook 04 on half precision: sums, the toy model's types, and layer norm."""

import math

import pandas as pd

from lmcore.profiling.precision import RMS, ROUNDED, RUNNING, WIDENED
from lmcore.workbook.report.answers import format_percent, format_significant, join_words, scientific

DEVICE_WORDS = {"cpu": "the CPU", "cuda": "the GPU (CUDA)", "mps": "Apple's Metal"}


def markdown(rows: list[dict]) -> str:
    """Rows of text as a Markdown table."""
    return pd.DataFrame(rows).fillna("").to_markdown(index=False, disable_numparse=True)


def digits(value: float) -> str:
    """A stored number to twelve significant digits, enough to tell it from its neighbors in float32."""
    return f"{value:.12g}"


def accumulation_answer(table: pd.DataFrame) -> str:
    """mixed_precision_accumulation: what is printed, and which error comes from the stored 0.01, which from adding."""
    shown = markdown(
        [
            {
                "experiment": f"{row['experiment']}: {row['label']}",
                "prints": f"`{row['printed']}`",
                "value": digits(row["result"]),
                "error": _small(row["error"]),
                "from storing 0.01": _small(row["representation_error"]),
                "from adding": _small(row["accumulation_error"]),
                "additions that rounded": f"{row['rounded']:,} of {row['additions']:,}",
            }
            for row in table.to_dict("records")
        ]
    )
    rows = table.to_dict("records")
    order = sorted(rows, key=lambda row: abs(row["error"]))
    best, worst = order[0], order[-1]
    text = [
        f"The sum should be {rows[0]['additions'] * 0.01:g}; nearest comes {best['label']} (off by "
        f"{_small(best['error'])}), furthest off is {worst['label']} ({_small(worst['error'])})."
    ]
    text += [_storing(row) for row in rows if row["addend_type"] == "fp16"][:1]
    text += [_adding(row) for row in rows if row["same_as"] == row["experiment"]]
    text += [_same(row, rows) for row in rows if row["same_as"] != row["experiment"]]
    return f"{shown}\n\n{' '.join(text)}"


def _storing(row: dict) -> str:
    each = row["representation_error"] / row["additions"]
    return (
        f"The fp16 number nearest to 0.01 is {digits(row['addend'])}: wrong by {_small(each)}, and "
        f"{row['additions']:,} times that is {_small(row['representation_error'])}, which no accumulator can make good."
    )


def _adding(row: dict) -> str:
    name = f"Experiment {row['experiment']} ({row['label']})"
    if row["rounded"] == 0:
        return (
            f"{name} adds without any error: the addend has so few digits that every partial sum fits into the "
            f"{row['accumulator']} accumulator, and all of its error comes from storing 0.01."
        )
    text = (
        f"{name} rounds {row['rounded']:,} of {row['additions']:,} additions: near {row['result']:.0f} the numbers of "
        f"{row['accumulator']} are {scientific(row['spacing'], 3)} apart, so that the last addition of "
        f"{digits(row['addend'])} added {digits(row['last_step'])}; together that makes "
        f"{_small(row['accumulation_error'])}."
    )
    if abs(row["worst_error"]) > 2 * abs(row["error"]):
        text += (
            f" That is luck: on the way its sum is off by {_small(row['worst_error'])}, and roundings down make up for "
            "roundings up."
        )
    return text


def _same(row: dict, rows: list[dict]) -> str:
    other = next(other for other in rows if other["experiment"] == row["same_as"])
    return (
        f"Experiments {other['experiment']} and {row['experiment']} agree in every partial sum: adding an "
        f"{other['addend_type']} number to an {other['accumulator']} sum promotes it to {other['accumulator']} first, "
        "which is what the cast does by hand; the digits that the addend lost before do not come back. So accumulate "
        "in float32 whatever the values are stored in."
    )


def _small(value: float) -> str:
    if value == 0:
        return "0"
    return f"{value:+.2g}" if abs(value) >= 1e-3 else scientific(value, 3)


def toy_answer(table: pd.DataFrame) -> str:
    """benchmarking_mixed_precision (a): the types found on each device, and where devices differ."""
    devices = list(dict.fromkeys(table["device"]))
    shown = table.assign(column=table["precision"] + " on " + table["device"].str.upper())
    pivot = shown.pivot(index="quantity", columns="column", values="dtype")
    pivot = pivot.loc[list(dict.fromkeys(table["quantity"])), list(dict.fromkeys(shown["column"]))]
    text = (
        "Under autocast with float32 parameters, a step of `ToyModel` has these types (found by running it on "
        f"{join_words([DEVICE_WORDS.get(device, device) for device in devices])}):\n\n"
        f"{pivot.rename_axis('').to_markdown(disable_numparse=True)}\n\n"
    )
    return text + " ".join(_norm_sentence(table, device) for device in devices) + _missing_gpu(devices)


def _norm_sentence(table: pd.DataFrame, device: str) -> str:
    found = table[(table["device"] == device) & (table["quantity"] == "output of layer norm")]
    kinds = dict(zip(found["precision"], found["dtype"], strict=True))
    where = DEVICE_WORDS.get(device, device)
    wide = [precision for precision, dtype in kinds.items() if dtype == "float32"]
    if len(wide) == len(kinds):
        return (
            f"On {where} layer norm is on autocast's list of operations that run in float32, for "
            f"{join_words(list(kinds))} alike, unlike the matrix products around it."
        )
    if not wide:
        return (
            f"On {where} autocast leaves layer norm in the type it is given ({join_words(sorted(set(kinds.values())))})"
            "; its kernel widens inside and rounds the result."
        )
    return f"On {where} layer norm gives float32 with {join_words(wide)} only."


def _missing_gpu(devices: list[str]) -> str:
    return "" if "cuda" in devices else " The handout asks about a GPU; this machine has no CUDA GPU to run it on."


def layer_norm_answer(norms: pd.DataFrame, epsilon: pd.DataFrame) -> str:
    """benchmarking_mixed_precision (b): which parts of layer norm suffer in fp16 and in bf16, from the measurements."""
    parts = [
        "Sensitive are the two reductions, and the variance most: it squares (which needs range) and sums many terms "
        "(which needs digits).",
        _range_sentence(norms, "fp16"),
        _epsilon_sentence(epsilon, "fp16"),
        _range_sentence(norms, "bf16"),
        _digits_sentence(norms),
        _offset_sentence(norms),
        _widened_sentence(norms),
    ]
    return " ".join(part for part in parts if part)


def _range_sentence(norms: pd.DataFrame, precision: str) -> str:
    rows = norms[(norms["precision"] == precision) & (norms["offset"] == 0) & (norms["method"] == ROUNDED)]
    high, low = rows[rows["overflow"] == True], rows[rows["underflow"] == True]  # noqa: E712 (object columns)
    if not len(high) and not len(low):
        return (
            f"In **{precision}** no variance overflowed or vanished at any scale of the inputs from "
            f"{rows['scale'].min():.2g} to {rows['scale'].max():,.0f}, as the range is that of float32."
            if precision == "bf16"
            else f"In **{precision}** no variance overflowed or vanished at the scales tested."
        )
    clauses = []
    if len(high):
        first = high.loc[high["scale"].idxmin()]
        broken = "nothing but zeros" if first["error"] == 1 else "outputs that are wrong"
        clauses.append(
            f"the sum of {first['width']:,} squares, the width tested, overflows from inputs of standard deviation "
            f"{first['scale']:g} on, and the norm returns {broken}"
        )
    if len(low):
        clauses.append(f"the variance of inputs at {low['scale'].max():.2g} and below comes out as zero")
    return f"In **{precision}**, {'; '.join(clauses)}."


def _epsilon_sentence(epsilon: pd.DataFrame, precision: str) -> str:
    row = epsilon.set_index("precision").loc[precision]
    kind = "a subnormal number there" if row["subnormal"] else "stored"
    return (
        f"`eps` is {kind}, off by {format_percent(row['relative_error'], 2)}, and adding it changes no variance above "
        f"{format_significant(row['reach'], 2)}."
    )


def _digits_sentence(norms: pd.DataFrame) -> str:
    plain = norms[(norms["scale"] == 1) & (norms["offset"] == 0)].set_index(["precision", "method"])
    errors = plain["variance_error"]
    return (
        "Digits are another matter: a running sum kept in the type puts the variance of ordinary inputs off by up to "
        f"{format_percent(errors['bf16', RUNNING], 2)} in bf16 and {format_percent(errors['fp16', RUNNING], 2)} in "
        f"fp16; with sums in float32 of which only the result is rounded, as PyTorch's are, by "
        f"{format_percent(errors['bf16', ROUNDED], 2)} and {format_percent(errors['fp16', ROUNDED], 2)}."
    )


def _offset_sentence(norms: pd.DataFrame) -> str:
    rows = norms[(norms["scale"] == 1) & (norms["method"] == ROUNDED) & (norms["precision"] == "bf16")]
    far = rows.loc[rows["offset"].idxmax()]
    none = rows.loc[rows["offset"].idxmin()]
    if not far["offset"] or not math.isfinite(far["error"]) or far["error"] < 2 * none["error"]:
        return ""
    return (
        f"The mean suffers where it is large beside the spread: at {far['offset']:g} standard deviations it is off by "
        f"up to {format_significant(far['mean_error'], 2)} of one in bf16, and subtracting it makes the error of the "
        f"output {format_percent(far['error'], 2)} instead of {format_percent(none['error'], 2)}."
    )


def _widened_sentence(norms: pd.DataFrame) -> str:
    half = norms[norms["precision"].isin(["fp16", "bf16"])]
    worst = {
        (precision, method): part["error"].max()
        for (precision, method), part in half[half["method"].isin([WIDENED, RMS])].groupby(["precision", "method"])
    }
    largest = {name: max(worst[name, WIDENED], worst[name, RMS]) for name in ("fp16", "bf16")}
    limits = {"fp16": 2.0**-11, "bf16": 2.0**-8}  # unit roundoffs
    text = (
        "With float32 inside, PyTorch's layer norm and our RMSNorm are off by no more than "
        f"{format_percent(largest['fp16'], 2)} (fp16) and {format_percent(largest['bf16'], 2)} (bf16) at every scale "
        "and offset tested"
    )
    if all(largest[name] <= limits[name] for name in largest):
        text += ", the rounding of the output itself"
    return (
        f"{text}. So with bf16 layer norm no longer needs protection from overflow, but its statistics still belong "
        "in float32, for the digits: bf16 has fewer of them than fp16."
    )
