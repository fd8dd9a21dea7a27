"""Writes the tables of the README and of the pages beside results and benchmarks: every number is in a results file.

`python results/tables.py` puts each table between the markers of its name in its page.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from lmcore.accounting import forward_flops_by_component
from lmcore.config import model_config
from lmcore.errors import require
from lmcore.files import atomic_write, read_json
from lmcore.formatting import format_bytes, format_significant
from lmcore.profiling.readable import timed
from lmcore.profiling.timing import comparable_seconds
from workbook.parameters import PARAMETERS_FOLDER, read_mapping
from workbook.report.coverage import DONE, OPEN, PARTLY, Answered, Problem, coverage
from workbook.report.results import read_results
from workbook.report.sizes import HANDOUTS
from workbook.report.wording import format_count, format_seconds

PROJECT = Path(__file__).parents[1]
H200 = PROJECT / "results" / "h200"
SPEED = H200 / "speed.json"

FAULTS = {
    "one of several ranks killed, stopped, hanging or failing": r".* of several ranks",
    "SIGKILL at a random moment": r"SIGKILL .*random moment",
    "SIGKILL at every kind of file operation of a save": r"SIGKILL (just before|in the middle)",
    "checkpoints and weights truncated, with flipped bits or lost": r".*(checkpoint|safetensors)",
    "metrics damaged": r"metrics",
    "status, configuration or environment damaged": r"\w+\.json damaged",
    "disk full": r"disk full",
    "several processes at once, one of them killed": r"two |.* is killed",
    "stop signals": r"SIG(USR1|TERM)",
    "a command stopped, hung up or killed with all its processes": r"command ",
    "crafted files that would run code": r"crafted",
    "damaged files of other programs": r"file of",
    "values and names that a shell or a terminal would obey": r"value |terminal ",
    "pipes in place of files; disks full, read-only or without locks": r"pipe |disk that",
    "variables of a launcher that make no sense": r"variables",
}
"""Kinds of faults that are counted together, by a pattern; a kind that matches none has a row of its own."""

HIGHLIGHTS = {
    "step-tinystories-32x256": "training step, the handout's model, 32 × 256, vocabulary {vocab_size:,}",
    "step-large-4x1024": "training step, `large`, 4 × 1,024, vocabulary {vocab_size:,}",
    "attention-128-16384-both": "causal attention, both passes, 16,384 positions, head size 128",
    "decode-small-1": "decoding one sequence, `small`",
}
"""Rows of speed.json that the README shows."""


def shape_of(name: str) -> str:
    """The handout and the shape of a named size."""
    size = model_config(name)
    shape = f"d_model {size.d_model:,}, d_ff {size.d_ff:,}, {size.num_layers} layers, {size.num_heads} heads"
    return f"`{name}` ({HANDOUTS[name]}; {shape})" if name in HANDOUTS else f"`{name}` ({shape})"


def format_percent(fraction: float, digits: int = 3) -> str:
    """A fraction as a percentage: 0.1234 -> 12.3%."""
    return f"{format_significant(100 * fraction, digits)}%"


def rows_of(name: str) -> pd.DataFrame:
    """A table of the reference machine."""
    return read_results(H200 / f"{name}.json")[0]


def markdown(rows: list[dict[str, Any]]) -> str:
    """A Markdown table, a row for each dictionary."""
    return pd.DataFrame(rows).to_markdown(index=False, disable_numparse=True)


def devices() -> str:
    """Which results files are of another GPU than the H200 or of several, as their provenance has it."""
    files: dict[str, list[str]] = {}
    for path in sorted(H200.glob("*.json")):
        content = read_json(path)
        provenance = content.get("provenance") if isinstance(content, dict) else None
        device = (provenance or {}).get("device", "")
        names = [device] if isinstance(device, str) else device
        label = " and ".join(sorted(name.split()[1] for name in names if name.startswith("NVIDIA")))
        files.setdefault(label, []).append(f"`{path.stem}`")
    words = [f"{len(files['H200'])} tables are of H200s"]
    others = sorted(label for label in files if label not in ("", "H200"))
    words += [
        f"{len(files[label])} of {label.replace(' and ', 's and ')}s: {', '.join(files[label])}" for label in others
    ]
    return ";\n".join(words) + "."


def fault_counts() -> pd.DataFrame:
    """Faults tried, survived, refused and lost, by kind."""
    rows = read_json(PROJECT / "results" / "faults.json")["faults"]
    table = pd.DataFrame(rows)[["kind", "tried", "survived", "refused_in_words", "lost"]]
    kinds = [next((kind for kind, of in FAULTS.items() if re.match(of, name)), name) for name in table.pop("kind")]
    table = table.groupby(pd.Series(kinds, name="fault"), sort=False).sum().reset_index()
    return table.rename(columns={"refused_in_words": "refused"})


SETTINGS = ["size", "batch_size", "context_length", "vocab_size", "head_size", "mode", "causal"]
"""Settings of a benchmark case that have a column of their own in `rows_table`."""
NUMBERS = ["median", "low", "high", "peak_bytes", "rate", "share"]
OUR_SLOWER = ("lmcore", "plain", "+")
"""How the names of our own slower variants begin; they are no peers."""


def rows_table(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Rows of speed.json as a table, with `SETTINGS` as columns, and `peer`: whether it is other software."""
    table = pd.DataFrame(rows)
    table[NUMBERS] = table[NUMBERS].astype(float)
    table["peer"] = [not row["ours"] and not row["contestant"].startswith(OUR_SLOWER) for row in rows]
    return table.join(pd.DataFrame([row["settings"] for row in rows]).reindex(columns=SETTINGS))


