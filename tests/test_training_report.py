import math

import pandas as pd
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from lmcore.workbook.report.figures import use_style
from lmcore.workbook.report.train import recipes as training_recipes
from lmcore.workbook.report.train import sweeps as training
from lmcore.workbook.report.train.figures import batch_size_figure, divergence_figure


@pytest.fixture(scope="module", autouse=True)
def style():
    use_style()


def run(name: str, loss: float | None = 2.0, **changes) -> dict:
    row = {
        "name": name,
        "optimizer": "adamw",
        "learning_rate": 1e-3,
        "weight_decay": 0.1,
        "batch_size": 32,
        "steps": 1000,
        "tokens": 8_192_000,
        "tie_embeddings": False,
        "dropout": 0.0,
        "sampling": "random",
        "outcome": "complete",
        "final_valid_loss": loss,
        "best_valid_loss": loss,
        "best_step": 1000,
        "diverged_at_step": None,
        "max_spike": 0.1,
        "seconds": 90.0,
        "tokens_per_second": 100_000.0,
        "peak_memory_bytes": None,
        "device": "Chip A",
    }
    return row | changes


def diverged(name: str, **changes) -> dict:
    return run(name, None, outcome="diverged", **{"diverged_at_step": 40.0, "max_spike": 9.0} | changes)


def sweep(losses: dict[float, float | None]) -> pd.DataFrame:
    """A run for each learning rate; None: diverged."""
    rows = []
    for rate, loss in losses.items():
        row = diverged(f"lr_{rate:g}") if loss is None else run(f"lr_{rate:g}", loss)
        rows.append(row | {"learning_rate": rate})
    return pd.DataFrame(rows)


NO_CURVES = pd.DataFrame(columns=["name", "step", "valid_loss"])


def curves(losses: dict[str, list[float]], every: int) -> pd.DataFrame:
    return pd.DataFrame(
        [
            {"name": name, "step": every * number, "valid_loss": loss}
            for name, values in losses.items()
            for number, loss in enumerate(values, 1)
        ]
    )


def test_the_toy_falls_overflows_or_grows():
    text = training.sgd_answer({1.0: [9.0, 6.0], 10.0: [9.0, 1.5], 100.0: [9.0, 2e9], 1e3: [9.0, math.inf]})
    assert "learning rate **1** it falls from 9.00 to 6.00" in text
    assert r"**100** it diverges: it grows from 9.00 to $2.0 \cdot 10^{9}$" in text
    assert "**1,000** it diverges: it grows from 9.00 until it is not finite at iteration 1" in text
    assert text.endswith("It falls fastest at 10.")
    assert "fastest" not in training.sgd_answer({1.0: [9.0, 6.0], 100.0: [9.0, 20.0]})


def test_the_best_learning_rate_in_the_middle():
    text = training.learning_rate_answer(sweep({1e-4: 2.5, 1e-3: 1.75, 1e-2: 1.9, 1e-1: None}))
    assert "4 learning rates from 0.0001 to 0.1, apart by factors of 10," in text
    assert "The best is **0.001** with 1.750 nats per token." in text
    assert "tested" not in text
    assert text.count("diverged at step 40") == 1
    unseen = sweep({1e-4: 2.5, 1e-3: 1.75, 1e-1: None}).assign(max_spike=[0.1, 0.2, 0.0])
    assert training.learning_rate_answer(unseen).splitlines()[6].split("|")[3].strip() == "–"  # nothing was logged


@pytest.mark.parametrize(
    ("losses", "sentence"),
    [
        ({1e-3: 1.5, 1e-2: 1.9}, "It is the smallest one tested, so the optimum may lie lower."),
        ({1e-3: 1.9, 1e-2: 1.5}, "It is the largest one tested, so the optimum may lie higher."),
        ({1e-3: 1.9, 2e-3: 1.505, 4e-3: 1.5, 8e-3: 1.7}, "The best is **0.004** with 1.500 nats per token; 0.002 with"),
        ({1e-1: None, 1.0: None}, "No run was completed: the sweep must go on at smaller learning rates."),
    ],
)
def test_the_best_learning_rate_elsewhere(losses, sentence):
    assert sentence in training.learning_rate_answer(sweep(losses))


def test_the_edge_is_far_from_the_best():
    runs = sweep({1e-4: 2.5, 1e-3: 1.75, 1e-2: 1.95, 1e-1: None, 1.0: None})
    runs.loc[2, "max_spike"] = 3.0
    text = training.edge_answer(runs, NO_CURVES)
    assert "that diverged is **0.1** (at step 40), **100 times** the best, 0.001." in text
    assert "Between the two, 0.01 trained to the end, up to 0.20 nats worse." in text
    assert "Of these, 0.01 lost stability on the way (the training loss rose by up to 3.0 nats)" in text
    assert "below the edge rather than at it" in text
    assert "lost stability" not in training.edge_answer(runs.assign(max_spike=0.1), NO_CURVES)


