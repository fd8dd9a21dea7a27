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
from nsys_exports import H200

from lmcore import accounting
from lmcore.config import ModelConfig, model_config, replace
from lmcore.errors import require
from lmcore.model import TransformerLM
from lmcore.optimizer import AdamW
from lmcore.profiling.cases import WorkloadConfig
from lmcore.profiling.nsys.export import read_export
from lmcore.profiling.nsys.profile import summary
from lmcore.profiling.workload import Workload


def function(notebook: str, name: str, **names):
    """A function of a notebook, which knows these names."""
    statements = [node for source in cells_of(notebook).values() for node in ast.parse(source).body]
    exec(ast.unparse(next(node for node in statements if getattr(node, "name", "") == name)), names)
    return names[name]


def test_a_step_that_does_not_fit_is_a_row():
    """All ranks say so, and meet again at the barrier."""
    met = []
    time_steps = function(
        "09_distributed", "time_steps", torch=torch, np=np, PARTS=["forward", "update"],
        dist=SimpleNamespace(barrier=lambda: met.append(0)), first_ranks=lambda count: None,
        place_of=lambda rank: torch.device("cpu"), reset_peak_memory=lambda place: None,
        take_steps=lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("too much")),
    )  # fmt: skip
    times, memory = time_steps(0, 2, "flat", {})
    assert np.isnan(times).tolist() == [[True, True]]
    assert (memory, met) == ({"outcome": "out of memory"}, [0])
    assert time_steps(2, 2, "flat", {}) is None


@pytest.mark.parametrize(
    ("words", "unknown", "said"),
    [
        (213_886, 800, "WikiText-103's validation text"),
        (213_886, 11_600, "WikiText-2's validation text"),
        (206_454, 800, "another text"),
    ],
)
def test_a_text_of_wikitext_is_told_by_its_words_and_unknown_ones(words, unknown, said):
    assert function("10_wikitext", "which_text")(words, unknown) == said


def test_memory_of_parameters_gradients_and_state_equals_the_tensors():
    config = model_config("smoke", vocab_size=97, context_length=16)
    model = TransformerLM(config)
    optimizer = AdamW(model.parameters())
    model(torch.zeros(1, 4, dtype=torch.long)).sum().backward()
    optimizer.step()
    memory = function("01_build", "adamw_memory", accounting=accounting)(config, config, 1)
    assert memory["parameters"] == sum(p.nbytes for p in model.parameters())
    assert memory["gradients"] == sum(p.grad.nbytes for p in model.parameters())
    state = [value for entry in optimizer.state.values() for value in entry.values() if torch.is_tensor(value)]
    assert memory["optimizer_state"] == sum(tensor.nbytes for tensor in state)


def test_ranges_of_a_real_record_are_added_up():
    """Norms of blocks and the last one are one range, and so are forward pass, loss and backward pass."""
    names = {"pd": pd, "require": require}
    exec(cells_of("05_nsys")["nsys-passes"], names)
    trace = read_export(H200)
    found = {"inference": summary(trace, "inference"), "training": summary(trace, "training step")}
    for mode, label, ends in (
        ("inference", "inference: norm", "/norm"),
        ("training", "forward + backward", ("step/forward", "step/loss", "step/backward")),
    ):
        parts = pd.DataFrame(found[mode]["categories"])
        expected = parts[parts["path"].str.endswith(ends)].groupby("category")["seconds"].sum()
        passes = names["one_pass"]({"a": {"result": found}}, "categories")
        passes = passes[passes["range"] == label]
        pd.testing.assert_series_equal(passes.groupby("category")["seconds"].sum(), expected)


def test_parts_of_attention_are_those_of_an_inference():
    """A training step has ranges of the same names."""
    names, cells = {"pd": pd, "np": np, "require": require}, cells_of("05_nsys")
    for cell in ("nsys-passes", "nsys-shares", "nsys-work", "nsys-032"):
        exec(cells[cell], names)
    names["configurations"] = lambda runs: pd.DataFrame([dict.fromkeys(names["CASE"], "a")])
    trace = read_export(H200)
    found = {"inference": summary(trace, "inference"), "training": summary(trace, "training step")}
    whole = pd.DataFrame(found["inference"]["categories"])
    whole = whole[whole["path"].str.endswith("/scaled dot product attention")]["seconds"].sum()
    parts = names["attention_times"]({"a": {"result": found}})
    assert parts["seconds"].sum() == pytest.approx(whole)


def test_the_settings_of_the_bounds_are_the_sizes_that_they_name():
    """`xl` is the model of 2025; the handout of 2026 asks for its own."""
    names = {"np": np}
    exec(cells_of("09_distributed")["parallel-settings"], names)
    for setting, values in names["SETTINGS"].items():
        config = model_config(setting.partition(",")[0])
        assert (values["D"], values["F"]) == (config.d_model, config.d_ff), setting