def fastest(rows: pd.DataFrame) -> pd.Series | None:
    """The row with the smallest median of those that were measured."""
    done = rows[(rows["outcome"] == "complete") & rows["median"].notna()]
    return done.loc[done["median"].idxmin()] if len(done) else None


def beside_peers(rows: pd.DataFrame) -> tuple[pd.Series, pd.Series]:
    """Our row of a benchmark case of speed.json, and that of the best peer."""
    return fastest(rows[rows["ours"]]), fastest(rows[rows["peer"]])


def time_and_rate(row: pd.Series) -> str:
    """The median of a contestant and its rate: 2.39 ms, 3.42 million tok/s."""
    rounded = "" if pd.isna(row["rate"]) else format_count(float(f"{row['rate']:.3g}"))
    if row["group"] == "decode":
        whole = format_count(float(f"{row['notes']['tokens_per_second_with_prompt']:.3g}"))
        return f"{rounded} {row['rate_unit']} ({whole} with the prompt)"
    time = format_seconds(row["median"] / 1e3) if row["median"] > 1e3 else f"{format_significant(row['median'])} ms"
    return f"{time}, {rounded} {row['rate_unit']}" if rounded else time


def judged(target: dict[str, Any], rows: pd.DataFrame) -> dict[str, Any]:
    """The target with what was `measured`, and whether it is `reached`; both None where it was not measured.

    `measure` is a column of our row, or "rate over NAME": our rate divided by that contestant's in the same case, or
    by that of the "best peer".
    """
    rows = rows[rows["row"] == target["row"]]
    ours, (column, _, other) = fastest(rows[rows["ours"]]), target["measure"].partition(" over ")
    value = float("nan") if ours is None else ours[column]
    if other:
        value /= rows.loc[rows["peer"] if other == "best peer" else rows["contestant"] == other, column].max()
    if pd.isna(value):
        return {**target, "measured": None, "reached": None}
    reached = value <= target["at_most"] if "at_most" in target else value >= target["at_least"]
    return {**target, "measured": float(value), "reached": bool(reached)}


def verdict(target: dict[str, Any], rows: pd.DataFrame) -> str:
    """A target and whether it is reached; what was measured if it is not, and where the deciles leave it open."""
    found = judged(target, rows)
    words = {"share": format_percent, "median": lambda ms: format_seconds(1e-3 * ms)}
    shown = words.get(target["measure"], format_significant)
    if not found["reached"]:
        return f"{target['text']}: **no**, {shown(found['measured'])}"
    result = f"{target['text']}: yes"
    if target["measure"] == "rate over best peer":
        ours, peer = beside_peers(rows[rows["row"] == target["row"]])
        least = peer["low"] / ours["high"]
        result += f" ({least:.3g} by the deciles)" if least < target["at_least"] else ""
    return result


def spread(row: pd.Series) -> str:
    """How far first and last decile of a contestant's times lie from the median."""
    return f"{row['low'] / row['median'] - 1:+.1%} to {row['high'] / row['median'] - 1:+.1%}".replace("-", "−")


def sample() -> str:
    """The README's story: what the trained model made of a prompt, up to the end of a sentence."""
    told = rows_of("generate_text").query("temperature == 0.8 and prompt == 'One day, a cat'").iloc[0]
    kept = " ".join(told["text"][:210].rpartition(".")[0].split())
    return f"> **{told['prompt']}** {kept}. …\n"


