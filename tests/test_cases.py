"""Benchmark cases: names and configurations of those that options and notebooks ask for."""

import pytest

from lmcore.config import ModelConfig, model_config
from lmcore.errors import UserError
from lmcore.profiling.cases import GridConfig, WorkloadConfig, case_grid, grid_cases, workload_config


def test_names_and_cases_of_a_notebooks_grid():
    assert workload_config("2.35b").model.d_ff == 25_600
    cases = case_grid(["smoke", "2.7b"], [64, 128], ["bf16"], ["forward"], batch_size=2, attention="sdpa")
    assert list(cases) == [f"{size}-{context}-bf16-forward" for context in (64, 128) for size in ("smoke", "2.7b")]
    model = model_config("2.7b", context_length=128, vocab_size=10_000, attention="sdpa")
    assert cases["2.7b-128-bf16-forward"] == WorkloadConfig(2, model=model, precision="bf16", size="2.7b")


def test_names_and_cases_of_a_commands_options():
    options = {"size": ("small", "2.7b"), "context_length": (128, 256), "precision": ("fp32", "bf16")}
    options |= {"mode": ("forward",), "model": ModelConfig(vocab_size=500, norm="post"), "batch_size": 2}
    cases = grid_cases(GridConfig(**options, attention=("plain", "sdpa")))
    assert len(cases) == 16
    model = model_config("2.7b", vocab_size=500, norm="post", context_length=256, attention="sdpa")
    expected = WorkloadConfig(model=model, size="2.7b", precision="bf16", batch_size=2)
    assert cases["2.7b-256-bf16-forward-sdpa-b2"] == expected
    assert grid_cases(GridConfig(**options, steps=3))["small-128-fp32-forward-b2"].steps == 3
    model = ModelConfig(d_model=48, num_heads=4, num_layers=3, norm="post", context_length=64)
    assert grid_cases(GridConfig(model=model, compile=True, warmup_steps=0)) == {
        f"own-3x48-64-fp32-{mode}-compiled-b4": WorkloadConfig(model=model, mode=mode, compile=True, warmup_steps=0)
        for mode in ("forward", "forward_backward")
    }


@pytest.mark.parametrize("asked", [{}, {"model": ModelConfig(attention="sdpa"), "compile": True}])
def test_fused_cases_say_what_they_run(asked):
    """The same case, whether its attention is asked for or not; so what is measured once is not measured again."""
    ((name, config),) = grid_cases(GridConfig(mode=("train_step",), ops="fused", **asked)).items()
    assert name == "own-4x512-256-fp32-train_step-fused-b4"
    assert (config.ops, config.model.attention, config.compile) == ("fused", "flash", False)


@pytest.mark.parametrize(("name", "value"), [("depth", 3), ("context_length", 0), ("steps", 0), ("mode", "sideways")])
def test_bad_settings_are_refused(name, value):
    with pytest.raises(UserError, match=name):
        workload_config("small", **{name: value})
