"""Sentences of notebook 02 on the toy and the sweeps: what tables say, whatever the machine and the outcome."""

import itertools
import math
from collections.abc import Mapping, Sequence

import pandas as pd

from lmcore.workbook.report.answers import format_bytes, format_count, format_significant, join_words, scientific
from lmcore.workbook.report.tables import DIVERGENCE_RISE, ending_of

NOISE = 0.01
"""Differences of loss in nats that are within the scatter between seeds, and not called a difference."""

NEAR_EDGE = 4.0
"""Up to this ratio, the best learning rate counts as at the edge of stability."""


def sgd_answer(losses: Mapping[float, Sequence[float]]) -> str:
    """learning_rate_tuning: what the loss of the toy does at each learning rate."""
    clauses = [f"at learning rate **{rate:,g}** it {_course(values)}" for rate, values in losses.items()]
    falling = {rate: values[-1] / values[0] for rate, values in losses.items() if values[-1] < values[0]}
    fastest = f" It falls fastest at {min(falling, key=falling.__getitem__):,g}." if len(falling) > 1 else ""
    return f"In {len(next(iter(losses.values())))} iterations, the loss behaves so: {'; '.join(clauses)}.{fastest}"


def _course(values: Sequence[float]) -> str:
    first, last = values[0], values[-1]
    if not all(map(math.isfinite, values)):
        step = next(i for i, value in enumerate(values) if not math.isfinite(value))
        return f"diverges: it grows from {_number(first)} until it is not finite at iteration {step}"
    if last > first:
        return f"diverges: it grows from {_number(first)} to {_number(last)}"
    return f"falls from {_number(first)} to {_number(last)}"


def learning_rate_answer(runs: pd.DataFrame) -> str:
    """learning_rate (a): final loss of every run of the sweep, the best, and the strategy of the search."""
    runs = runs.sort_values("learning_rate")
    table = pd.DataFrame(
        {
            "learning rate": [f"{rate:g}" for rate in runs["learning_rate"]],
            "final validation loss": [ending_of(row) for row in runs.to_dict("records")],
            "largest rise of the training loss": [_rise(row) for row in runs.to_dict("records")],
        }
    ).to_markdown(index=False, disable_numparse=True)
    rates = runs["learning_rate"].tolist()
    strategy = (
        f"Strategy: {len(rates)} learning rates from {rates[0]:g} to {rates[-1]:g}, apart by factors of "
        f"{_range(_ratios(rates))}, each with the whole schedule of {_one(runs['steps'])} steps, as a run that is cut "
        "short says little about one that decays to zero; the rest of the recipe stays as it is."
    )
    return f"{strategy}\n\n{table}\n\n{_best_sentence(runs)}"


def _best_sentence(runs: pd.DataFrame) -> str:
    done = completed(runs)
    if not len(done):
        return "No run was completed: the sweep must go on at smaller learning rates."
    best, tested = lowest(done), runs["learning_rate"]
    alike = done[(done["final_valid_loss"] <= best["final_valid_loss"] + NOISE) & (done["name"] != best["name"])]
    also = f"; {_rates(alike)} within {NOISE:g} of it" if len(alike) else ""
    text = f"The best is **{best['learning_rate']:g}** with {ending_of(best)} nats per token{also}."
    if best["learning_rate"] == tested.min():
        text += " It is the smallest one tested, so the optimum may lie lower."
    elif best["learning_rate"] == tested.max():
        text += " It is the largest one tested, so the optimum may lie higher."
    return text


def edge_answer(runs: pd.DataFrame, curves: pd.DataFrame) -> str:
    """learning_rate (b): how the best learning rate relates to the smallest that diverged, and to early progress."""
    done = completed(runs)
    diverged = runs[runs["outcome"] == "diverged"].sort_values("learning_rate")
    if not len(done):
        return (
            f"Every learning rate diverged, down to {runs['learning_rate'].min():g}: the edge of stability lies below "
            "this sweep, and it cannot say how the best learning rate relates to it."
        )
    best = lowest(done)
    above = diverged[diverged["learning_rate"] > best["learning_rate"]]
    if len(above):
        text = _edge_sentences(best, above.iloc[0], done)
    else:
        text = (
            f"No run above the best learning rate, {best['learning_rate']:g}, diverged, up to "
            f"{runs['learning_rate'].max():g}: the edge of stability lies beyond this sweep."
        )
    below = diverged[diverged["learning_rate"] < best["learning_rate"]]
    if len(below):
        text += f" Below the best, {_rates(below)} diverged too: stability is not a matter of the learning rate alone."
    return f"{text} {_early_sentence(runs, done, curves)}".strip()


