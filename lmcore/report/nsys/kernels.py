"""Sentences of notebook 05 on the kernels of a forward pass (nsys_profile (b) and (c))."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from lmcore.report.answers import format_significant, join_words
from lmcore.report.nsys.answers import nothing_profiled, profiled
from lmcore.report.nsys.profiles import MODEL_PARTS
from lmcore.report.nsys.wording import (
    MISSING,
    all_cells,
    between,
    cell_label,
    compact,
    in_words,
    kernel_word,
    labels,
    markdown,
    percent,
    place,
)

NON_TRIVIAL = 0.01
"""Share of the time from which on a kernel matters."""


def top_kernel_answer(table: pd.DataFrame, kernels: pd.DataFrame) -> str:
    """(b): the kernel with most time in a forward pass, its calls, who launches it, and the same with backward."""
    done = profiled(table)
    found = [_top_kernels(row, kernels) for row in done.to_dict("records")]
    found = [entry for entry in found if entry is not None]
    if not found:
        return nothing_profiled(table)
    word = kernel_word(done["gpu"].any())
    rows = [
        place(entry)
        | {
            f"top {word}, forward": f"`{entry['top']['label']}`",
            "calls": _calls(entry["top"]["calls"]),
            "share": percent(entry["top"]["share"]),
            "launched in": entry["launched_in"] or MISSING,
            f"top {word}, forward + backward": f"`{entry['both']['label']}`" if entry["both"] else MISSING,
            "its calls": _calls(entry["both"]["calls"]) if entry["both"] else MISSING,
            "its share": percent(entry["both"]["share"]) if entry["both"] else MISSING,
        }
        for entry in found
    ]
    return f"{markdown(rows)}\n\n{_top_sentence(found, word)} {_same_sentence(found, word)}"


def _calls(value: float) -> str:
    return f"{value:,.0f}" if abs(value - round(value)) < 0.005 else format_significant(value)


def _top_kernels(row: Mapping[str, Any], kernels: pd.DataFrame) -> dict[str, Any] | None:
    of_cell = kernels[kernels["cell"] == row["cell"]]
    top = _first(of_cell, "inference")
    if top is None:
        return None
    return dict(row) | {
        "top": top,
        "both": _first(of_cell, "forward + backward"),
        "launched_in": _launched_in(of_cell, top),
    }


def _first(kernels: pd.DataFrame, label: str) -> dict[str, Any] | None:
    chosen = kernels[kernels["range"] == label]
    if not len(chosen):
        return None
    first = chosen.loc[chosen["rank"].idxmin()].to_dict()
    return first | {"label": compact(first["short_name"])}


def _launched_in(kernels: pd.DataFrame, top: Mapping[str, Any]) -> str:
    """How often each part of the model launches a kernel, the most frequent first; empty where that is not known."""
    parts = {f"inference: {name}": name for name in MODEL_PARTS}
    chosen = kernels[kernels["range"].isin(list(parts)) & (kernels["name"] == top["name"])]
    chosen = chosen.sort_values("calls", ascending=False)
    return ", ".join(f"{parts[row['range']]} {_calls(row['calls'])}" for row in chosen.to_dict("records"))


def _top_sentence(found: list[dict[str, Any]], word: str) -> str:
    """How many kernels are on top, what they are, and how their calls follow from the number of blocks."""
    names = list(dict.fromkeys(entry["top"]["label"] for entry in found))
    kinds = {entry["top"]["kind"] for entry in found}
    what = "a matrix multiplication" if kinds == {"matmul"} else f"of kind {join_words(sorted(kinds))}"
    text = f"In {all_cells(len(found))} the {word} with most cumulative time in the forward pass is {what}"
    text += f", `{names[0]}`" if len(names) == 1 else f" ({len(names)} different ones, chosen by shape and precision)"
    largest = max(found, key=lambda entry: entry["inference_kernel_seconds"] or 0)
    calls, layers = largest["top"]["calls"], largest["num_layers"]
    text += f". For {cell_label(largest)}, `{largest['top']['label']}` is invoked **{_calls(calls)} times**"
    text += " in one pass"
    each, rest = divmod(round(calls), layers)
    if each:
        text += f", {each} in each of {layers} blocks" + (f" and {rest} more" if rest else "")
    parts = f" ({largest['launched_in']})" if largest["launched_in"] else ""
    return f"{text}{parts}, and takes {percent(largest['top']['share'])} of the {word}s' time."


def _same_sentence(found: list[dict[str, Any]], word: str) -> str:
    both = [entry for entry in found if entry["both"]]
    if not both:
        return "No backward pass was profiled, so whether the same leads there stays open."
    same = [entry for entry in both if entry["both"]["name"] == entry["top"]["name"]]
    if len(same) == len(both):
        return f"It is **the same {word}** with the backward pass, in {all_cells(len(both))}."
    other = [entry for entry in both if entry not in same]
    kinds = join_words(sorted({entry["both"]["kind"] for entry in other}))
    start = (
        f"With the backward pass it is **another {word}** in {all_cells(len(both))}"
        if not same
        else f"With the backward pass it is the same {word} in {len(same)} of {len(both)} cells, and another in "
        f"{labels(other)}"
    )
    if {entry["both"]["kind"] for entry in other} == {"matmul"}:
        return (
            f"{start}, again a matrix multiplication: the products for the gradients read their operands in another "
            f"order, for which there are other {word}s."
        )
    return f"{start} (kind: {kinds})."


def other_kernels_answer(table: pd.DataFrame, kernels: pd.DataFrame, kinds: pd.DataFrame) -> str:
    """(c): what besides matrix multiplication takes a share of the forward pass that matters, by kind and in words."""
    done = profiled(table)
    if not len(done) or not len(kinds):
        return nothing_profiled(table)
    shares = kinds[kinds["range"] == "inference"]
    order = [
        kind for kind in dict.fromkeys(shares["kind"]) if shares.loc[shares["kind"] == kind, "share"].max() >= 0.001
    ]
    rows = []
    for row in done.to_dict("records"):
        own = shares[shares["cell"] == row["cell"]].set_index("kind")["share"]
        rows.append(place(row) | {kind: percent(own.get(kind)) for kind in order})
    word = kernel_word(done["gpu"].any())
    text = [_other_kinds_sentence(shares, word), _named_sentence(done, kernels, word)]
    return f"{markdown(rows)}\n\n{' '.join(filter(None, text))}"


def _other_kinds_sentence(shares: pd.DataFrame, word: str) -> str:
    rest = 1 - shares[shares["kind"] == "matmul"].set_index("cell")["share"].reindex(shares["cell"].unique()).fillna(0)
    others = shares[(shares["kind"] != "matmul") & (shares["share"] >= NON_TRIVIAL)]
    if not len(others):
        return f"All {word}s but matrix multiplication together stay below {NON_TRIVIAL:.0%} each, by kind."
    spans = others.groupby("kind", sort=False)["share"].agg(["min", "max", "size"])
    spans = spans.sort_values("max", ascending=False)
    clauses = [f"{kind} ({between([row['min'], row['max']], percent)})" for kind, row in spans.iterrows()]
    return (
        f"Besides matrix multiplication, {between(rest, percent)} of the {word}s' time goes to other work; kinds with "
        f"at least {NON_TRIVIAL:.0%} of a cell: {join_words(clauses)}."
    )


def _named_sentence(done: pd.DataFrame, kernels: pd.DataFrame, word: str) -> str:
    """The kernels that matter in the cell that takes longest, by what they do."""
    row = max(done.to_dict("records"), key=lambda row: row["inference_kernel_seconds"] or 0)
    own = kernels[(kernels["cell"] == row["cell"]) & (kernels["range"] == "inference") & (kernels["kind"] != "matmul")]
    if not len(own):
        return ""
    own = own.assign(words=[in_words(k["short_name"], k["kind"]) for k in own.to_dict("records")])
    groups = own.groupby("words", sort=False)
    sums = groups[["share", "calls"]].sum().assign(example=groups["short_name"].first())
    sums = sums[sums["share"] >= NON_TRIVIAL].sort_values("share", ascending=False)
    if not len(sums):
        return f"In {cell_label(row)} no single one of them reaches {NON_TRIVIAL:.0%}."
    clauses = [
        f"**{words}** {percent(group['share'])} ({_calls(group['calls'])} calls, such as `{group['example']}`)"
        for words, group in sums.iterrows()
    ]
    return (
        f"By what they compute, in {cell_label(row)}: {'; '.join(clauses)}. They do a few operations on every number "
        "that they read and write."
    )
