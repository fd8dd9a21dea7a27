"""Sentences of notebook 02 on recipes: best loss and targets, what each change bought, the full budget."""

import math
from collections.abc import Mapping

import numpy as np
import pandas as pd

from lmcore.workbook.report.answers import format_count, format_seconds, format_significant
from lmcore.workbook.report.tables import ending_of
from lmcore.workbook.report.train.sweeps import completed, lowest, speed_of

TARGET, LOW_RESOURCE_TARGET = 1.45, 2.0
"""Validation losses on TinyStories that CSE599-O A1 asks for (section 7.2; part 2 section 4.2), nats per token."""

FULL_BUDGET = 327_680_000
"""Tokens of the handout's full run (part 1, section 7.2)."""

SETTINGS = {
    "optimizer": "optimizer",
    "learning_rate": "learning rate",
    "weight_decay": "weight decay",
    "batch_size": "batch size",
    "steps": "steps",
    "tie_embeddings": "tied embeddings",
    "dropout": "dropout",
    "sampling": "sampling",
}
"""Columns of the run table that are settings, for readers."""


def targets_answer(runs: pd.DataFrame, floor: float | None = None) -> str:
    """The best validation loss beside the handout's targets, or beside the floor where the corpus has a known one."""
    done = completed(runs)
    if not len(done):
        return "No run was completed, so there is no validation loss to report."
    best = lowest(done)
    text = (
        f"The lowest final validation loss of {len(runs)} runs is **{ending_of(best)}** nats per token (perplexity "
        f"{format_significant(math.exp(best['final_valid_loss']), 3)}), reached by `{best['name']}` on "
        f"{format_count(best['tokens'])} tokens in {format_seconds(best['seconds'])} on {best['device']}."
    )
    if floor is not None:
        gap = best["final_valid_loss"] - floor
        return (
            f"{text} The entropy of this corpus is known, {format_significant(floor, 3)}: no model can stay below it, "
            f"and this one is {format_significant(gap, 2)} nats above. The handout's targets of {TARGET:.2f} and "
            f"{LOW_RESOURCE_TARGET:.2f} are meant for TinyStories and say nothing here."
        )
    return f"{text} {_target_sentences(best, runs)}"


def _target_sentences(best: pd.Series, runs: pd.DataFrame) -> str:
    loss = best["final_valid_loss"]
    if loss <= TARGET:
        return f"That meets the target of {TARGET:.2f}."
    gap = f"{format_significant(loss - TARGET, 2)} above the target of {TARGET:.2f}"
    verdict = f"below the {LOW_RESOURCE_TARGET:.2f} of the handout's smaller budget, and {gap}"
    if loss > LOW_RESOURCE_TARGET:
        verdict = f"above {LOW_RESOURCE_TARGET:.2f}, and {gap}"
    return (
        f"That is {verdict}. Device: {best['device']}; parameters: {_settings(best)}. "
        f"Tuning effort here: {len(runs)} runs, all in the experiment log; the recipes were settled in earlier trials."
    )


def ladder_answer(ladder: pd.DataFrame) -> str:
    """What each recipe changed from the one before, and what that bought by measurement. Rows are in order."""
    rows, previous = [], None
    for row in ladder.to_dict("records"):
        changed = "—" if previous is None else "; ".join(_changes(previous, row)) or "nothing"
        rows.append({"recipe": f"`{row['name']}`", "changed": changed, "validation loss": ending_of(row)})
        rows[-1]["change of the loss"] = "" if previous is None else _gain(previous, row)
        previous = row
    table = pd.DataFrame(rows).to_markdown(index=False, disable_numparse=True)
    if len(ladder) == 1:
        return f"{table}\n\nOnly one recipe was trained at this scale, so there is nothing to compare."
    done = completed(ladder)
    if len(done) < 2:
        return f"{table}\n\nFewer than two of them were completed, so there is nothing to compare."
    first, best = done.iloc[0], lowest(done)
    gained = first["final_valid_loss"] - best["final_valid_loss"]
    if gained <= 0:
        return f"{table}\n\nNothing improved on `{first['name']}`, where the list begins."
    return (
        f"{table}\n\nFrom `{first['name']}` to `{best['name']}` the loss falls by "
        f"**{format_significant(gained, 3)}** nats, on {format_significant(best['tokens'] / first['tokens'], 3)} times "
        "the tokens."
    )


def _changes(before: Mapping, after: Mapping) -> list[str]:
    return [
        f"{label} {_value(before[key])} → {_value(after[key])}"
        for key, label in SETTINGS.items()
        if before[key] != after[key]
    ]


def _gain(before: Mapping, after: Mapping) -> str:
    if before["outcome"] != "complete" or after["outcome"] != "complete":
        return ""
    difference = after["final_valid_loss"] - before["final_valid_loss"]
    return f"{difference:+.3f}"


def budget_answer(runs: pd.DataFrame) -> str:
    """What the handout's full budget would take at the speed that was measured."""
    done = completed(runs).dropna(subset="tokens_per_second")
    if not len(done):
        return "No run was completed, so no speed is known."
    best = lowest(done)
    seconds = FULL_BUDGET / best["tokens_per_second"]
    return (
        f"`{best['name']}` trained at {speed_of(best)} on {best['device']}; evaluations and checkpoints not counted, "
        f"the handout's full {FULL_BUDGET:,} tokens would take this model {format_seconds(seconds)} there."
    )


def _settings(row: Mapping) -> str:
    return ", ".join(f"{label} {_value(row[key])}" for key, label in SETTINGS.items())


def _value(value: object) -> str:
    if isinstance(value, bool | np.bool_):
        return "on" if value else "off"
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:g}"
