"""lmcore benchmark: cells that the options ask for, tables that it prints and writes, one sentence for mistakes."""

import json

import pytest

from lmcore import cli
from lmcore.config import ModelConfig, model_config, to_dict
from lmcore.errors import EXIT_FAILURE, EXIT_USER_ERROR, UserError
from lmcore.profiling.options import BenchmarkConfig, benchmark_cells, check_device

SIZES = {"d-model": 32, "num-layers": 1, "num-heads": 2, "d-ff": 64, "vocab-size": 64}
TINY = [word for name, value in SIZES.items() for word in (f"--model.{name}", str(value))]


def test_cells_of_named_sizes():
    settings = BenchmarkConfig(
        size=("small", "2.7b"), context_length=(128, 256), precision=("fp32", "bf16"), passes=("forward",),
        attention=("plain", "sdpa"), model=ModelConfig(vocab_size=500), batch_size=2,
    )  # fmt: skip
    cells = benchmark_cells(settings)
    assert len(cells) == 16
    config = cells["2.7b-256-bf16-forward-sdpa-b2"]
    assert config.model == model_config("2.7b", vocab_size=500, context_length=256, attention="sdpa")
    assert (config.size, config.precision, config.passes, config.batch_size) == ("2.7b", "bf16", "forward", 2)


def test_cells_of_own_numbers():
    model = ModelConfig(d_model=48, num_heads=4, num_layers=3, norm="post", context_length=64)
    cells = benchmark_cells(BenchmarkConfig(model=model, compile=True, warmup_steps=0))
    assert list(cells) == [f"own-3x48-64-fp32-{passes}-compiled-b4" for passes in ("forward", "forward_backward")]
    config = cells["own-3x48-64-fp32-forward-compiled-b4"]
    assert (config.model, config.size, config.compile, config.warmup_steps) == (model, None, True, 0)


def test_command_measures_writes_and_resumes(tmp_path, capsys):
    command = ["benchmark", *TINY, "--context-length", "8", "16", "--passes", "train_step", "--steps", "2"]
    command += ["--warmup-steps", "0", "--device", "cpu", "--out", str(tmp_path)]
    assert cli.main(command) == 0
    assert "wall clock (ms)" in capsys.readouterr().out
    written = json.loads((tmp_path / "benchmark.json").read_text())
    assert [row["context_length"] for row in written["rows"]] == [8, 16]
    assert written["provenance"]["torch"]
    assert (tmp_path / "samples.csv").read_text().count("\n") == 1 + 2 * 2
    times = [row["wall_mean"] for row in written["rows"]]
    assert cli.main([*command, "--markdown", "--latex"]) == 0
    said = capsys.readouterr().out
    assert "2 of 2 cells reused" in said
    assert "| 1 × 32" in said
    assert r"\begin{tabular}" in said
    assert r"$\pm$" in said
    assert [row["wall_mean"] for row in json.loads((tmp_path / "benchmark.json").read_text())["rows"]] == times


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--size huge", "There is no model size 'huge'; choose one of tinystories, small"),
        ("--precision fp8", "invalid choice 'fp8'"),
        ("--context-length 0", "context_length must be a positive whole number, not 0"),
        ("--device cuda:7", "Device 'cuda:7' is not there"),
        ("--size small --model.d-model 64", "give either --size or --model.d-model"),
        ("--passes", "Give at least one of the passes"),
        ("--precision", "Give at least one precision"),
        ("--model.num-heads 7", "d_model (512) must be divisible by num_heads (7)"),
        ("--steps 0", "steps must be a positive whole number"),
        ("--ops fused --model.norm post", "The fused step does not cover norm=post: take --ops plain."),
        ("--ops fused --compile", "The fused step compiles nothing: leave --compile out, or take --ops plain."),
        (
            "--ops fused --attention sdpa flash plain",
            "fused step has FlashAttention, not sdpa, plain: ask for flash",
        ),
        ("--ops fused --model.attention sdpa", "FlashAttention, not sdpa: ask for flash, or take --ops plain."),
        ("--ops fused --precision fp16 --model.ffn silu", "does not cover ffn=silu, precision=fp16: take --ops plain."),
    ],
)
def test_one_sentence_for_a_mistake(options, words, tmp_path, capsys):
    assert cli.main(["benchmark", "--out", str(tmp_path / "out"), *options.split()]) == EXIT_USER_ERROR
    said = capsys.readouterr()
    assert words in said.err
    assert len(said.err.splitlines()) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("asked", [{}, {"attention": ("flash",)}, {"model": ModelConfig(attention="flash")}])
