"""Words about the speed measurements of the reference machine: the table, the targets, and what limits the misses."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from lmcore.workbook.report.answers import format_percent, format_significant, join_words
from lmcore.workbook.report.kernels.figures import PASSES
from lmcore.workbook.report.kernels.speed import (
    Speed,
    comparison,
    measure_words,
    milliseconds,
    rate_words,
    read_speed,
)
from lmcore.workbook.report.kernels.speed_limits import FLOORS_INTRO, floor_words
from lmcore.workbook.report.kernels.steps import CURVES, curves_in, curves_sentences

NO_FILE = (
    "The kernels have not been measured beside their peers on the reference machine yet: "
    "`python benchmarks/speed.py` does it on a GPU and writes the table here."
)

BESIDE_TARGETS = {
    "study": "the ladder of one change after the other",
    "elementwise-.*": "elementwise kernels",
    "memory-attention-.*": "attention's memory alone by length",
    "memory-step-.*": "memory of whole steps by length",
    "attention-64-(?!16384-both).+": "attention with head size 64 at other lengths",
    "attention-128-(?!4096|16384).+": "attention with head size 128 at other lengths",
    "decode-small-(8|64)": "decoding in batches",
    "decode-small-1-generate": "Hugging Face's own loop of generation",
}
"""What `benchmarks/speed.py` measures beside the work with targets: patterns of rows' names, and words."""


def speed_table(speed: Speed, only_targets: bool = False) -> str:
    """Every piece of work as a row of a Markdown table: ours, the best peer, the ratio, and the target.

    With `only_targets`, those for which a target is set.
    """
    rows = [speed_row(row) for row in comparison(speed).to_dict("records") if row["targets"] or not only_targets]
    return pd.DataFrame(rows).to_markdown(index=False, disable_numparse=True)


def speed_row(row: Mapping[str, Any]) -> dict[str, str]:
    """One row of the table, as text."""
    ours, peer = row["ours"], row["peer"]
    return {
        "work": row["work"],
        "lmcore": _figures(ours) if ours else row["ended"],
        "best peer": f"{_figures(peer)} ({peer['contestant']})" if peer else "–",
        "times as fast": "–" if row["faster"] is None or pd.isna(row["faster"]) else f"{row['faster']:.2f}",
        "target": "; ".join(target_words(target) for target in row["targets"]) or "–",
    }


def _figures(row: Mapping[str, Any] | None) -> str:
    parts = [part for part in (milliseconds(row), rate_words(row)) if part]
    if row is not None and row["group"] == "decode":
        parts = parts[1:] or parts
    return ", ".join(parts)


def target_words(target: Mapping[str, Any]) -> str:
    """A target and whether it is reached: "≤ 2.4 ms: yes", or what came out instead."""
    if target["reached"] is None:
        return f"{target['text']}: not measured"
    return f"{target['text']}: {'yes' if target['reached'] else f'**no**, {measure_words(target)}'}"


def limits(row: Mapping[str, Any], ceilings: Mapping[str, float]) -> str:
    """What limits our row of a missed target, in words: counted floors of a step, or the share of a ceiling."""
    ours = row["ours"]
    if ours is None:
        return ""
    floors = floor_words(row, ceilings)
    if not floors and not pd.isna(ours["share"]):
        return f"it runs at {format_percent(ours['share'], 2)} of the {ours['share_of'] or 'ceiling'}"
    return floors


def misses(speed: Speed) -> str:
    """The targets that are not reached, each with its number and what limits it; or that all are."""
    judged = [(row, target) for row in comparison(speed).to_dict("records") for target in row["targets"]]
    measured = [(row, target) for row, target in judged if target["reached"] is not None]
    missed = [(row, target) for row, target in measured if not target["reached"]]
    unmeasured = list(dict.fromkeys(row["work"] for row, target in judged if target["reached"] is None))
    reached = len(measured) - len(missed)
    text = f"{reached} of {len(measured)} targets are reached." if measured else "No target was measured."
    if measured and not missed:
        text = f"All {len(measured)} targets are reached."
    if unmeasured:
        text += f" Not measured: {join_words(unmeasured)}."
    if not missed:
        return text
    lines, floors = [], False
    for name in dict.fromkeys(row["row"] for row, _ in missed):
        row = next(row for row, _ in missed if row["row"] == name)
        told = [
            f"{measure_words(target)} (target {target['text']})" for other, target in missed if other["row"] == name
        ]
        timed = [t for other, t in missed if other["row"] == name and t["measure"] not in ("share", "peak_bytes")]
        ceilings = speed.ceilings_of(row["ours"])
        floors |= bool(timed and floor_words(row, ceilings))
        limited = [limits(row, ceilings)] if timed else []
        lines.append(f"- {row['work']}: {'; '.join(filter(None, [join_words(told), *limited]))}.")
    intro = f" {FLOORS_INTRO}" if floors else ""
    return f"{text}{intro} Missed:\n\n" + "\n".join(lines)