def highlights() -> str:
    """The README's table: what was reached, and compared with what."""
    runs = rows_of("training_runs")
    losses, by_name = seeds_of(runs)["final_valid_loss"].agg(["count", "mean"]), runs.set_index("name")
    corpus = rows_of("training_corpus").iloc[0]
    peaks, faults = rows_of("memory_peaks"), fault_counts().drop(columns="fault").sum()
    fitted = peaks[peaks["outcome"] == "complete"]
    apart = (fitted["predicted_bytes"] / fitted["peak_bytes"] - 1).abs().groupby(fitted["mode"])
    apart, counted = (1e4 * apart.max()).map(math.ceil) / 100, apart.size()
    of_sizes = " and ".join(f"`{size}`" for size in fitted["size"].unique())
    timed = rows_table(read_json(SPEED)["rows"])
    ours, taught, baseline = losses.loc["deep-at-budget"], losses.loc["taught"], losses.loc["reported"]
    both = by_name.loc[["teacher", "taught"]]
    lengths = rows_of("build_ratios").query("corpus == 'tinystories' and documents == 1000")
    lengths = lengths.set_index("tokenizer")["bytes_per_token"]
    made = [
        {
            "what": f"validation loss, TinyStories sample of {format_count(corpus['train_tokens'])} tokens, "
            "41 million read; recipes chosen by this loss and `dev`",
            "lmcore": f"{ours['mean']:.3f} ({ours['count']:.0f} seeds)",
            "compared with": f"{baseline['mean']:.3f}, the handout's recipe at its best rate "
            f"({baseline['count']:.0f} seeds)",
        },
        {
            "what": "the same, {} read, a teacher's included; {:.1f} minutes".format(
                format_count(both["tokens"].sum()), both["seconds"].sum() / 60
            ),
            "lmcore": f"{taught['mean']:.3f} ({taught['count']:.0f} seeds)",
            "compared with": "1.45, the handouts' target for a vocabulary of 10,000; by bytes, ours is "
            f"{taught['mean'] * lengths['tinystories'] / lengths['GPT-2']:.3f} there",
        },
    ]
    for name, words in HIGHLIGHTS.items():
        ours, peer = beside_peers(timed[timed["row"] == name])
        times = f"{format_significant(peer['median'] / ours['median'])} × as fast as {peer['contestant']}"
        words = words.format(**ours["settings"])
        made.append({"what": words, "lmcore": time_and_rate(ours), "compared with": f"{times}: {time_and_rate(peer)}"})
    leaderboard = rows_of("distributed_leaderboard").iloc[0]
    chosen = read_mapping(PROJECT / PARAMETERS_FOLDER / "gpu" / "09_distributed.yaml")
    largest = forward_flops_by_component(model_config(**chosen["leaderboard"]))
    masked = (largest["scores"] + largest["weighted_sum"]) / 2 / sum(largest.values())
    made += [
        {
            "what": f"step of {format_count(leaderboard['parameters'])} parameters, two GPUs, "
            f"{leaderboard['context_length']:,} tokens each",
            "lmcore": f"{leaderboard['step']:.2f} s, {leaderboard['tokens_per_second']:,.0f} tok/s",
            "compared with": f"{(1 - masked) * leaderboard['mfu']:.0%} MFU of causal attention,"
            f" {leaderboard['mfu']:.0%} with its masked half counted",
        },
        {
            "what": "peak memory of plain operations, predicted from shapes",
            "lmcore": f"within {apart['train_step']:g}% for training steps, {apart['forward']:g}% for forward passes",
            "compared with": f"{counted['train_step']} steps and {counted['forward']} passes of {of_sizes}",
        },
        {
            "what": "runs killed, damaged or out of disk; hostile files",
            "lmcore": f"{faults['lost']} lost",
            "compared with": "{tried} faults: {survived} survived, {refused} ended in a clear error".format(**faults),
        },
    ]
    return markdown(made)


def seeds_of(runs: pd.DataFrame) -> Any:
    """The runs grouped by their names without the seed, in their order."""
    return runs.groupby(runs["name"].str.replace(r"_seed_\d+$", "", regex=True), sort=False)


def training() -> str:
    """The best learning rate of the sweep and the recipes: losses over their seeds, and what they were trained on."""
    table, provenance, _ = read_results(H200 / "training_runs.json")
    data, rows = provenance["data"], []
    source = (
        f"{data['train_tokens']:,} training tokens, {data['valid_tokens']:,} to validate on; PyTorch "
        f"{provenance['torch']}."
    )
    for name, runs in seeds_of(table):
        row, losses = runs.iloc[0], runs["final_valid_loss"]
        rows.append(
            {
                "run": f"`{name}`",
                "optimizer": row["optimizer"],
                "rate": f"{row['learning_rate']:g}",
                "decay": f"{row['weight_decay']:g}",
                "batches": {"epoch": "epochs"}.get(row["sampling"], row["sampling"]),
                "layers": row["num_layers"],
                "tied": "yes" if row["tie_embeddings"] else "no",
                "dropout": f"{row['dropout']:g}",
                "steps × batch": f"{row['steps']:,} × {row['batch_size']}",
                "tokens": format_count(row["tokens"]),
                "seeds": len(runs),
                "validation loss": f"{losses.mean():.3f}",
                "lowest to highest": f"{losses.min():.3f} to {losses.max():.3f}" if len(runs) > 1 else "–",
                "time": "–" if pd.isna(row["tokens_per_second"]) else format_seconds(row["seconds"]),
            }
        )
    ensemble = "The mean of {students:.0f} students' probabilities, at the price of all and their teachers: {loss:.3f}."
    ensemble = ensemble.format(**rows_of("training_ensemble").iloc[0])
    return f"{source}\n\n{markdown(rows)}\n\n{ensemble}"