def _edge_sentences(best: pd.Series, edge: pd.Series, done: pd.DataFrame) -> str:
    ratio = edge["learning_rate"] / best["learning_rate"]
    between = done[(done["learning_rate"] > best["learning_rate"]) & (done["learning_rate"] < edge["learning_rate"])]
    text = (
        f"The smallest learning rate above the best that diverged is **{edge['learning_rate']:g}** (at step "
        f"{edge['diverged_at_step']:,.0f}), **{_factor(ratio)} times** the best, "
        f"{best['learning_rate']:g}."
    )
    if len(between):
        worst = between.loc[between["final_valid_loss"].idxmax()]
        cost = worst["final_valid_loss"] - best["final_valid_loss"]
        text += (
            f" Between the two, {_rates(between)} trained to the end, up to {format_significant(cost, 2)} nats worse."
        )
        shaken = between[between["max_spike"] > DIVERGENCE_RISE]
        if len(shaken):
            text += (
                f" Of these, {_rates(shaken)} lost stability on the way (the training loss rose by up to "
                f"{format_significant(shaken['max_spike'].max(), 2)} nats) and recovered as the schedule came down."
            )
    if ratio <= NEAR_EDGE:
        return f"{text} Here the folk wisdom holds: the best learning rate is near the edge."
    if len(between):
        return (
            f"{text} Here the best learning rate is below the edge rather than at it: clipping and the normalized "
            "updates keep a run finite long after larger steps have stopped to pay."
        )
    return f"{text} Nothing was tested between the two, so the edge may be anywhere there."


def _early_sentence(runs: pd.DataFrame, done: pd.DataFrame, curves: pd.DataFrame) -> str:
    """Which learning rate leads early on, of all runs that had come so far, and whether it is the one that wins."""
    if len(done) < 2:
        return ""
    evaluated = curves.dropna(subset="valid_loss")
    finished = evaluated[evaluated["name"].isin(done["name"])]
    if not len(finished):
        return ""
    common = set.intersection(*(set(part["step"]) for _, part in finished.groupby("name")))
    early = min(common, default=None)
    if early is None or early >= done["steps"].max():
        return ""
    at = evaluated[evaluated["step"] == early].set_index("name")["valid_loss"]
    rates = runs.set_index("name")["learning_rate"]
    at = at[at.index.isin(rates.index)]
    leader, best = rates[at.idxmin()], lowest(done)["learning_rate"]
    text = f"Convergence: after {early:,} of {_one(done['steps'])} steps the lowest validation loss is that of "
    if leader == best:
        return f"{text}{leader:g}, which also wins in the end."
    if at.idxmin() not in set(done["name"]):
        return f"{text}{leader:g}, which diverges later; {best:g} wins in the end."
    order = "larger" if best > leader else "smaller"
    return f"{text}{leader:g}, but the {order} {best:g} wins in the end."


def batch_size_answer(runs: pd.DataFrame) -> str:
    """batch_size_experiment: loss, speed and memory by batch size at one number of tokens."""
    runs = runs.sort_values("batch_size")
    done, failed = completed(runs), runs[runs["outcome"] == "out of memory"]
    diverged = runs[runs["outcome"] == "diverged"]
    sizes = [f"{size:,}" for size in runs["batch_size"]]
    text = f"Tested: batch sizes {join_words(sizes)}"
    if len(done):
        text += f", all on about {format_count(done['tokens'].max(), 2)} tokens"
    text += "."
    if len(done):
        best = lowest(done)
        text += f" The lowest final loss, **{ending_of(best)}**, is that of batch size **{best['batch_size']:,}**"
        text += f" in {best['steps']:,} steps."
        text += _larger_batches(done, best)
        text += _throughput(done)
    if len(diverged):
        text += f" Diverged: {join_words([f'{size:,}' for size in diverged['batch_size']])}."
    if len(failed):
        text += (
            f" Batch size {join_words([f'{size:,}' for size in failed['batch_size']])} ran **out of memory** on "
            f"{failed['device'].iloc[0]}."
        )
    else:
        text += " None reached the limit of the memory."
    return text


