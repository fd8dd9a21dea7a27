"""The commands: exit codes, one sentence for a user's mistake, and settings that reach the library."""

import json
import os
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest
from notebook_projects import code, make_project, parameters

import workbook.cli
from lmcore import cli
from lmcore.config import TrainConfig, model_config, replace, to_dict
from lmcore.errors import EXIT_DIVERGED, EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_OUT_OF_MEMORY, EXIT_USER_ERROR


def run_lmcore(*words: object, **options) -> subprocess.CompletedProcess:
    """`lmcore` in a process of its own."""
    return subprocess.run([sys.executable, "-m", "lmcore", *words], stderr=subprocess.PIPE, check=False, **options)


def test_help_does_not_wait_for_torch():
    source = "import sys; from lmcore.cli.application import application as a; a([]); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", source], check=False).returncode == 0


@pytest.fixture
def trained(monkeypatch):
    """Calls of the trainer, which itself does nothing but give the `state`."""
    trained = types.SimpleNamespace(calls=[], state="complete")

    def train(config, run):
        trained.calls.append((config, run))
        return types.SimpleNamespace(state=trained.state, step=7, valid_loss=1.5)

    monkeypatch.setattr("lmcore.train.train", train)
    return trained


def test_settings_reach_the_trainer_from_options_a_preset_and_a_file(trained, tmp_path, capsys):
    def settings(*words):
        assert cli.main(["train", "--run", "r", *words]) == 0
        assert "complete at step 7, validation loss 1.5000" in capsys.readouterr().out
        return trained.calls[-1][0]

    options = ["--optimizer.learning-rate", "0.5", "--model.norm", "post", "--optimizer.betas", "0.8", "0.9"]
    expected = replace(TrainConfig(), optimizer__learning_rate=0.5, model__norm="post", optimizer__betas=(0.8, 0.9))
    assert settings(*options) == expected
    assert settings("--preset", "medium", "--model.num-layers", "2").model == model_config("medium", num_layers=2)
    (tmp_path / "config.json").write_text(json.dumps(to_dict(expected)))
    assert settings(f"--config={tmp_path / 'config.json'}", "--seed", "5") == replace(expected, seed=5)


def test_exit_codes_are_the_numbers_that_scripts_know(trained):
    codes = EXIT_FAILURE, EXIT_USER_ERROR, EXIT_DIVERGED, EXIT_OUT_OF_MEMORY, EXIT_INTERRUPTED
    assert codes == (1, 2, 3, 4, 75)
    job = Path(__file__).parents[1] / "papermill_jobs" / "job.sh"
    assert f"== {EXIT_INTERRUPTED} " in job.read_text()
    for state, expected in (("diverged", 3), ("out of memory", 4), ("interrupted", 75)):
        trained.state = state
        assert cli.main(["train", "--run", "r"]) == expected


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("generate nowhere --prompt \udcff", "not UTF-8"),
        ("generate tests", "There is no safetensors file tests/checkpoints/best.safetensors; a run has"),
        ("train --run r --model.rope-theta inf", "rope_theta must be a finite number, not inf"),
        ("train --run r --preset giant", "There is no preset 'giant'; choose one of tinystories, small"),
        ("evaluate no\x1b[2Jwhere", r"There is no file no\x1b[2Jwhere/config.json"),
    ],
)
def test_a_mistake_is_one_sentence(command, words, capsys):
    assert cli.main(command.split()) == EXIT_USER_ERROR
    error = capsys.readouterr().err
    assert error.startswith("lmcore: ")
    assert words in error
    assert error.count("\n") == 1


def test_a_misspelled_option_is_told_the_right_one(capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["train", "--run", "r", "--checkpoint-intervl", "3\x1b[2J"])
    said = capsys.readouterr().err
    assert all(words in said for words in ("Unrecognized options: --checkpoint-intervl", "--checkpoint-interval"))
    assert "\x1b" not in said


