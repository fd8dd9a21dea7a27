"""The reference results in results/<machine>/: their figures, and what the README says of them."""

import os
import re
from collections.abc import Mapping
from pathlib import Path

import pandas as pd

from lmcore.errors import require
from lmcore.files import atomic_write
from lmcore.recipes import RECIPES
from lmcore.workbook.report.answers import format_count, format_seconds
from lmcore.workbook.report.figures import learning_curves, learning_rate_sweep, save_figure, use_style
from lmcore.workbook.report.reference_measurements import measurement_figures, measurements_block
from lmcore.workbook.report.speed import speed_block
from lmcore.workbook.report.survival import faults_block
from lmcore.workbook.report.tables import curves_of, read_results
from lmcore.workbook.report.train.figures import batch_size_figure, divergence_figure
from lmcore.workbook.report.train.recipes import TARGET

FAULTS = Path("results/faults.json")


def write_reference_figures(results: str | os.PathLike, figures: str | os.PathLike) -> list[Path]:
    """Draws the figures of a machine's results as SVG: those of training, and those of what was measured."""
    use_style()
    table, _, notes = read_results(Path(results) / "training_runs.json")
    curves, _, _ = read_results(Path(results) / "training_curves.json")
    rates, sizes = _study(table, "lr_", "learning_rate"), _study(table, "batch_", "batch_size")
    recipes = {name: name for name in _ladder(table)["name"]}
    by_rate = curves_of(curves, {row["name"]: f"{row['learning_rate']:g}" for row in rates.to_dict("records")})
    by_size = curves_of(curves, {row["name"]: f"{row['batch_size']:,}" for row in sizes.to_dict("records")})
    made = {
        "learning_curves": learning_curves(curves_of(curves, recipes), "step"),
        "learning_curves_seconds": learning_curves(curves_of(curves, recipes), "seconds"),
        "learning_rate_sweep": learning_rate_sweep(rates),
        "divergence": divergence_figure(by_rate, notes["unigram_entropy"]),
        "batch_size_curves": learning_curves(by_size, "tokens"),
        "batch_size_sweep": batch_size_figure(sizes),
        **measurement_figures(Path(results)),
    }
    return [save_figure(figure, Path(figures) / f"{name}.svg") for name, figure in made.items()]


def _study(table: pd.DataFrame, prefix: str, by: str) -> pd.DataFrame:
    return table[table["name"].str.startswith(prefix)].sort_values(by)


def _ladder(table: pd.DataFrame) -> pd.DataFrame:
    """The best run of the learning-rate sweep, then the recipes, in the order of their losses."""
    rates = _study(table, "lr_", "final_valid_loss").head(1)
    recipes = table[table["name"].isin(list(RECIPES))].sort_values("final_valid_loss", ascending=False)
    return pd.concat([rates, recipes], ignore_index=True)


def results_block(results: str | os.PathLike) -> str:
    """What the README says of a machine's training runs, as Markdown: every number comes from the results file."""
    table, provenance, _ = read_results(Path(results) / "training_runs.json")
    trials, _, _ = read_results(Path(results) / "exploration.json")
    data, rows = provenance["data"], _ladder(table)
    shown = pd.DataFrame(
        {
            "run": [f"`{name}`" for name in rows["name"]],
            "settings": [_settings(row) for row in rows.to_dict("records")],
            "tokens": [format_count(tokens) for tokens in rows["tokens"]],
            "validation loss": [f"{loss:.3f}" for loss in rows["final_valid_loss"]],
            "time": [format_seconds(seconds) for seconds in rows["seconds"]],
        }
    )
    best = rows.iloc[-1]
    gap = best["final_valid_loss"] - TARGET
    verdict = f"{abs(gap):.3f} {'above' if gap > 0 else 'below'} the {TARGET} that the handout asks for"
    return (
        f"TinyStories, {data['train_tokens']:,} training tokens (GPT-2's vocabulary) and nothing else; loss in nats "
        f"per token over all {data['valid_tokens']:,} validation tokens, in windows that do not overlap. One "
        f"{provenance['device']} per run, PyTorch {provenance['torch']}, bf16.\n\n"
        f"{shown.to_markdown(index=False, disable_numparse=True)}\n\n"
        f"The best is {verdict}, with a corpus that is read {best['tokens'] / data['train_tokens']:.0f} times. "
        f"The recipes were chosen in {len(trials)} earlier trials "
        f"([record](results/{Path(results).name}/exploration.json), not repeatable by the project's own code) "
        f"by the loss on this same validation text, which flatters them a "
        "little. Notebook 02 explains each step; the tables, with commits and versions, are in "
        f"[`results/`](results/{Path(results).name}), all answers in "
        f"[`answers.pdf`](writeup/{Path(results).name}/answers.pdf).\n\n"
        f"{_sample(Path(results))}\n\n{measurements_block(Path(results))}"
    )


def _sample(results: Path) -> str:
    """The text that notebook 03 hands in, up to its first end, as a quotation, with the run that wrote it."""
    run = read_results(results / "generate_run.json")[0].iloc[0]
    sample = read_results(results / "generate_text.json")[0].iloc[-1]
    how = f"validation loss {run['valid_loss']:.3f}, temperature {sample['temperature']:g}, top-p {sample['top_p']:g}"
    text = (sample["prompt"] + sample["text"]).partition("<|endoftext|>")[0]
    lines = [line for line in text.strip().splitlines() if line]
    return f"`{run['recipe']}` goes on from “{sample['prompt']}” ({how}):\n\n> " + "\n>\n> ".join(lines)


def _settings(row: dict) -> str:
    parts = [row["optimizer"], f"learning rate {row['learning_rate']:g}", f"weight decay {row['weight_decay']:g}"]
    parts += ["epochs"] if row["sampling"] == "epoch" else []
    parts += ["tied embeddings"] if row["tie_embeddings"] else []
    parts += [f"dropout {row['dropout']:g}"] if row["dropout"] else []
    return ", ".join([*parts, f"{row['steps']:,} × {row['batch_size']}"])


def block(name: str) -> re.Pattern[str]:
    """What stands between the README's markers of this name."""
    return re.compile(rf"(?<=<!-- {name} -->\n).*?(?=<!-- /{name} -->)", re.DOTALL)


def write_readme(readme: str | os.PathLike, blocks: Mapping[str, str]) -> None:
    """Puts each text between the README's markers of that name. Raises `UserError` if they are missing."""
    text = Path(readme).read_text(encoding="utf-8")
    for name, content in blocks.items():
        there = block(name)
        require(there.search(text) is not None, f"{readme} lacks the markers <!-- {name} --> and <!-- /{name} -->.")
        text = there.sub(lambda _, content=content: content, text)
    with atomic_write(readme, "w") as file:
        file.write(text)


if __name__ == "__main__":
    write_reference_figures("results/h200", "figures/h200")
    blocks = {"results": results_block("results/h200"), "speed": speed_block("results/h200")}
    write_readme("README.md", blocks | {"faults": faults_block(FAULTS)})