def trials() -> str:
    """Learning rates and weight decays of the recipes, tried on dev."""
    runs = rows_of("sweep_runs")
    runs = runs[runs["name"].str.startswith("trial_")]
    recipes = runs["name"].str.extract(r"trial_(.+?)(?:_rate_.*|_decay_.*)?$")[0]
    own = runs.groupby(recipes)["final_valid_loss"].transform("first")
    rows = [
        {
            "recipe": f"`{recipe}`",
            "rate": f"{row['learning_rate']:g}",
            "decay": f"{row['weight_decay']:g}",
            "loss on dev": f"{row['final_valid_loss']:.3f}",
            "difference": "–" if row["name"] == f"trial_{recipe}" else f"{row['final_valid_loss'] - before:+.3f}",
        }
        for recipe, before, row in zip(recipes, own, runs.to_dict("records"), strict=True)
    ]
    return markdown(rows)


def norm_decay() -> str:
    """Losses of recipes with a large weight decay: where norm weights decay, too, and where they do not."""
    kept = pd.concat([rows_of("training_runs"), rows_of("sweep_runs")]).set_index("name")["final_valid_loss"]
    runs = rows_of("norm_decay")
    made = [
        {
            "run": f"`{row['name']}`",
            "rate": f"{row['learning_rate']:g}",
            "decay": f"{row['weight_decay']:g}",
            "loss on": "validation text" if row["evaluate_on"] == "valid" else row["evaluate_on"],
            "where they decay": f"{row['final_valid_loss']:.3f}",
            "where they do not": f"{kept[row['name']]:.3f}" if row["name"] in kept else "–",
        }
        for row in runs.to_dict("records")
    ]
    return markdown(made)


def changes() -> str:
    """What one change of the model does to the validation loss, over the seeds of the runs that completed."""
    runs = rows_of("experiment_runs")
    runs["change"] = runs["name"].str.replace(r"_seed_\d+$", "", regex=True)
    losses = runs.groupby("change", sort=False)["final_valid_loss"].agg(["count", "mean", "min", "max"])
    base = losses.loc["baseline"]
    made = []
    for change, part in runs.groupby("change", sort=False):
        found = losses.loc[change]
        apart = found["max"] < base["min"] or found["min"] > base["max"]
        made.append(
            {
                "model": change.replace("_", " "),
                "rate": f"{part['learning_rate'].iloc[0]:g}",
                "completed": f"{found['count']:.0f} of {len(part)}",
                "mean loss": f"{found['mean']:.3f}" if found["count"] else "diverged",
                "lowest to highest": f"{found['min']:.3f} to {found['max']:.3f}" if found["count"] else "–",
                "difference": f"{found['mean'] - base['mean']:+.3f}"
                if found["count"] and change != "baseline"
                else "–",
                "every seed on one side": "yes" if apart else "",
            }
        )
    return markdown(made)


def sizes() -> str:
    """The plain model of every size: time with its spread, busy time, utilization, memory, and the share of matmuls."""
    timings, profiles = rows_of("benchmark"), rows_of("nsys_profiles").set_index("case")
    here = timings[(timings["context_length"] == 512) & (timings["warmup_steps"] == 5)].set_index("case")
    found = []
    for size in here["size"].unique():
        case = {
            (precision, mode): here.loc[f"{size}-512-{precision}-{mode}"]
            for precision in ("fp32", "bf16")
            for mode in ("forward", "train_step")
        }
        made: dict[str, str] = {"size": size}
        for precision, mode in case:
            made[f"{mode.replace('train_', '')}, {precision} (ms)"] = timed(case[precision, mode])
        for precision in ("fp32", "bf16"):
            step = case[precision, "train_step"]
            share = step["mfu"] * step["wall_median"] / comparable_seconds(step) if pd.notna(step["mfu"]) else None
            made[f"MFU, {precision}"] = "–" if share is None else format_percent(share, 2)
        peak, name = case["fp32", "train_step"]["peak_memory_bytes"], f"{size}-512-fp32-train_step"
        made["peak memory, fp32"] = format_bytes(peak) if pd.notna(peak) else "–"
        for words, mode in ("inference", "inference"), ("step", "training"):
            known = name in profiles.index
            made[f"matmul, {words}"] = format_percent(profiles.loc[name, f"{mode}_matmul_share"], 2) if known else "–"
        found.append(made)
    return markdown(found)