ACCOUNTS = {
    # 2025's XXL: 2 * 16,384 * 53,248 * 126 parameters, of 16 bytes; a token saves 2 * 69,632 * 126 bytes
    "communication_accounting (a)": ["3,518 GB", "44 H100 GPUs", "220 billion", "17.5 MB", "71.9 GB"],
    "communication_accounting (b)": ["= 38 on", "from 61 on"],  # 37.03; (3,517.6 + 35.9) / (95 - 35.9) = 60.2
    # 4.6e14 / 1.8e11 = 2,555.6, over 4 * 2; times 64; 4 * 2,555.6 / 53,248; 2,555.6 ** 2 / (2 * 53,248)
    "communication_accounting (c)": ["319.4 tokens", "20,444", "19%", "61.3 tokens", "20.8"],
    # of 131,072 tokens B W / C = 59.61, of 10,240 features 3 F W / 2 C = 6.99
    "data_parallel_calcs (c)": ["60 devices"],
    "fsdp_calcs (c)": ["60 devices"],
    "tp_calcs (d)": ["14 and 7 devices"],
    "fsdp_tp_calcs (c)": ["60 × 7 devices"],
    "fsdp_tp_calcs (d)": ["35 × 4 devices"],  # 34 / 59.61 + 3 / 6.99 = 0.9997
}
"""Derived by hand."""


@pytest.mark.parametrize("problem", ACCOUNTS)
def test_the_accounts_of_parallelism_are_those_of_the_handouts_numbers(problem):
    told = json.loads(ANSWERS.read_text(encoding="utf-8"))["09_distributed"][problem]["text"]
    assert all(number in " ".join(told.split()) for number in ACCOUNTS[problem]), told


NO_ORDER = "at the dots or at the lowest points, any two differ by less than their seeds do, so no order"
LOSSES = [  # of each setting's seeds, and what is said of them
    ({"a": [5.0, 5.1], "b": [4.0, 4.1], "c": [3.0, 3.0]}, "any two differ by more than their seeds do"),
    ({"a": [5.0, 5.1], "b": [5.0, 5.2], "c": [3.0, 3.0]}, "A and B differ by less than their seeds do at one of"),
    ({"a": [5.0, 5.3], "b": [5.1, 5.1], "c": [5.0, 5.1]}, NO_ORDER),
    ({"a": [5.0], "b": [4.0], "c": [3.0]}, "with one seed, no difference is a finding"),
]


@pytest.mark.parametrize(("losses", "said"), LOSSES)
def test_settings_are_compared_with_their_seeds(losses, said):
    undecided = function("10_wikitext", "undecided", np=np, combinations=combinations)
    rows = [(name, loss) for name, seeds in losses.items() for loss in seeds]
    scores = pd.DataFrame(rows, columns=["setting", "loss"])
    assert undecided(scores, {name: name.upper() for name in losses}).startswith(said)


def test_a_difference_that_the_choice_of_the_step_makes_is_undecided():
    undecided = function("10_wikitext", "undecided", np=np, combinations=combinations)
    scores = pd.DataFrame({"setting": [*"aabb"], "loss": [5.0, 5.1, 4.0, 4.1], "lowest": [3.9, 4.0, 3.9, 4.0]})
    assert undecided(scores, {"a": "A", "b": "B"}).startswith(NO_ORDER)


def test_names_tell_the_cases_of_the_reports_study_apart():
    model = {"d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 2, "vocab_size": 64}
    names = {"study": {"model": model, "warmup_steps": 0, "steps": 1}, "ModelConfig": ModelConfig}
    study_model = function("10_wikitext", "study_model", **names)
    study_step = function("10_wikitext", "study_step", **names, WorkloadConfig=WorkloadConfig, study_model=study_model)
    case_name = function("10_wikitext", "case_name")
    switches = ({}, {"checkpoint_every": 1}, {"attention": "sdpa"}, {"checkpoint_every": 1, "attention": "sdpa"})
    cases = [study_step(16, 2, precision, **each) for precision in ("fp32", "bf16") for each in switches]
    marks = ("", "_checkpoint1", "_sdpa", "_checkpoint1_sdpa")
    assert [*map(case_name, cases)] == [f"study_b2_c16_{dtype}{mark}" for dtype in ("fp32", "bf16") for mark in marks]
    assert cases[6] == replace(cases[4], model=study_model(16, attention="sdpa"))
    assert all(np.isfinite(Workload(case).step().item()) for case in cases)
