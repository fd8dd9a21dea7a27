"""lmcore benchmark: tables that it prints and writes, one sentence for mistakes."""

import json

import pytest

from lmcore import cli
from lmcore.errors import EXIT_FAILURE, EXIT_USER_ERROR

SIZES = {"d-model": 32, "num-layers": 1, "num-heads": 2, "d-ff": 64, "vocab-size": 64}
TINY = [word for name, value in SIZES.items() for word in (f"--model.{name}", str(value))]


def test_command_measures_writes_and_resumes(tmp_path, capsys):
    """Commands that share a folder: each prints and writes the table of its own cases, and measures none twice."""
    command = ["benchmark", *TINY, "--mode", "train_step", "--steps", "2", "--warmup-steps", "0"]
    command += ["--device", "cpu", "--out", str(tmp_path), "--context-length", "8"]

    def done(*more, code=0):
        """What the command says, and the rows that it writes."""
        assert cli.main([*command, *more]) == code
        return capsys.readouterr().out, json.loads((tmp_path / "benchmark.json").read_text())["rows"]

    said, plain = done("16")
    assert all(words in said for words in ("mean ± std (ms)", "| 1 × 32"))
    sources = json.loads((tmp_path / "benchmark.json").read_text())["provenance"]
    assert all(sources[row["case"]]["torch"] for row in plain)
    assert len(json.loads((tmp_path / "samples.json").read_text())["rows"]) == 2 * 2
    found = [(row["context_length"], row["ops"], row["attention"]) for row in plain]
    assert found == [(8, "plain", "plain"), (16, "plain", "plain")]
    said, again = done("16")
    assert "2 of 2 cases reused" in said
    assert [row["wall_mean"] for row in again] == [row["wall_mean"] for row in plain]

    # what the fused step covers is measured; the row of the rest says why not, and the command fails
    said, rows = done("--ops", "fused", "--precision", "fp32", "fp16", code=EXIT_FAILURE)
    assert "own-1x32-8-fp16-train_step-fused-b4: failed: The fused step does not cover precision=fp16" in said
    found = [(row["outcome"], row["ops"], row["attention"], row["compile"]) for row in rows]
    assert found == [("complete", "fused", "flash", False), ("failed", "fused", "flash", False)]
    assert rows[0]["wall_mean"] > 0
    assert "fused" in {row["ops"] for row in json.loads((tmp_path / "samples.json").read_text())["rows"]}
    assert {path.stem for path in (tmp_path / "cases").glob("own*.json")} == {row["case"] for row in plain + rows}
    assert "fused" in done("--ops", "fused")[0]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--size huge", "There is no model size 'huge'; choose one of tinystories, small"),
        ("--device cuda:7", "Device 'cuda:7' is not there"),
        ("--size small --model.d-model 64", "give either --size or --model.d-model"),
        ("--mode", "at least one mode"),
    ],
)
def test_one_sentence_for_a_mistake(options, words, tmp_path, capsys):
    assert cli.main(["benchmark", "--out", str(tmp_path / "out"), *options.split()]) == EXIT_USER_ERROR
    said = capsys.readouterr()
    assert words in said.err
    assert len(said.err.splitlines()) == 1
    assert not (tmp_path / "out").exists()
