"""Sentences of notebook 05 on the kernels of a forward pass (nsys_profile (b) and (c))."""

import re
from collections.abc import Mapping
from typing import Any

import pandas as pd

from lmcore.profiling.nsys.trace import Trace, copy_table, instances
from lmcore.workbook.report.answers import format_bytes, format_seconds, format_significant, join_words
from lmcore.workbook.report.nsys.answers import nothing_profiled, profiled
from lmcore.workbook.report.nsys.profiles import MODEL_PARTS
from lmcore.workbook.report.nsys.wording import (
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
    telling,
)

NON_TRIVIAL = 0.01
"""Share of the time from which on a kernel matters."""

MANY_COPIES = 0.1
"""Share of copies in half precision from which on they are explained."""


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
            "time per call": _each(entry["top"]),
            "share": percent(entry["top"]["share"]),
            "launched in": entry["launched_in"] or MISSING,
            f"top {word}, forward + backward": f"`{entry['both']['label']}`" if entry["both"] else MISSING,
            "its calls": _calls(entry["both"]["calls"]) if entry["both"] else MISSING,
            "its share": percent(entry["both"]["share"]) if entry["both"] else MISSING,
        }
        for entry in found
    ]
    return (
        f"{_top_sentence(found, word)} {_example_sentence(found, word)}\n\n{markdown(rows)}\n\n"
        f"{_same_sentence(found, word)}"
    )


def _calls(value: float) -> str:
    return f"{value:,.0f}" if abs(value - round(value)) < 0.005 else format_significant(value)


def _each(kernel: Mapping[str, Any]) -> str:
    return format_seconds(kernel["seconds"] / kernel["calls"]) if kernel["calls"] else MISSING


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
    """How often each part of the model launches a kernel, the most frequent first, and how often none of them does;
    empty where that is not known."""
    parts = {f"inference: {name}": name for name in MODEL_PARTS}
    chosen = kernels[kernels["range"].isin(list(parts)) & (kernels["name"] == top["name"])]
    chosen = chosen.sort_values("calls", ascending=False)
    named = [f"{parts[row['range']]} {_calls(row['calls'])}" for row in chosen.to_dict("records")]
    others = top["calls"] - chosen["calls"].sum()
    return ", ".join(named + ([f"others {_calls(others)}"] if named and others >= 0.5 else []))


KIND_WORDS = {
    "matmul": "a matrix multiplication",
    "attention": "fused attention",
    "softmax/reduction": "a reduction",
    "elementwise": "an elementwise operation",
    "copy": "a copy",
    "optimizer": "a part of the optimizer",
    "other": "of no kind known here",
}
"""What a kernel is, by its kind."""

HALF = ("bf16", "fp16")
CASTING = r"(?i)bfloat16|float16|half|WithCast|_to_copy"
CASTS = "autocast's casts of weights and activations"