def test_the_edge_is_near_the_best():
    text = training.edge_answer(sweep({1e-3: 2.5, 2e-3: 1.75, 4e-3: None}), NO_CURVES)
    assert "**2 times** the best, 0.002. Here the folk wisdom holds" in text


def test_nothing_between_the_best_and_the_edge():
    text = training.edge_answer(sweep({1e-3: 1.5, 1e-1: None}), NO_CURVES)
    assert "Nothing was tested between the two" in text
    assert "folk wisdom" not in text


def test_no_run_diverged():
    text = training.edge_answer(sweep({1e-3: 1.5, 1e-2: 1.7}), NO_CURVES)
    assert text.startswith("No run above the best learning rate, 0.001, diverged, up to 0.01: the edge of stability")
    assert "times" not in text


def test_all_runs_diverged():
    text = training.edge_answer(sweep({1e-1: None, 1.0: None}), NO_CURVES)
    assert text.startswith("Every learning rate diverged, down to 0.1")


def test_a_run_below_the_best_diverged():
    text = training.edge_answer(sweep({1e-3: None, 1e-2: 1.5, 2e-2: None}), NO_CURVES)
    assert "Below the best, 0.001 diverged too" in text
    assert "**2 times**" in text


def test_who_leads_early_and_who_wins():
    runs = sweep({1e-3: 1.5, 1e-2: 1.7})
    fast_start = curves({"lr_0.001": [4.0, 1.5], "lr_0.01": [3.0, 1.7]}, every=500)
    assert training.edge_answer(runs, fast_start).endswith(
        "after 500 of 1,000 steps the lowest validation loss is that of 0.01, but the smaller 0.001 wins in the end."
    )
    same = curves({"lr_0.001": [2.0, 1.5], "lr_0.01": [3.0, 1.7]}, every=500)
    assert "that of 0.001, which also wins in the end." in training.edge_answer(runs, same)
    assert "Convergence" not in training.edge_answer(runs, curves({"lr_0.001": [1.5], "lr_0.01": [1.7]}, every=1000))
    runs = sweep({1e-4: 1.9, 1e-3: 1.5, 1e-2: None})
    fast_start = curves({"lr_0.0001": [5.0, 1.9], "lr_0.001": [4.0, 1.5], "lr_0.01": [3.0]}, every=500)
    assert "that of 0.01, which diverges later; 0.001 wins in the end." in training.edge_answer(runs, fast_start)


def batches() -> pd.DataFrame:
    return pd.DataFrame(
        [
            run("batch_1", 2.4, batch_size=1, steps=32_000, tokens_per_second=9_000.0, peak_memory_bytes=2e9),
            run("batch_16", 1.9, batch_size=16, steps=2000, tokens_per_second=90_000.0, peak_memory_bytes=3e9),
            run("batch_256", 3.1, batch_size=256, steps=125, tokens_per_second=450_000.0, peak_memory_bytes=40e9),
            run("batch_2048", None, batch_size=2048, outcome="out of memory", tokens_per_second=None, max_spike=None),
        ]
    )


def test_batch_sizes_up_to_the_memory():
    text = training.batch_size_answer(batches())
    assert "Tested: batch sizes 1, 16, 256 and 2,048, all on about 8.2 million tokens." in text
    assert "The lowest final loss, **1.900**, is that of batch size **16** in 2,000 steps." in text
    assert (
        "The largest that was completed, 256, makes only 125 steps of the same tokens and ends 1.2 nats higher" in text
    )
    assert "The smallest, 1, ends 0.50 nats higher" in text
    assert "from 9,000 tokens per second at 1 to 450,000 tokens per second at 256 (50 times)" in text
    assert "Peak memory goes from 2.00 GB at 1 to 40.0 GB at 256." in text
    assert text.endswith("Batch size 2,048 ran **out of memory** on Chip A.")


def test_batch_sizes_on_another_machine():
    rows = batches().iloc[:3].assign(peak_memory_bytes=None, tokens_per_second=[500.0, 400.0, 300.0])
    rows["final_valid_loss"] = [1.0, 2.0, 3.0]
    text = training.batch_size_answer(rows)
    assert "The smallest batch is also the fastest (500 tokens per second)." in text
    assert "is that of batch size **1** in 32,000 steps." in text
    assert "The smallest, 1, ends" not in text
    assert "Peak memory" not in text
    assert text.endswith("None reached the limit of the memory.")


