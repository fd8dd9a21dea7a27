"""`lmcore runs`: training runs side by side, as a table and as a picture."""

from math import inf
from pathlib import Path
from typing import Annotated, Any

import tyro

from lmcore.errors import UserError, require
from lmcore.files import atomic_write, require_exists
from lmcore.text import optional

COLUMNS = ("run", "data", "state", "steps", "tokens", "best loss", "final loss", "seconds", "device")


def runs(folder: Annotated[Path, tyro.conf.Positional] = Path("runs"), plot: Path | None = None) -> int:
    """Compare training runs: state, steps, tokens, the lowest and the last validation loss, seconds, device.

    Runs on the same data stand together, the lowest loss first. Losses, in nats per token, of data with different
    tokenizers do not compare.

    Args:
        folder: Folder that holds run folders, at any depth.
        plot: File for a picture of the validation losses, .svg or .png.
    """
    require_exists(folder)
    require(plot is None or plot.suffix in (".svg", ".png"), f"--plot {plot} must end in .svg or .png.")
    from tabulate import tabulate

    from lmcore.run import RunFolder

    found = [RunFolder(path.parent) for path in sorted(folder.rglob("environment.json"))]
    require(bool(found), f"There is no training run in {folder}.")
    rows = [{"run": str(run.path.relative_to(folder))} | described(run) for run in found]
    rows.sort(key=lambda row: (row.get("data", ""), row.get("best loss", inf)))
    formats = {"tokens": ",", "best loss": ".4f", "final loss": ".4f", "seconds": ",.0f"}
    cells = [[format(row[name], formats.get(name, "")) if name in row else "" for name in COLUMNS] for row in rows]
    print(tabulate(cells, COLUMNS, "plain", disable_numparse=True))
    if plot is not None:
        draw({row["run"]: row["evaluations"] for row in rows if row.get("evaluations")}, plot)
        print(f"Written to {plot}.")
    return 0


def described(run: Any) -> dict[str, Any]:
    """What is known of a run, by column, and its evaluations; of a damaged one, what is wrong as its state."""
    try:
        config, status, lines = run.config(), run.status(), run.metrics_lines()
        killed = status["state"] == "running" and not run.is_busy()
        row = {
            "data": Path(config.data).name,
            "state": "killed" if killed else status["state"],
            "steps": f"{status['step']:,} of {config.steps:,}",
            "device": run.environment()["device"],
        }
    except UserError as error:
        return {"state": str(error)}
    if lines:
        row |= {name: lines[-1][name] for name in ("tokens", "seconds")}
    if evaluations := [(line["tokens"], line["valid_loss"]) for line in lines if "valid_loss" in line]:
        best, (_, final) = min(loss for _, loss in evaluations), evaluations[-1]
        row |= {"best loss": best, "final loss": final, "evaluations": evaluations}
    return row


def draw(curves: dict[str, list[tuple[int, float]]], path: Path) -> None:
    """The validation losses of runs by the tokens that they had read; each has its name at its end."""
    figure = optional("matplotlib.figure", "A picture needs", "matplotlib", "plot").Figure(layout="constrained")
    axes = figure.subplots()
    axes.set(xlabel="tokens read", ylabel="validation loss (nats per token)")
    axes.spines[["top", "right"]].set_visible(False)
    for number, (name, evaluations) in enumerate(curves.items()):
        axes.plot(*zip(*evaluations, strict=True), ".-", color=f"C{number}")
        text = " " + name.replace("$", r"\$")
        axes.annotate(text, evaluations[-1], color=f"C{number}", va="center", annotation_clip=False)
    with atomic_write(path) as file:
        figure.savefig(file, format=path.suffix[1:])