def _by_kind(entries: list[dict[str, Any]], which: str) -> dict[str, list[dict[str, Any]]]:
    """Cells by the kind of a kernel of theirs, the most frequent kind first."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for entry in entries:
        groups.setdefault(entry[which]["kind"], []).append(entry)
    return dict(sorted(groups.items(), key=lambda item: -len(item[1])))


def _kind_words(kind: str, cells: list[dict[str, Any]], which: str = "top") -> str:
    """What a kind is; of copies in half precision whose names say that they cast, that autocast asks for them."""
    casts = kind == "copy" and all(
        cell["precision"] in HALF and re.search(CASTING, cell[which]["name"]) for cell in cells
    )
    return f"{KIND_WORDS[kind]}{f': {CASTS}' if casts else ''}"


def _top_sentence(found: list[dict[str, Any]], word: str) -> str:
    """What the kernels on top are, and in how many cells."""
    groups = _by_kind(found, "top")
    names = list(dict.fromkeys(entry["top"]["label"] for entry in found))
    several = f" ({len(names)} different {word}s, chosen by shape and precision)"
    which = f", `{names[0]}`" if len(names) == 1 else several
    start = f"the {word} with most cumulative time in the forward pass is"
    if len(groups) == 1:
        ((kind, cells),) = groups.items()
        return f"In {all_cells(len(found))} {start} **{_kind_words(kind, cells)}**{which}."
    clauses = []
    for kind, cells in groups.items():
        here = {cell["precision"] for cell in cells}
        elsewhere = {cell["precision"] for other, rows in groups.items() if other != kind for cell in rows}
        precision = f" ({join_words(sorted(here))})" if not here & elsewhere else ""
        count = f"{len(cells)} of {len(found)} cells{precision}" if not clauses else f"in {len(cells)}{precision}"
        clauses.append(f"{count} {f'{start} ' if not clauses else ''}**{_kind_words(kind, cells)}**")
    return f"In {', '.join(clauses)}{which if len(names) > 1 else ''}."


def _example_sentence(found: list[dict[str, Any]], word: str) -> str:
    """How the calls of the cell that takes longest follow from the number of blocks."""
    largest = max(found, key=lambda entry: entry["inference_kernel_seconds"] or 0)
    calls, layers = largest["top"]["calls"], largest["num_layers"]
    text = f"For {cell_label(largest)}, `{largest['top']['label']}` is invoked **{_calls(calls)} times** in one pass"
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
    groups = _by_kind(other, "both")
    if len(groups) == 1:
        return f"{start}: {_kind_words(*next(iter(groups.items())), 'both')}."
    return f"{start}: {join_words([f'{KIND_WORDS[kind]} in {len(cells)}' for kind, cells in groups.items()])}."


def copies_text(trace: Trace, passes: Mapping[str, str]) -> str:
    """Memory copies and fills (no kernels) in one pass, by operation: `passes` gives a title to the name of a range."""
    rows = []
    for name, title in passes.items():
        count = len(instances(trace, name))
        for copy in copy_table(trace, name).to_dict("records"):
            rows.append(
                {
                    "pass": title,
                    "operation": copy["operation"],
                    "calls": _calls(copy["calls"] / count),
                    "bytes": format_bytes(copy["bytes"] / count),
                    "time": format_seconds(copy["total_seconds"] / count),
                    "time per call": format_seconds(copy["total_seconds"] / copy["calls"]),
                }
            )
    if not rows:
        return "No memory copies were recorded."
    return f"Memory copies and fills, which are no kernels, in one pass (mean):\n\n{markdown(rows)}"


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
    text = [_named_sentence(done, kernels, word), _casts_sentence(shares)]
    return f"{_other_kinds_sentence(shares, word)}\n\n{markdown(rows)}\n\n{' '.join(filter(None, text))}".rstrip()


def _casts_sentence(shares: pd.DataFrame) -> str:
    """Where the copies of half precision come from; empty where they are few."""
    copies = shares[shares["kind"] == "copy"]
    half = copies[copies["precision"].isin(HALF)]
    if not len(half) or half["share"].max() < MANY_COPIES:
        return ""
    other = copies[~copies["precision"].isin(HALF)]
    text = f"In {join_words(sorted(set(half['precision'])))} copies take {between(half['share'], percent)}"
    if len(other):
        text += f", against {between(other['share'], percent)} in {join_words(sorted(set(other['precision'])))}"
    return f"{text}: among them are {CASTS}."


def _other_kinds_sentence(shares: pd.DataFrame, word: str) -> str:
    rest = 1 - shares[shares["kind"] == "matmul"].set_index("cell")["share"].reindex(shares["cell"].unique()).fillna(0)
    others = shares[(shares["kind"] != "matmul") & (shares["share"] >= NON_TRIVIAL)]
    if not len(others):
        return f"All {word}s but matrix multiplication together stay below {NON_TRIVIAL:.0%} each, by kind."
    spans = others.groupby("kind", sort=False)["share"].agg(["min", "max", "size"])
    spans = spans.sort_values("max", ascending=False)
    clauses = [f"{kind} ({between([row['min'], row['max']], percent)})" for kind, row in spans.iterrows()]
    return (
        f"Besides matrix multiplication, **{between(rest, percent)}** of the {word}s' time goes to other work; kinds "
        f"with at least {NON_TRIVIAL:.0%} of a cell: {join_words(clauses)}."
    )


def _named_sentence(done: pd.DataFrame, kernels: pd.DataFrame, word: str) -> str:
    """The kernels that matter in the cell that takes longest, by what they do."""
    row = max(done.to_dict("records"), key=lambda row: row["inference_kernel_seconds"] or 0)
    own = kernels[(kernels["cell"] == row["cell"]) & (kernels["range"] == "inference") & (kernels["kind"] != "matmul")]
    if not len(own):
        return ""
    own = own.assign(words=[in_words(k["short_name"], k["kind"], k["name"]) for k in own.to_dict("records")])
    own["label"] = [telling(k["short_name"], k["name"]) for k in own.to_dict("records")]
    groups = own.groupby("words", sort=False)
    sums = groups[["share", "calls"]].sum().assign(example=groups["label"].first())
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
