import numpy as np
import pandas as pd
import pytest
from notebook_cells import PROJECT

from lmcore.accounting import num_parameters, training_flops
from lmcore.config import model_config, replace
from lmcore.errors import UserError
from lmcore.fast.support import unsupported_reason
from lmcore.recipes import RECIPES, recipe
from workbook.notebook import code_cells, read_notebook
from workbook.report.variations import with_seeds, with_steps


@pytest.mark.parametrize("name", ["handout", "regularized", "tied", "best-at-budget"])
def test_the_handouts_budget_and_model(name):
    config = RECIPES[name]
    assert config.steps * config.tokens_per_step == 32 * 256 * 5000
    assert config.model == model_config("tinystories", vocab_size=50257, context_length=256, attention="flash",
                                        tie_embeddings=config.model.tie_embeddings)  # fmt: skip


def test_twelve_layers_have_at_most_the_handouts_parameters():
    assert num_parameters(RECIPES["deep"].model) <= num_parameters(RECIPES["handout"].model)


def test_a_recipe_takes_data_vocabulary_and_steps():
    config = with_steps(recipe("handout", "somewhere", 400), 50)
    assert (config.data, config.model.vocab_size, config.steps) == ("somewhere", 400, 50)
    assert (config.optimizer.warmup_steps, config.optimizer.cosine_steps) == (2, None)
    with pytest.raises(UserError, match="There is no recipe 'x'; choose one of smoke"):
        recipe("x", "somewhere", 400)
    with pytest.raises(UserError, match="steps must be"):
        with_steps(config, 0)


def test_each_run_once_for_each_seed():
    base = RECIPES["handout"]
    runs = {f"lr_{rate:g}": replace(base, optimizer__learning_rate=rate) for rate in (1e-4, 1e-1)}
    repeated = with_seeds(runs, [0, 3])
    assert list(repeated) == ["lr_0.0001", "lr_0.0001_seed_3", "lr_0.1", "lr_0.1_seed_3"]
    assert replace(repeated["lr_0.1_seed_3"], seed=0) == repeated["lr_0.1"] == runs["lr_0.1"]


def test_notebook_02_tries_batch_sizes_beyond_rates_at_whose_ends_they_are_best():
    cells = code_cells(read_notebook(PROJECT / "notebooks" / "02_train.ipynb"))
    source = next(cell.source for _, cell in cells if cell.id == "train-search")
    base = RECIPES["smoke"]
    names = {"np": np, "batch_run": lambda size, rate: replace(base, batch_size=size, optimizer__learning_rate=rate)}
    exec(source, names)
    tried = {  # losses by rate; None: diverged
        1: {0.1: None, 0.2: None},  # none completed: lower
        8: {0.001: 2.0, 0.002: 1.9, 0.004: None},  # turned
        32: {0.002: 1.8, 0.001: 1.9, 0.004: 1.9},  # turned
        64: {0.002: 3.0, 0.004: 2.0},  # higher
        128: {0.002: 2.0, 0.004: None},  # lower
        512: {0.003: 2.0},  # both
    }
    rows = [
        {"batch_size": size, "learning_rate": rate, "final_valid_loss": loss}
        | {"outcome": "diverged" if loss is None else "complete"}
        for size, losses in tried.items() for rate, loss in losses.items()
    ]  # fmt: skip
    rows += [{"batch_size": 8192, "learning_rate": 0.003, "outcome": "out of memory", "final_valid_loss": None}]
    more = names["beyond_the_edges"](pd.DataFrame(rows))
    found = [(config.batch_size, config.optimizer.learning_rate) for config in more.values()]
    assert found == [(1, 0.05), (64, 0.008), (128, 0.001), (512, 0.006), (512, 0.0015)]
    assert list(more)[1] == "batch_64_lr_0.008"


def test_the_leaderboards_recipe_takes_the_explicit_step_and_reads_the_corpus_once():
    config = RECIPES["leaderboard"]
    assert unsupported_reason(config.model, config.precision) is None
    assert (config.ops, config.sampling, config.model.vocab_size) == ("fused", "epoch", 32_000)
    tokens = config.steps * config.tokens_per_step
    assert tokens == pytest.approx(3e9, rel=0.01)
    assert tokens / num_parameters(config.model) == pytest.approx(27.5, rel=0.01)
    seconds = tokens * training_flops(config.model) / config.model.context_length / (0.46 * 989.4e12)
    assert seconds == pytest.approx(5100, rel=0.01)  # within the hour and a half, at the share of the peak it says
    assert config.steps % config.eval_interval == config.steps % config.checkpoint_interval == 0
    trial = with_steps(recipe("leaderboard", "somewhere", 32_000), 100)
    assert (trial.steps, trial.eval_interval, trial.optimizer.warmup_steps) == (100, 25, 2)
