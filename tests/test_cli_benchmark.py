"""lmcore benchmark: cases that the options ask for, tables that it prints and writes, one sentence for mistakes."""

import json

import pytest

from lmcore import cli
from lmcore.config import ModelConfig, model_config
from lmcore.errors import EXIT_FAILURE, EXIT_USER_ERROR
from lmcore.profiling.cases import BenchmarkConfig, benchmark_cases

SIZES = {"d-model": 32, "num-layers": 1, "num-heads": 2, "d-ff": 64, "vocab-size": 64}
TINY = [word for name, value in SIZES.items() for word in (f"--model.{name}", str(value))]


def test_cases_of_named_sizes():
    settings = BenchmarkConfig(
        size=("small", "2.7b"), context_length=(128, 256), precision=("fp32", "bf16"), passes=("forward",),
        attention=("plain", "sdpa"), model=ModelConfig(vocab_size=500), batch_size=2,
    )  # fmt: skip
    cases = benchmark_cases(settings)
    assert len(cases) == 16
    config = cases["2.7b-256-bf16-forward-sdpa-b2"]
    assert config.model == model_config("2.7b", vocab_size=500, context_length=256, attention="sdpa")
    assert (config.size, config.precision, config.passes, config.batch_size) == ("2.7b", "bf16", "forward", 2)


def test_cases_of_own_numbers():
    model = ModelConfig(d_model=48, num_heads=4, num_layers=3, norm="post", context_length=64)
    cases = benchmark_cases(BenchmarkConfig(model=model, compile=True, warmup_steps=0))
    assert list(cases) == [f"own-3x48-64-fp32-{passes}-compiled-b4" for passes in ("forward", "forward_backward")]
    config = cases["own-3x48-64-fp32-forward-compiled-b4"]
    assert (config.model, config.size, config.compile, config.warmup_steps) == (model, None, True, 0)


def test_command_measures_writes_and_resumes(tmp_path, capsys):
    """Commands that share a folder: each prints and writes the table of its own cases, and measures none twice."""
    command = ["benchmark", *TINY, "--passes", "train_step", "--steps", "2", "--warmup-steps", "0"]
    command += ["--device", "cpu", "--out", str(tmp_path)]

    def rows():
        return json.loads((tmp_path / "benchmark.json").read_text())["rows"]

    assert cli.main([*command, "--context-length", "8", "16"]) == 0
    said = capsys.readouterr().out
    assert "wall clock (ms)" in said
    assert "fused" not in said
    assert json.loads((tmp_path / "benchmark.json").read_text())["provenance"]["torch"]
    assert (tmp_path / "samples.csv").read_text().count("\n") == 1 + 2 * 2
    plain = rows()
    assert [(row["context_length"], row["ops"], row["attention"]) for row in plain] == [
        (8, "plain", "plain"), (16, "plain", "plain")
    ]  # fmt: skip
    assert cli.main([*command, "--context-length", "8", "16", "--markdown", "--latex"]) == 0
    said = capsys.readouterr().out
    assert "2 of 2 cases reused" in said
    assert all(words in said for words in ("| 1 × 32", r"\begin{tabular}", r"$\pm$"))
    assert [row["wall_mean"] for row in rows()] == [row["wall_mean"] for row in plain]

    # what the fused step covers is measured; the row of the rest says why not, and the command fails
    fused = [*command, "--ops", "fused", "--context-length", "8"]
    assert cli.main([*fused, "--precision", "fp32", "fp16"]) == EXIT_FAILURE
    said = capsys.readouterr().out
    assert "Failed: `own-1x32-8-fp16-train_step-fused-b4` (The fused step does not cover precision=fp16" in said
    assert [(row["outcome"], row["ops"], row["attention"], row["compile"]) for row in rows()] == [
        ("complete", "fused", "flash", False), ("failed", "fused", "flash", False)
    ]  # fmt: skip
    assert rows()[0]["wall_mean"] > 0
    assert ",fused," in (tmp_path / "samples.csv").read_text()
    names = {row["cell"] for row in (*plain, *rows())}
    assert {path.stem for path in (tmp_path / "cells").glob("own*.json")} == names
    assert cli.main(fused) == 0
    head, row = capsys.readouterr().out.splitlines()[-3:-1]
    assert ("ops" in head.split(), "fused" in row.split(), "flash" in row.split()) == (True,) * 3


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
def test_fused_cases_say_what_they_run(asked):
    """The same case, whether its attention is asked for or not; so what is measured once is not measured again."""
    cases = benchmark_cases(BenchmarkConfig(passes=("train_step",), ops="fused", **asked))
    ((name, config),) = cases.items()
    assert name == "own-4x512-256-fp32-train_step-fused-b4"
    assert (config.ops, config.model.attention, config.compile) == ("fused", "flash", False)