def speed() -> str:
    """The fast path's benchmark cases with targets: ours, the best peer, and which targets are reached."""
    recorded = read_json(SPEED)
    rows, targets, found = rows_table(recorded["rows"]), recorded["targets"], []
    for name in dict.fromkeys(target["row"] for target in targets):
        ours, peer = beside_peers(rows[rows["row"] == name])
        theirs, ratio, deciles = "–", "–", spread(ours)
        if peer is not None:
            theirs = f"{time_and_rate(peer)} ({peer['contestant']})"
            ratio = format_significant(peer["median"] / ours["median"])
            deciles += f"; {spread(peer)}"
        found.append(
            {
                "work": ours["work"],
                "lmcore": time_and_rate(ours),
                "best peer": theirs,
                "times as fast": ratio,
                "deciles: ours; peer's": deciles,
                "target": "; ".join(verdict(target, rows) for target in targets if target["row"] == name),
            }
        )
    return markdown(found)


def behind() -> str:
    """The benchmark cases in which the best peer is faster than ours, the furthest behind first."""
    found = []
    for _, rows in rows_table(read_json(SPEED)["rows"]).groupby("row", sort=False):
        ours, peer = beside_peers(rows)
        if ours is not None and peer is not None and peer["median"] < ours["median"]:
            theirs = f"{time_and_rate(peer)} ({peer['contestant']})"
            words = {"work": ours["work"], "lmcore": time_and_rate(ours), "best peer": theirs}
            found.append(words | {"times as fast": peer["median"] / ours["median"]})
    made = sorted(found, key=lambda each: each["times as fast"])
    return markdown([words | {"times as fast": format_significant(words["times as fast"])} for words in made])


def heavier() -> str:
    """The benchmark cases in which a peer needs at least a twentieth less memory than ours, the most wasteful first."""
    found = []
    table = rows_table(read_json(SPEED)["rows"])
    for _, rows in table[table["group"] != "host"].groupby("row", sort=False):  # the host's times are of tiny tensors
        ours, peers = fastest(rows[rows["ours"]]), rows[rows["peer"] & (rows["peak_bytes"] > 0)]
        least = peers.loc[peers["peak_bytes"].idxmin()] if len(peers) else None
        if ours is not None and least is not None and least["peak_bytes"] <= 0.95 * ours["peak_bytes"]:
            theirs = f"{format_bytes(least['peak_bytes'])} ({least['contestant']})"
            words = {"work": ours["work"], "lmcore": format_bytes(ours["peak_bytes"]), "the least of the peers": theirs}
            time = format_significant(least["median"] / ours["median"])
            found.append((ours["peak_bytes"] / least["peak_bytes"], words | {"its time / ours": time}))
    return markdown([words for _, words in sorted(found, key=lambda each: -each[0])])


def contestants(like: str, index: Mapping[str, str], value: str, words: Callable[[float], str]) -> str:
    """The benchmark cases of speed.json whose names begin with `like`, a column for each contestant.

    `index` are the columns that tell the cases apart, and their names here; "–" is what did not fit or took no part.
    """
    rows = rows_table(read_json(SPEED)["rows"])
    rows = rows[rows["row"].str.startswith(like)]
    wide = rows.pivot(index=[*index], columns="contestant", values=value)[rows["contestant"].unique()]
    shown = wide.map(lambda number: "–" if pd.isna(number) else words(number)).reset_index().rename(columns=index)
    for name in shown.select_dtypes("float"):
        shown[name] = shown[name].map("{:,.0f}".format)
    return markdown(shown.to_dict("records"))


EXPLICIT = [f"lmcore explicit step, {way}" for way in ("ddp", "zero1", "fsdp")]
"""Our ways to divide the explicit step; with one rank, the first is the undivided step."""


def parallel_rows() -> pd.DataFrame:
    """What benchmarks/parallel.py measured; `alone` is one GPU's undivided step on the same host, where measured."""
    made = []
    for file in sorted(H200.glob("parallel_[0-9].json"), reverse=True):  # of a number of GPUs, and of one: most first
        rows = pd.DataFrame(read_json(file)["rows"])
        of_one = rows[rows["ranks"] == 1].set_index(["work", "contestant"])["seconds"]
        undivided = rows["contestant"].replace(dict.fromkeys(EXPLICIT, EXPLICIT[0]))
        names = pd.MultiIndex.from_arrays([rows["work"], undivided])
        made.append(rows.assign(alone=of_one.reindex(names).to_numpy()))
    return pd.concat(made).drop_duplicates(["work", "contestant", "ranks"], ignore_index=True)


def fastest_way(rows: pd.DataFrame, work: str) -> pd.DataFrame:
    """The fastest of our ways to divide the explicit step, by the number of GPUs."""
    of = rows[(rows["work"] == work) & (rows["ranks"] > 1) & rows["contestant"].isin(EXPLICIT)]
    return of.loc[of.groupby("ranks")["seconds"].idxmin()].set_index("ranks")