def _larger_batches(done: pd.DataFrame, best: pd.Series) -> str:
    largest, smallest = done.iloc[-1], done.iloc[0]
    text = ""
    if largest["name"] != best["name"]:
        cost = largest["final_valid_loss"] - best["final_valid_loss"]
        text += (
            f" The largest that was completed, {largest['batch_size']:,}, makes only {largest['steps']:,} steps of the "
            f"same tokens and ends {format_significant(cost, 2)} nats higher: at a fixed number of tokens, a larger "
            "batch buys less noise with fewer steps."
        )
    if smallest["name"] != best["name"]:
        cost = smallest["final_valid_loss"] - best["final_valid_loss"]
        text += (
            f" The smallest, {smallest['batch_size']:,}, ends {format_significant(cost, 2)} nats higher: its gradients "
            "are noisy, even at its smaller learning rate."
        )
    return text


def _throughput(done: pd.DataFrame) -> str:
    fastest, smallest = done.loc[done["tokens_per_second"].idxmax()], done.iloc[0]
    if fastest["name"] == smallest["name"]:
        text = f" The smallest batch is also the fastest ({speed_of(fastest)})."
    else:
        ratio = fastest["tokens_per_second"] / smallest["tokens_per_second"]
        text = (
            f" Throughput grows from {speed_of(smallest)} at {smallest['batch_size']:,} to {speed_of(fastest)} at "
            f"{fastest['batch_size']:,} ({format_significant(ratio, 2)} times)."
        )
    memory = done.dropna(subset="peak_memory_bytes")
    if len(memory):
        first, last = memory.iloc[0], memory.iloc[-1]
        text += (
            f" Peak memory goes from {format_bytes(first['peak_memory_bytes'])} at {first['batch_size']:,} to "
            f"{format_bytes(last['peak_memory_bytes'])} at {last['batch_size']:,}."
        )
    return text


def completed(runs: pd.DataFrame) -> pd.DataFrame:
    """The runs that came to their end with a loss."""
    return runs[(runs["outcome"] == "complete") & runs["final_valid_loss"].notna()]


def lowest(done: pd.DataFrame) -> pd.Series:
    """The run with the lowest final validation loss."""
    return done.loc[done["final_valid_loss"].astype(float).idxmin()]


def speed_of(row: Mapping) -> str:
    """The throughput in words."""
    return f"{format_count(row['tokens_per_second'])} tokens per second"


def _rates(runs: pd.DataFrame) -> str:
    return join_words([f"{rate:g}" for rate in runs.sort_values("learning_rate")["learning_rate"]])


def _ratios(rates: Sequence[float]) -> list[float]:
    return [after / before for before, after in itertools.pairwise(rates)] or [1.0]


def _range(values: Sequence[float]) -> str:
    low, high = _factor(min(values)), _factor(max(values))
    return low if low == high else f"{low} to {high}"


def _one(values: pd.Series) -> str:
    return _range_of_counts(int(values.min()), int(values.max()))


def _range_of_counts(low: int, high: int) -> str:
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _rise(row: Mapping) -> str:
    """The largest rise that was logged; a dash where a run diverged between two lines of its log."""
    rise = row["max_spike"]
    unseen = pd.isna(rise) or (row["outcome"] == "diverged" and rise <= DIVERGENCE_RISE)
    return "–" if unseen else format_significant(rise, 2)


def _factor(value: float) -> str:
    """A ratio of settings, which are round themselves: 2, 3.3, 1,000."""
    return f"{float(f'{value:.2g}'):,g}"


def _number(value: float) -> str:
    plain = value == 0 or 1e-3 <= abs(value) < 1e5
    return format_significant(value, 3) if plain else scientific(value, 2)