def ratios_sentence(speed: Speed) -> str:
    """Between which ratios ours is faster than the best peer, by group."""
    rows = comparison(speed)
    rows = rows[rows["faster"].notna()]
    names = {
        "step": "a training step", "attention": "attention", "optimizer": "AdamW", "loss": "the loss",
        "decode": "decoding", "elementwise": "elementwise kernels",
    }  # fmt: skip
    parts = []
    for group, words in names.items():
        ratios = rows.loc[rows["group"] == group, "faster"].astype(float)
        if len(ratios):
            low, high = format_significant(ratios.min(), 3), format_significant(ratios.max(), 3)
            parts.append(f"{words} {low if low == high else f'{low} to {high}'}")
    if not parts:
        return ""
    return " ".join(filter(None, [f"Times as fast as the best peer: {join_words(parts)}.", behind_sentence(rows)]))


def behind_sentence(rows: pd.DataFrame) -> str:
    """Where a peer is faster, of a `comparison`: attention by head size and lengths, other work by its name."""
    lengths: dict[tuple[str, str], list[int]] = {}
    others = []
    for row in rows[rows["faster"] < 1].to_dict("records"):
        settings = row["settings"] or {}
        if row["group"] == "attention" and {"head_size", "passes", "context_length"} <= settings.keys():
            which = f"{PASSES[settings['passes']]}, head size {settings['head_size']},", row["peer"]["contestant"]
            lengths.setdefault(which, []).append(settings["context_length"])
        else:
            others.append(f"{row['work']} ({row['peer']['contestant']})")
    named = [
        f"attention {which} at {join_words([f'{length:,}' for length in sorted(found)])} positions ({peer})"
        for (which, peer), found in lengths.items()
    ]
    return f"The peer is ahead in {join_words([*named, *others])}." if named or others else ""


def missing_sentence(speed: Speed) -> str:
    """What `benchmarks/speed.py` measures beside this and the file has no rows of."""
    absent = [text for names, text in BESIDE_TARGETS.items() if not speed.rows["row"].str.fullmatch(names).any()]
    return f"Not in this record yet: {join_words(absent)}." if absent else ""


def ceilings_sentence(speed: Speed) -> str:
    """What the machine can do at best, as measured in the run of the rows, the last of several."""
    known = speed.ceilings
    copy, product = known.get("copy_bytes_per_second"), known.get("bf16_flops_per_second")
    if not copy or not product:
        return ""
    run = "the same run" if speed.rows["run"].nunique() == 1 else "the last of these runs"
    return (
        f"Ceilings measured in {run}: a large copy {format_significant(copy / 1e12)} TB/s, a large bf16 matrix "
        f"product {format_significant(product / 1e12)} TFLOP/s."
    )


def reference_answer(speed: Speed | None) -> str:
    """The whole table of the reference machine with its targets; a sentence where there is no file."""
    if speed is None:
        return NO_FILE
    versions = _versions(speed.provenance)
    text = (
        f"On one {speed.device}{versions}, medians, contestants taking turns; {runs_words(speed)}:\n\n"
        f"{speed_table(speed)}\n\n{ratios_sentence(speed)} {ceilings_sentence(speed)}\n\n"
        f"{misses(speed)}\n\n{missing_sentence(speed)}"
    )
    return text.strip()


def runs_words(speed: Speed) -> str:
    """Whether all rows are of one run; if not, how many are of runs before the last, and of which commit."""
    last = speed.rows["run"].max()
    before = speed.rows[speed.rows["run"] < last].drop_duplicates("row")
    if before.empty:
        return "everything in one run"
    found = []
    for run, rows in before.groupby("run"):
        environment = speed.runs[run].get("environment", {}) if run < len(speed.runs) else {}
        commit = str(environment.get("git_commit") or "unknown")[:9]
        counts = [f"{count} of {group}" for group, count in rows["group"].value_counts(sort=False).items()]
        found.append(f"{join_words(counts)} (commit {commit})")
    return f"all contestants of a row in one process; one run but for some rows of earlier ones: {join_words(found)}"


def _versions(provenance: Mapping[str, Any]) -> str:
    torch, packages = provenance.get("torch"), provenance.get("packages") or {}
    named = [f"PyTorch {torch}"] if torch else []
    named += [f"{name} {packages[name]}" for name in ("triton", "transformers") if packages.get(name)]
    return f" with {join_words(named)}" if named else ""


def speed_block(results: str | os.PathLike) -> str:
    """What the README says of the fast path: the rows with targets, ratios and misses; numbers from the file alone."""
    speed = read_speed(results)
    if speed is None:
        return f"{NO_FILE}\n"
    folder = Path(results).name
    curves = curves_in(results)
    same = f"{curves_sentences(curves)} ([both curves](figures/{folder}/{CURVES}.svg))\n\n" if curves else ""
    return (
        f"One {speed.device}{_versions(speed.provenance)}, bf16, {runs_words(speed)}; medians:\n\n"
        f"{speed_table(speed, only_targets=True)}\n\n"
        f"{ratios_sentence(speed)} {ceilings_sentence(speed)}\n\n{misses(speed)}\n\n{same}"
        f"All rows, with peers, spread and memory: [`speed.json`](results/{folder}/speed.json); what was tried on the "
        "way: [`benchmarks/LOG.md`](benchmarks/LOG.md). Notebook 07 explains each gain and measures it on your "
        f"machine. {missing_sentence(speed)}".rstrip()
        + "\n"
    )