def parallel() -> str:
    """Training steps on several GPUs, a table for each work and its model, and how near they come to the ideal: one
    GPU's time with the same batch on each, or, where one batch is divided, that time divided by the ranks. Exposed is
    the time in which nothing but messages runs."""
    rows, tables = parallel_rows(), []
    steps, counts_of_ranks = rows[rows["work"] != "all-reduce"], sorted(rows["ranks"].unique())
    steps = steps[steps["outcome"] != "absent"]
    for work, of_work in steps.groupby("work", sort=False):
        made, (size, batch, context, rest) = [], re.fullmatch(r"(.+)-(\d+)x(\d+)(.*)", work).groups()
        for contestant, found in of_work.groupby("contestant", sort=False):
            of = found.set_index("ranks").sort_index()
            most, seconds = of.iloc[-1], of["seconds"].reindex(counts_of_ranks)
            ideal = most["alone"] / (most.name if work.endswith("in all") else 1) / most["seconds"]
            bare = most.get("exposed_seconds")
            times = {f"ms, {n}": "–" if pd.isna(time) else f"{1e3 * time:.1f}" for n, time in seconds.items()}
            if most["outcome"] == "complete":
                times["range"] = f"{1e3 * most['low']:.1f} to {1e3 * most['high']:.1f}"
            made.append({"contestant": contestant} | times | {
                "of ideal": "–" if pd.isna(ideal) or most.name == 1 else f"{ideal:.0%}",
                "exposed ms": None if pd.isna(bare) else f"{1e3 * bare:.1f}",
                "tok/s": format_count(float(f"{most['tokens_per_second']:.3g}"))
                if most["outcome"] == "complete" else most["outcome"],
                "MFU": "–" if pd.isna(most["mfu"]) else f"{most['mfu']:.0%}",
                "memory of a rank": "–" if pd.isna(most["peak_bytes"]) else format_bytes(most["peak_bytes"]),
            })  # fmt: skip
        kept = pd.DataFrame(made).dropna(axis="columns", how="all").fillna("–").to_dict("records")
        what = f"{shape_of(size)}, {batch} × {int(context):,}{rest or ' on each GPU'}"
        tables.append(f"{what}:\n\n{markdown(kept)}")
    sums = rows[rows["work"] == "all-reduce"].pivot(index="ranks", columns="contestant", values="bus_bytes_per_second")
    rates = [
        f"between {n} GPUs NCCL {of['NCCL'] / 1e9:.0f} GB/s, our ring {of['lmcore ring'] / 1e9:.0f} GB/s, "
        f"{of['lmcore ring'] / of['NCCL']:.0%} of it"
        for n, of in sums.sort_index(ascending=False).iterrows()
    ]
    last = f"Bus bandwidth of an all-reduce of 1 GiB: {'; '.join(rates)}."
    return "\n\n".join([*tables, last, beside_fsdp2(rows), parallel_targets(rows)])


def times_as_fast(theirs: pd.Series, ours: pd.Series) -> str:
    """Of the median runs, with the least and most of the turns where both ran in turns."""
    beside = isinstance(theirs["runs"], list)
    turns = [one / two for one, two in zip(theirs["runs"], ours["runs"], strict=True)] if beside else []
    spread = f" ({min(turns):.2f} to {max(turns):.2f})" if turns else ""
    return f"{theirs['seconds'] / ours['seconds']:.2f}{spread}"


def beside_fsdp2(rows: pd.DataFrame) -> str:
    """How the explicit step with everything divided compares with FSDP2 on the most GPUs."""
    most = rows["ranks"].max()
    of = rows[(rows["work"] == "2.7b-4x512") & (rows["ranks"] == most)].set_index("contestant")
    found = []
    for peer in ("HF compiled + CUDA graph, FSDP2", "HF compiled, FSDP2"):
        for name in ("lmcore explicit step, fsdp", "lmcore explicit step, fsdp, recomputing"):
            theirs, ours = of.loc[peer], of.loc[name]
            found.append({
                "beside": peer, "contestant": name, "times as fast": times_as_fast(theirs, ours),
                "memory": f"{ours['peak_bytes'] / theirs['peak_bytes']:.2f}",
                "runs, ms": ", ".join(f"{1e3 * seconds:.1f}" for seconds in ours["runs"]),
            })  # fmt: skip
    theirs = ", ".join(f"{1e3 * seconds:.0f}" for seconds in of.loc["HF compiled, FSDP2", "runs"])
    return (
        f"Beside FSDP2 with `2.7b` on {most} GPUs; FSDP2 without a graph took {theirs} ms in turns with ours:\n\n"
        f"{markdown(found)}"
    )