def test_ctrl_c_has_no_traceback(monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("lmcore.train.train", interrupted)
    assert cli.main(["train", "--run", "r"]) == 130
    assert capsys.readouterr().err == "lmcore: stopped.\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_output_to_a_full_disk_and_to_a_reader_that_has_seen_enough(embedded_data):
    with open("/dev/full", "w") as full:
        done = run_lmcore("data", "info", embedded_data, stdout=full)
    assert done.returncode == EXIT_USER_ERROR
    assert done.stderr == b"lmcore: No space left on device: make room, or write elsewhere.\n"
    read, write = os.pipe()
    os.close(read)
    done = run_lmcore("data", "info", embedded_data, stdout=write)
    os.close(write)
    assert (done.returncode, done.stderr) == (EXIT_FAILURE, b"")


def test_python_m_lmcore():
    done = run_lmcore("data", "info", "nowhere")
    assert done.returncode == EXIT_USER_ERROR
    assert done.stderr.startswith(b"lmcore: nowhere is not a prepared corpus")


def test_from_text_to_generation(tmp_path, capsys):
    data, run = str(tmp_path / "data"), str(tmp_path / "run")
    corpus = ["--tokenizer", "bpe:300", "--num-documents", "200"]
    assert cli.main(["data", "prepare", "embedded", "--out", data, *corpus]) == 0
    assert cli.main(["data", "info", data]) == 0
    assert '"vocab_size": 300' in capsys.readouterr().out
    options = ["--preset", "smoke", "--model.vocab-size", "300", "--model.context-length", "16", "--steps", "2"]
    assert cli.main(["train", "--run", run, "--data", data, "--device", "cpu", *options]) == 0
    assert "complete at step 2" in capsys.readouterr().out

    def generated(*words: str, prompts: tuple[str, ...] = ("One",)) -> str:
        command = ["generate", run, "--prompt", *prompts, "--max-new-tokens", "5", "--device", "cpu", *words]
        assert cli.main(command) == 0
        return capsys.readouterr().out

    plainly = generated()
    assert plainly.startswith("One")
    assert generated("--ops", "fused") == plainly
    assert [text[:3] for text in generated(prompts=("One", "The")).strip().split("\n\n")] == ["One", "The"]


def test_tokenizer_there_and_back(tmp_path, capsys):
    text, folder = tmp_path / "text.txt", str(tmp_path / "tokenizer")
    text.write_text("the cat sat on the mat with the hat\n" * 9)
    assert cli.main(["tokenizer", "train", str(text), "--out", folder, "--vocab-size", "270"]) == 0
    assert cli.main(["tokenizer", "encode", "--tokenizer", folder, "--text", "the hat"]) == 0
    ids = capsys.readouterr().out.splitlines()[-1].split()
    assert 0 < len(ids) < len("the hat")
    assert cli.main(["tokenizer", "decode", "--tokenizer", folder, *ids]) == 0
    assert capsys.readouterr().out == "the hat\n"
    done = run_lmcore("tokenizer", "encode", "--tokenizer", folder, input=b"a\n\xff")
    assert done.returncode == EXIT_USER_ERROR
    assert done.stderr.startswith(b"lmcore: The text is not UTF-8")


def test_ctrl_c_stops_the_workbook(tmp_path, monkeypatch, capsys):
    stop = f"import os, signal, time\nos.kill({os.getpid()}, signal.SIGINT)\ntime.sleep(30)"
    monkeypatch.chdir(make_project(tmp_path, _01_stop=["# 01", parameters(), code(stop)]))
    before = signal.getsignal(signal.SIGINT)
    assert workbook.cli.main(["run", "--parameters", "steps=4"]) == EXIT_INTERRUPTED
    said = "".join(capsys.readouterr())
    assert "Notebook 01_stop was stopped by SIGINT at code cell 2. The same command with --resume" in said
    assert "Traceback" not in said
    assert signal.getsignal(signal.SIGINT) == before