def test_batch_sizes_of_which_none_was_completed():
    rows = pd.DataFrame([diverged("a"), run("b", None, batch_size=64, outcome="out of memory")])
    text = training.batch_size_answer(rows)
    assert "Diverged: 32." in text
    assert "lowest" not in text


@pytest.mark.parametrize(
    ("loss", "sentence", "with_device"),
    [
        (1.44, "That meets the target of 1.45.", False),
        (1.70, "That is below the 2.00 of the handout's smaller budget, and 0.25 above the target of 1.45.", True),
        (2.45, "That is above 2.00, and 1.0 above the target of 1.45.", True),
    ],
)
def test_targets(loss, sentence, with_device):
    text = training_recipes.targets_answer(pd.DataFrame([run("a", 3.0), run("b", loss), diverged("c")]))
    assert sentence in text
    assert "of 3 runs" in text
    assert "reached by `b`" in text
    assert ("Device: Chip A; parameters: optimizer adamw, learning rate 0.001," in text) == with_device
    assert ("tied embeddings off" in text) == with_device


def test_targets_of_a_corpus_with_a_floor():
    text = training_recipes.targets_answer(pd.DataFrame([run("a", 0.9)]), floor=0.25)
    assert "known, 0.250: no model can stay below it, and this one is 0.65 nats above" in text
    assert "Device:" not in text


def test_targets_without_a_completed_run():
    assert "No run was completed" in training_recipes.targets_answer(pd.DataFrame([diverged("a")]))
    assert "no speed is known" in training_recipes.budget_answer(pd.DataFrame([diverged("a")]))


def test_the_ladder_names_every_change_and_its_gain():
    rows = [
        run("first", 1.8),
        run("second", 1.75, weight_decay=1.0, sampling="epoch"),
        run("third", 1.77, weight_decay=1.0, sampling="epoch", tie_embeddings=True),
        run("fourth", 1.5, optimizer="muon", steps=4000, tokens=32_768_000, dropout=0.2),
    ]
    lines = training_recipes.ladder_answer(pd.DataFrame(rows)).splitlines()
    assert "weight decay 0.1 → 1; sampling random → epoch" in lines[3]
    assert "-0.050" in lines[3]
    assert "tied embeddings off → on" in lines[4]
    assert "+0.020" in lines[4]
    assert "optimizer adamw → muon; weight decay 1 → 0.1; steps 1,000 → 4,000" in lines[5]
    assert "dropout 0 → 0.2" in lines[5]
    assert lines[-1] == "From `first` to `fourth` the loss falls by **0.300** nats, on 4.00 times the tokens."


def test_ladders_without_a_gain():
    answer = training_recipes.ladder_answer
    assert "Only one recipe" in answer(pd.DataFrame([run("a")]))
    assert "Nothing improved on `a`" in answer(pd.DataFrame([run("a", 1.0), run("b", 1.2)]))
    assert "Fewer than two" in answer(pd.DataFrame([run("a", 1.0), diverged("b")]))


def test_what_the_full_budget_takes():
    text = training_recipes.budget_answer(pd.DataFrame([run("a", 1.0, tokens_per_second=327_680.0), run("b", 2.0)]))
    assert text.startswith("`a` trained at 327,680 tokens per second on Chip A")
    assert text.endswith("would take this model 16 min 40 s there.")


def test_a_batch_size_that_did_not_fit_is_marked():
    figure = batch_size_figure(batches())
    FigureCanvasAgg(figure).draw()
    losses, speeds = figure.axes
    assert losses.lines[0].get_xdata().tolist() == [1, 16, 256]
    assert [text.get_text() for text in losses.texts] == ["out of memory"]
    assert [tick.get_text() for tick in speeds.get_xticklabels()] == ["1", "16", "256", "2,048"]
    box, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
    assert min(box.x0, box.y0) >= 0  # nothing is cut off
    assert box.x1 <= width + 0.01
    assert box.y1 <= height + 0.01


def test_diverged_curves_are_shown_whole():
    curve = pd.DataFrame({"step": range(1, 121), "train_loss": [2.0] * 60 + [400.0] * 60})
    axes = divergence_figure({"1e-3": curve.assign(train_loss=1.5), "1": curve}, 6.0).axes[0]
    low, high = axes.get_ylim()
    assert low < 1.5
    assert high > 400
    assert len(axes.lines[1].get_xdata()) == 60
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["1e-3", "1", "token frequencies"]