def parallel_targets(rows: pd.DataFrame) -> str:
    """What was to be reached, on how many GPUs, and what each number of them reaches."""
    of = rows.set_index(["work", "contestant", "ranks"]).sort_index()
    ranks, step, divided = sorted(set(rows["ranks"]) - {1}), "lmcore explicit step, ddp", "lmcore explicit step, fsdp"
    made = []

    def target(asked: int, words: str, found: Mapping[int, tuple[str, bool]], alike: bool = True) -> None:
        """`found` is what each number of GPUs reaches, and whether it is enough, which is said of all numbers `alike`,
        or of the number that was asked for alone."""
        cells = {
            f"{n} GPUs": f"{'yes' if reached else '**no**'}, {measured}" if alike or n == asked else measured
            for n, (measured, reached) in found.items()
        }
        made.append({"target": words, "asked of": f"{asked} GPUs"} | cells)

    for work, least, tokens in (("tinystories-256x256", 0.93, 28_000_000), ("large-4x1024", 0.92, 560_000)):
        each = dict(fastest_way(rows, work).iterrows())
        shares = {n: row["alone"] / row["seconds"] for n, row in each.items()}
        words = f"`{work}`, our fastest way: at least {least:.0%} of one GPU's rate on each"
        target(8, words, {n: (f"{share:.1%}", share >= least) for n, share in shares.items()})
        rates = {n: row["tokens_per_second"] for n, row in each.items()}
        said = {n: (f"{format_count(float(f'{rate:.3g}'))} tok/s", rate >= tokens) for n, rate in rates.items()}
        target(8, f"`{work}`, our fastest way: at least {format_count(tokens)} tok/s", said, alike=False)
    for peer in ("HF compiled, FSDP2", "HF compiled + CUDA graph, FSDP2"):
        found = {}
        for n in ranks:
            ours, theirs = (of.loc[("2.7b-4x512", name, n)] for name in (divided, peer))
            gain, memory = theirs["seconds"] / ours["seconds"], ours["peak_bytes"] / theirs["peak_bytes"]
            found[n] = f"{times_as_fast(theirs, ours)} times, in {memory:.2f} times", gain >= 1.5 and memory <= 1.1
        words = f"`2.7b-4x512`, fsdp: at least 1.5 times as fast as {peer}, in at most 1.1 times its memory"
        target(8, words, found)
    bus = of.loc["all-reduce"]["bus_bytes_per_second"]
    shares = {n: bus["lmcore ring", n] / bus["NCCL", n] for n in ranks}
    words = "our ring: at least 90% of NCCL's bus bandwidth at 1 GiB"
    target(8, words, {n: (f"{share:.0%}", share >= 0.9) for n, share in shares.items()})
    runs = {n: 327_680_000 / of.loc[("tinystories-256x256 in all", step, n)]["tokens_per_second"] for n in ranks}
    words = "327.68 million tokens in steps of 65,536: at most 15 s"
    target(8, words, {n: (f"{seconds:.1f} s", seconds <= 15) for n, seconds in runs.items()}, alike=False)
    large = rows_of("distributed_leaderboard").iloc[0]
    words = f"step of {format_count(large['parameters'])} parameters (notebook 09): at most 4.2 s in bf16"
    reached = large["step"] <= 4.2 and large["mfu"] >= 0.4
    target(
        2, f"{words}, at least 40% MFU, whole attention", {2: (f"{large['step']:.2f} s, {large['mfu']:.0%}", reached)}
    )
    words = "What was to be reached; a rate or time in all is judged with the number of GPUs that it was asked of alone"
    return f"{words}:\n\n{markdown(pd.DataFrame(made).fillna('–').to_dict('records'))}"


def covered() -> list[Problem]:
    """The handouts' problems, and which of them the committed answers solve."""
    return coverage(
        Answered(*name.removesuffix(")").partition(" (")[::2], notebook, missing=found.get("missing", ""))
        for notebook, answers in read_json(H200 / "answers.json").items()
        for name, found in answers.items()
    )


def counts(problems: Iterable[Problem]) -> dict[str, dict[str, int]]:
    """Problems of each handout by state, and in all."""
    table: dict[str, dict[str, int]] = {}
    for problem in problems:
        row = table.setdefault(problem.handout, {DONE: 0, PARTLY: 0, OPEN: 0, "problems": 0})
        row[problem.state] += 1
        row["problems"] += 1
    return table


def coverage_markdown(problems: Iterable[Problem]) -> str:
    """The table of docs/coverage.md: the counts, and each handout's problems with the notebook that answers them."""
    problems = list(problems)
    rows = [f"| {handout} | {' | '.join(map(str, row.values()))} |" for handout, row in counts(problems).items()]
    lines = ["| handout | done ✓ | partly ◐ | not yet – | problems |", "|---|---|---|---|---|", *rows]
    for handout in dict.fromkeys(problem.handout for problem in problems):
        lines += ["", f"## {handout}", "", "| problem | place | state | missing | notebook |", "|---|---|---|---|---|"]
        for each in (problem for problem in problems if problem.handout == handout):
            notebook = each.answers[-1].notebook if each.answers else ""
            link = f"[{notebook}](../notebooks/{notebook}.ipynb)" if notebook else ""
            lines.append(f"| `{each.name}` | {each.place} | {each.state} | {each.missing} | {link} |")
    return "\n".join(lines)


