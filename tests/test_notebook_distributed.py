"""Notebook 09: a step that does not fit, and the accounts of parallelism by hand."""

import ast
import json
from types import SimpleNamespace

import numpy as np
import torch
from notebook_cells import ANSWERS, PROJECT

from lmcore.config import model_config
from workbook.notebook import code_cells, read_notebook

NAME = "09_distributed"


def test_a_step_that_does_not_fit_is_a_row():
    """All ranks say so, and meet again at the barrier."""
    cells = [cell.source for _, cell in code_cells(read_notebook(PROJECT / "notebooks" / f"{NAME}.ipynb"))]
    cell = next(ast.parse(source) for source in cells if "def time_steps(" in source)
    function = next(node for node in cell.body if getattr(node, "name", "") == "time_steps")
    met = []
    names = {
        "torch": torch, "np": np, "PARTS": ["forward", "update"],
        "dist": SimpleNamespace(barrier=lambda: met.append(0)),
        "first_ranks": lambda count: None, "place_of": lambda rank: torch.device("cpu"),
        "reset_peak_memory": lambda place: None,
        "take_steps": lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("too much")),
    }  # fmt: skip
    exec(ast.unparse(function), names)
    times, memory = names["time_steps"](0, 2, "flat", {})
    assert times.shape == (1, 2)
    assert np.isnan(times).all()
    assert memory == {"outcome": "out of memory"}
    assert met == [0]
    assert names["time_steps"](2, 2, "flat", {}) is None


def test_the_settings_of_the_bounds_are_the_sizes_that_they_name():
    """`xl` is the model of 2025; the handout of 2026 asks for its own."""
    cells = [cell.source for _, cell in code_cells(read_notebook(PROJECT / "notebooks" / f"{NAME}.ipynb"))]
    names = {"np": np}
    exec(next(source for source in cells if source.startswith("H100 =")), names)
    for setting, values in names["SETTINGS"].items():
        config = model_config(setting.partition(",")[0])
        assert (values["D"], values["F"]) == (config.d_model, config.d_ff), setting


def test_the_accounts_of_parallelism_are_those_of_the_handouts_numbers():
    """Derived by hand: 2025's XXL has 2 * 16,384 * 53,248 * 126 parameters, a token saves 2 * 69,632 * 126 bytes."""
    told = {problem: found["text"] for problem, found in json.loads(ANSWERS.read_text(encoding="utf-8"))[NAME].items()}
    for problem, numbers in {
        "communication_accounting (a)": [
            "3,518 GB",
            "44 H100 GPUs",
            "220 billion",
            "17.5 MB",
            "71.9 GB",
        ],  # 16 bytes each
        "communication_accounting (b)": ["= 38 on", "from 61 on"],  # 37.03; (3,517.6 + 35.9) / (95 - 35.9) = 60.2
        # 4.6e14 / 1.8e11 = 2,555.6, over 4 * 2; times 64; 4 * 2,555.6 / 53,248; 2,555.6 ** 2 / (2 * 53,248)
        "communication_accounting (c)": ["319.4 tokens", "20,444", "19%", "61.3 tokens", "20.8"],
        # of 131,072 tokens B W / C = 59.61, of 10,240 features 3 F W / 2 C = 6.99
        "data_parallel_calcs (c)": ["60 devices"],
        "fsdp_calcs (c)": ["60 devices"],
        "tp_calcs (d)": ["14 and 7 devices"],
        "fsdp_tp_calcs (c)": ["60 × 7 devices"],
        "fsdp_tp_calcs (d)": ["35 × 4 devices"],  # 34 / 59.61 + 3 / 6.99 = 0.9997
    }.items():
        assert all(number in " ".join(told[problem].split()) for number in numbers), told[problem]