def test_fused_cells_say_what_they_run(asked):
    """The same cell, whether its attention is asked for or not; so what is measured once is not measured again."""
    cells = benchmark_cells(BenchmarkConfig(passes=("train_step",), ops="fused", **asked))
    ((name, config),) = cells.items()
    assert name == "own-4x512-256-fp32-train_step-fused-b4"
    assert (config.ops, config.model.attention, config.compile) == ("fused", "flash", False)


def test_fused_and_plain_cells_can_be_told_apart(tmp_path, capsys):
    """In the table of each command, which is of that command's cells, and by name in the folder that they share."""
    command = ["benchmark", *TINY, "--context-length", "8", "--passes", "train_step", "--steps", "1"]
    command += ["--warmup-steps", "0", "--device", "cpu", "--out", str(tmp_path)]
    found = {}
    for ops in ("plain", "fused"):
        assert cli.main([*command, "--ops", ops]) == 0
        head, row = capsys.readouterr().out.splitlines()[-3:-1]
        assert ("ops" in head.split(), "fused" in row.split(), "flash" in row.split()) == (ops == "fused",) * 3
        (found[ops],) = json.loads((tmp_path / "benchmark.json").read_text())["rows"]
        assert f",{ops}," in (tmp_path / "samples.csv").read_text()
    assert [(row["ops"], row["attention"], row["compile"]) for row in found.values()] == [
        ("plain", "plain", False), ("fused", "flash", False)
    ]  # fmt: skip
    assert {path.stem for path in (tmp_path / "cells").glob("own*.json")} == {row["cell"] for row in found.values()}


def test_a_grid_that_the_fused_step_covers_in_part(tmp_path, capsys):
    """What it covers is measured; the row of the rest says why not."""
    options = ["--ops", "fused", "--precision", "fp32", "fp16", "--passes", "forward", "--steps", "1"]
    command = ["benchmark", *TINY, "--context-length", "8", *options, "--warmup-steps", "0", "--device", "cpu"]
    assert cli.main([*command, "--out", str(tmp_path)]) == EXIT_FAILURE
    assert "Failed: `own-1x32-8-fp16-forward-fused-b4` (The fused step does not cover precision=fp16" in (
        capsys.readouterr().out
    )
    rows = json.loads((tmp_path / "benchmark.json").read_text())["rows"]
    assert [row["outcome"] for row in rows] == ["complete", "failed"]
    assert rows[0]["wall_mean"] > 0


def test_a_precision_that_the_device_lacks(monkeypatch):
    def refuse(device, precision):
        raise RuntimeError("not implemented for 'Half'\nat a place")

    monkeypatch.setattr("lmcore.device.autocast", refuse)
    with pytest.raises(UserError, match=r"cpu does not compute in fp16 \(not implemented for 'Half'\); choose another"):
        check_device("cpu", ["fp16"])


def test_a_failed_cell_is_no_success(tmp_path, monkeypatch, capsys):
    def run_cells(task, cells, folder, title):
        name, config = next(iter(cells.items()))
        head = {"cell": name, "config": to_dict(config), "environment": None, "result": None}
        return {name: head | {"outcome": "failed", "reason": "It was ended after 1 s without a result."}}

    monkeypatch.setattr("lmcore.profiling.cells.run_cells", run_cells)
    assert cli.main(["benchmark", *TINY, "--device", "cpu", "--out", str(tmp_path)]) == 1
    assert "Failed: `own-1x32-256-fp32-forward-b4` (It was ended after 1 s" in capsys.readouterr().out