def answered() -> str:
    """How many problems of each handout are done, without those that are answered in part."""
    found = counts(covered()).items()
    return ", ".join(f"{handout}: {row['done']}/{row['problems']}" for handout, row in found) + "."


def official() -> str:
    """The courses' own tests: how often each suite ran, on what, and what came out."""
    made = []
    for name, suite in read_json(PROJECT / "results" / "official.json").items():
        passed = [outcomes.get("passed") == suite["runs"] for outcomes in suite["tests"].values()]
        skipped = [outcomes.get("skipped") == suite["runs"] for outcomes in suite["tests"].values()]
        source = suite["provenance"]
        made.append(
            {
                "suite": name, "tests": len(passed), "passed in every run": sum(passed), "skipped": sum(skipped),
                "left out": len(suite.get("left_out", ())), "runs": suite["runs"],
                "runs that failed": suite["runs_that_failed"], "warnings": suite["warnings"],
                "on": source.get("gpu") or source.get("processor", "a CPU that was not recorded"),
                "Python": source["python"],
            }
        )  # fmt: skip
    return markdown(made)


def tokenization() -> str:
    """Rates of tokenizers, and how often as fast they are as the first of the same work."""
    record = read_json(PROJECT / "results" / "cpu" / "tokenization.json")
    source, firsts, made = record["provenance"], {}, []
    for row in record["rows"]:
        beside = firsts.setdefault(row["work"], row["contestant"])
        done = row["outcome"] == "complete"
        shown = {
            key: format_significant(row[key]) if done else "–" for key in ("mb_per_second", "low", "high", "ratio")
        }
        made.append(
            {
                "work": row["work"], "contestant": row["contestant"],
                "MB/s": shown["mb_per_second"] if done else f"{row['outcome']}: {row['reason']}",
                "lowest to highest": f"{shown['low']} to {shown['high']}" if done else "–",
                "times as fast": f"{shown['ratio']} ({beside})" if row["contestant"] != beside else "–",
            }
        )  # fmt: skip
    versions = ", ".join(f"{name} {source['packages'].get(name, 'absent')}" for name in TOKENIZERS)
    return f"{source['cores']} cores, Python {source['python']}; {versions}; `{record['text']}`.\n\n{markdown(made)}"


TOKENIZERS = ("tiktoken", "gigatoken", "rustbpe")
CONTEXT = {"context_length": "context"}

PAGES: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {"sample": sample, "coverage": answered, "highlights": highlights},
    "docs/coverage.md": {"coverage": lambda: coverage_markdown(covered())},
    "results/h200/README.md": {
        "devices": devices,
        "training": training,
        "trials": trials,
        "norm-decay": norm_decay,
        "changes": changes,
        "sizes": sizes,
        "speed-attention": partial(
            contestants,
            "attention",
            {"mode": "mode", "head_size": "head size"} | CONTEXT,
            "rate",
            "{:.0f}".format,
        ),
        "speed-decode": partial(contestants, "decode", {"work": "work"}, "rate", "{:,.0f}".format),
        "speed-decode-share": partial(contestants, "decode", {"work": "work"}, "share", format_percent),
        "speed-memory-attention": partial(contestants, "memory-attention", CONTEXT, "peak_bytes", format_bytes),
        "speed-memory-step": partial(contestants, "memory-step", CONTEXT, "peak_bytes", format_bytes),
    },
    "benchmarks/README.md": {
        "speed": speed,
        "behind": behind,
        "heavier": heavier,
        "tokenization": tokenization,
        "parallel": parallel,
    },
    "results/README.md": {
        "faults": lambda: markdown(fault_counts().astype(str).to_dict("records")),
        "official": official,
    },
}
"""The tables of each page, by the name of their markers."""


def with_tables(page: str) -> str:
    """The page's text with its tables as the results give them. Raises `UserError` if it lacks a table's markers."""
    text = (PROJECT / page).read_text(encoding="utf-8")
    for name, table in PAGES[page].items():
        found = re.compile(rf"(?<=<!-- {name} -->\n).*?(?=<!-- /{name} -->)", re.DOTALL)
        require(found.search(text) is not None, f"{page} lacks the markers <!-- {name} --> and <!-- /{name} -->.")
        before, after = found.split(text)
        text = f"{before}{table()}\n{after}"
    return text


if __name__ == "__main__":
    for page in PAGES:
        made = with_tables(page)
        with atomic_write(PROJECT / page, "w") as file:
            file.write(made)
