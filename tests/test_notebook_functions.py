"""Functions of notebooks in cases that their records do not hold, and results that were derived by hand."""

import ast
import json
from itertools import combinations
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from notebook_cells import ANSWERS, cells_of

from lmcore.config import model_config


def function(notebook: str, cell: str, name: str, **names):
    """A function of a cell, which knows these names."""
    tree = ast.parse(cells_of(notebook)[cell])
    (found,) = (node for node in tree.body if getattr(node, "name", "") == name)
    exec(ast.unparse(found), names)
    return names[name]


def test_a_step_that_does_not_fit_is_a_row():
    """All ranks say so, and meet again at the barrier."""
    met = []
    time_steps = function(
        "09_distributed", "distributed-steps", "time_steps", torch=torch, np=np, PARTS=["forward", "update"],
        dist=SimpleNamespace(barrier=lambda: met.append(0)), first_ranks=lambda count: None,
        place_of=lambda rank: torch.device("cpu"), reset_peak_memory=lambda place: None,
        take_steps=lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("too much")),
    )  # fmt: skip
    times, memory = time_steps(0, 2, "flat", {})
    assert np.isnan(times).tolist() == [[True, True]]
    assert (memory, met) == ({"outcome": "out of memory"}, [0])
    assert time_steps(2, 2, "flat", {}) is None


def test_blocks_that_are_shown_are_the_librarys():
    cells, found = cells_of("08_experiments"), []
    checks = SimpleNamespace(table=lambda _, measure: found.append(measure()) or found[0])
    source = "\n".join(cells[f"experiments-{name}"] for name in ("blocks", "blocks-check"))
    exec(source, {"torch": torch, "pd": pd, "checks": checks})
    assert found[0]["difference"].max() < 1e-12


def test_the_settings_of_the_bounds_are_the_sizes_that_they_name():
    """`xl` is the model of 2025; the handout of 2026 asks for its own."""
    names = {"np": np}
    exec(cells_of("09_distributed")["parallel-settings"], names)
    for setting, values in names["SETTINGS"].items():
        config = model_config(setting.partition(",")[0])
        assert (values["D"], values["F"]) == (config.d_model, config.d_ff), setting


def test_the_accounts_of_parallelism_are_those_of_the_handouts_numbers():
    """Derived by hand: 2025's XXL has 2 * 16,384 * 53,248 * 126 parameters, a token saves 2 * 69,632 * 126 bytes."""
    answers = json.loads(ANSWERS.read_text(encoding="utf-8"))["09_distributed"]
    told = {problem: found["values"] for problem, found in answers.items()}
    account = {part: told[f"communication_accounting ({part})"] for part in "abcd"}
    assert account["a"]["parameters"] == 219_848_638_464
    assert account["a"]["state"] == pytest.approx(3517.578, abs=1e-3)  # GB, 16 bytes each: 43.97 devices of 80 GB
    assert account["a"]["token"] == pytest.approx(17.547264)  # MB
    assert (account["a"]["gpus"], account["a"]["together"]) == (44, 45)
    assert (account["b"]["without"], account["b"]["sequence_needed"]) == (38, 61)  # 37.03; 3,553.5 / 59.06 = 60.17
    assert account["c"]["device"] == pytest.approx(319.444, abs=1e-2)  # 4.6e14 / 1.8e11 / (4 * 2), times 64 chips:
    assert account["c"]["overall"] == pytest.approx(20_444.4, abs=1)
    assert account["c"]["share"] == pytest.approx(0.19197, abs=1e-4)  # 4 * 2,555.6 / 53,248
    assert account["c"]["best"] == pytest.approx(61.33, abs=1e-2)  # 2,555.6 ** 2 / (2 * 53,248)
    # of 131,072 tokens B W / C = 59.61, of 10,240 features 3 F W / 2 C = 6.99
    assert told["data_parallel_calcs (c)"]["last"] == told["fsdp_calcs (c)"]["last"] == 60
    assert (told["tp_calcs (d)"]["forward"], told["tp_calcs (d)"]["backward"]) == (7, 14)
    assert told["fsdp_tp_calcs (c)"]["N"] == pytest.approx(60.614 * 7.986, rel=2e-3)
    assert told["fsdp_tp_calcs (d)"]["N"] == pytest.approx((416.47 + 59.61 + 6.99) ** 2 / (4 * 416.47), rel=2e-3)
    zero = told["optimizer_state_sharding_accounting (c)"]
    assert (zero["theirs"], zero["ours"]) == (7e9, 10.5e9)  # 7/8 of 4 GB, twice and three times


LOSSES = [  # of each setting's seeds, and what is said of them
    ({"a": [5.0, 5.1], "b": [4.0, 4.1], "c": [3.0, 3.0]}, "they differ by more than their seeds do"),
    ({"a": [5.0, 5.1], "b": [5.0, 5.2], "c": [3.0, 3.0]}, "A and B differ by less than their seeds do, the others"),
    ({"a": [5.0, 5.3], "b": [5.1, 5.1], "c": [5.0, 5.1]}, "they differ by less than the seeds of one do, so no order"),
    ({"a": [5.0], "b": [4.0], "c": [3.0]}, "with one seed, no difference is a finding"),
]


@pytest.mark.parametrize(("losses", "said"), LOSSES)
def test_settings_are_compared_with_their_seeds(losses, said):
    undecided = function("10_wikitext", "wikitext-answer-sizes", "undecided", np=np, combinations=combinations)
    rows = [(name, loss) for name, seeds in losses.items() for loss in seeds]
    scores = pd.DataFrame(rows, columns=["setting", "loss"])
    assert undecided(scores, {name: name.upper() for name in losses}).startswith(said)
