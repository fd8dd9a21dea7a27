"""The commands: exit codes, one sentence for a user's mistake, and settings that reach the library."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest
from notebook_projects import code, make_project, parameters

import workbook.cli
from lmcore import cli
from lmcore.cli.runs import COLUMNS
from lmcore.config import TrainConfig, model_config, replace, to_dict
from lmcore.data import open_data
from lmcore.errors import EXIT_DIVERGED, EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_OUT_OF_MEMORY, EXIT_USER_ERROR
from lmcore.files import read_json
from lmcore.run import RunFolder
from lmcore.tokenizer import Tokenizer


def run_lmcore(*words: object, **options) -> subprocess.CompletedProcess:
    """`lmcore` in a process of its own."""
    return subprocess.run([sys.executable, "-m", "lmcore", *words], stderr=subprocess.PIPE, check=False, **options)


COMMANDS = "doctor train evaluate generate benchmark nsys memory runs data tokenizer"
HELP = [
    "--help",
    *(f"{command} --help" for command in COMMANDS.split()),
    "data prepare --help",
    "tokenizer train --help",
]
MISTYPED = """trian; data inof; train --stepz 3; train --preset labtop; train --config nowhere; train --data nowhere;
    chat nowhere; play nowhere; export nowhere out; import nowhere run; evaluate nowhere;
    evaluate tests --data nowhere; generate nowhere; generate tests --tokenizer nowhere; runs nowhere;
    benchmark --sizes small; nsys --report nowhere; memory --snapshot nowhere; data info nowhere;
    data prepare nowhere --out never; data prepare tests/conftest.py --tokenizer nowhere --out never;
    tokenizer train nowhere --out never"""


def test_help_and_what_is_mistyped_do_not_wait_for_torch():
    """What is mistyped is an option, or a path of any command that takes one."""
    source = """import sys; from lmcore.cli import main
for words in sys.argv[1:]:
    try:
        code = main(words.split())
    except SystemExit as stop:
        code = stop.code
    print(words, code, "torch" in sys.modules, file=sys.stderr)"""
    mistyped = [words.strip() for words in MISTYPED.split(";")]
    words = [sys.executable, "-c", source, *HELP, *mistyped]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    said = done.stderr.splitlines()
    expected = [f"{words} {code} False" for code, commands in ((0, HELP), (2, mistyped)) for words in commands]
    assert [line for line in said if line.endswith(("True", "False"))] == expected


@pytest.fixture
def trained(monkeypatch):
    """Calls of the trainer, which itself does nothing but give the `state`."""
    trained = types.SimpleNamespace(calls=[], state="complete")

    def train(config, run):
        trained.calls.append((config, run))
        return types.SimpleNamespace(state=trained.state, step=7, valid_loss=1.5)

    monkeypatch.setattr("lmcore.train.train", train)
    return trained


def test_settings_reach_the_trainer_from_options_a_preset_and_a_file(trained, tmp_path, capsys, embedded_data):
    def settings(*words):
        assert cli.main(["train", "--run", "r", "--data", str(embedded_data), *words]) == 0
        assert "complete at step 7, validation loss 1.5000" in capsys.readouterr().out
        return trained.calls[-1][0]

    options = ["--optimizer.learning-rate", "0.5", "--model.norm", "post", "--optimizer.betas", "0.8", "0.9"]
    changes = {"optimizer__learning_rate": 0.5, "model__norm": "post", "optimizer__betas": (0.8, 0.9)}
    expected = replace(TrainConfig(data=str(embedded_data)), model__vocab_size=300, **changes)  # the corpus's
    assert settings(*options) == expected
    medium = model_config("medium", num_layers=2, vocab_size=512)
    assert settings("--preset", "medium", "--model.num-layers", "2", "--model.vocab-size", "512").model == medium
    assert settings("--model.vocab-size=10000").model == TrainConfig().model  # given, although it is the default
    expected = replace(expected, model__vocab_size=400)
    (tmp_path / "config.json").write_text(json.dumps(to_dict(expected)))
    assert settings(f"--config={tmp_path / 'config.json'}", "--seed", "5") == replace(expected, seed=5)


def test_exit_codes_are_the_numbers_that_scripts_know(trained, embedded_data):
    codes = EXIT_FAILURE, EXIT_USER_ERROR, EXIT_DIVERGED, EXIT_OUT_OF_MEMORY, EXIT_INTERRUPTED
    assert codes == (1, 2, 3, 4, 75)
    job = Path(__file__).parents[1] / "papermill_jobs" / "job.sh"
    assert f"== {EXIT_INTERRUPTED} " in job.read_text()
    for state, expected in (("diverged", 3), ("out of memory", 4), ("interrupted", 75)):
        trained.state = state
        assert cli.main(["train", "--run", "r", "--data", str(embedded_data)]) == expected


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("generate nowhere --prompt \udcff", "not UTF-8"),
        ("generate tests", "There is no safetensors file tests/checkpoints/best.safetensors; a run writes"),
        ("train --run r --model.rope-theta inf", "rope_theta must be a finite number, not inf"),
        ("train --run r --preset giant", "There is no preset 'giant'; choose one of tinystories, small"),
        ("evaluate no\x1b[2Jwhere", r"There is no file or folder no\x1b[2Jwhere."),
        ("trian", "There is no command trian; did you mean train?"),
        ("data inof", "There is no command inof; did you mean info?"),
        ("evaluate test", "There is no file or folder test; did you mean tests?"),
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


def test_ctrl_c_has_no_traceback(monkeypatch, capsys, embedded_data):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("lmcore.train.train", interrupted)
    assert cli.main(["train", "--run", "r", "--data", str(embedded_data)]) == 130
    assert capsys.readouterr().err == "lmcore: stopped.\n"


def test_a_file_that_cannot_be_used_is_named(tmp_path, monkeypatch, capsys):
    def unreadable(*_, **__):
        raise PermissionError(13, "Permission denied", str(tmp_path))

    monkeypatch.setattr("lmcore.data.open_data", unreadable)
    assert cli.main(["data", "info", str(tmp_path)]) == EXIT_USER_ERROR
    assert capsys.readouterr().err == f"lmcore: Permission denied ({tmp_path}).\n"


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
    done = run_lmcore("data", "info", "tests")
    assert done.returncode == EXIT_USER_ERROR
    assert done.stderr.startswith(b"lmcore: tests is not a prepared corpus")


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


def test_own_texts_in_one_command(tmp_path, monkeypatch, capsys):
    """They are prepared once; the names of run and corpus, and the vocabulary, follow from them."""
    monkeypatch.chdir(tmp_path)
    Path("my_texts").mkdir()
    stories = [{"body": f"Once upon a time there was a number {number}."} for number in range(30)]
    Path("my_texts/a.jsonl").write_text("".join(f"{json.dumps(story)}\n" for story in [*stories, {"text": "x"}]))
    options = ["--preset=smoke", "--model.context-length=16", "--steps=2", "--device=cpu", "--field=body"]
    for _ in range(2):
        assert cli.main(["train", "--data", "my_texts/", *options]) == 0
        said = capsys.readouterr()
        assert "a.jsonl (1 records skipped: line 31 has no text in the field 'body', of ['text'])" in said.err
        assert "complete at step 2" in said.out
    (folder,) = Path("data").iterdir()
    config = read_json("runs/my_texts-smoke/config.json")
    assert (config["data"], config["model"]["vocab_size"]) == (str(folder), open_data(folder).vocab_size)
    assert open_data(folder).vocab_size < 512  # the text has no more
    following = said.out.splitlines()[-1].removeprefix("Next: lmcore ")
    assert cli.main([*shlex.split(following), "--max-new-tokens", "5", "--device", "cpu"]) == 0
    assert capsys.readouterr().out.startswith("Once upon a time")
    assert cli.main(["train", "--data", str(folder), "--tokenizer", "gpt2", *options]) == EXIT_USER_ERROR
    Path("my_texts/b.txt").write_text("More.")
    assert cli.main(["train", "--data", "my_texts/", *options]) == EXIT_USER_ERROR
    assert "; choose another folder" in capsys.readouterr().err
    assert folder.exists()  # the run keeps its own


def test_runs_are_compared(tmp_path, capsys):
    def made(name: str, data: str, state: str, losses: list[float]) -> None:
        run = RunFolder(tmp_path / name)
        config = TrainConfig(data=f"data/{data}", steps=900)
        run.path.mkdir(parents=True)
        run.begin(config, {"device": "CPU"})
        run.write_status(state, 100 * len(losses))
        for number, loss in enumerate(losses, 1):
            line = {"step": 100 * number, "tokens": 50_000 * number, "seconds": 1000.4 * number, "train_loss": 9.0}
            run.append_metrics(line | ({"valid_loss": loss} if loss else {}))

    made("b", "tales", "complete", [3.0, 2.0, 2.5])
    made("deep/a", "tales", "running", [1.5])  # by no process
    made("c", "other", "interrupted", [0, 0])
    made("d", "tales", "complete", [1.0])
    (tmp_path / "d" / "metrics.jsonl").write_text("}\n")
    assert cli.main(["runs", str(tmp_path), "--plot", str(tmp_path / "curves.svg")]) == 0
    head, *rows, written = capsys.readouterr().out.splitlines()
    assert re.split(" {2,}", head) == list(COLUMNS)
    damaged, *rows = (re.split(" {2,}", row) for row in rows)
    assert damaged[0] == "d"
    assert "metrics.jsonl line 1 is damaged" in damaged[1]
    assert rows == [
        ["c", "other", "interrupted", "200 of 900", "100,000", "2,001", "CPU"],
        ["deep/a", "tales", "killed", "100 of 900", "50,000", "1.5000", "1.5000", "1,000", "CPU"],
        ["b", "tales", "complete", "300 of 900", "150,000", "2.0000", "2.5000", "3,001", "CPU"],
    ]
    assert written == f"Written to {tmp_path / 'curves.svg'}."
    picture = (tmp_path / "curves.svg").read_text()
    assert all(f"<!--  {text} -->" in picture for text in ("deep/a", "b"))
    assert cli.main(["runs", str(tmp_path / "deep" / "a" / "checkpoints")]) == EXIT_USER_ERROR


def test_a_tokenizer_is_trained(tmp_path):
    text, folder = tmp_path / "text.txt", tmp_path / "tokenizer"
    text.write_text("the cat sat on the mat with the hat\n" * 9)
    assert cli.main(["tokenizer", "train", str(text), "--out", str(folder), "--vocab-size", "270"]) == 0
    tokenizer = Tokenizer.load(folder)
    ids = tokenizer.encode("the hat")
    assert len(ids) < len("the hat")
    assert tokenizer.decode(ids) == "the hat"


def test_ctrl_c_stops_the_workbook(tmp_path, monkeypatch, capsys):
    stop = f"import os, signal, time\nos.kill({os.getpid()}, signal.SIGINT)\ntime.sleep(30)"
    monkeypatch.chdir(make_project(tmp_path, _01_stop=["# 01", parameters(), code(stop)]))
    before = signal.getsignal(signal.SIGINT)
    assert workbook.cli.main(["run", "--parameters", "steps=4"]) == EXIT_INTERRUPTED
    said = "".join(capsys.readouterr())
    assert "Notebook 01_stop was stopped by SIGINT at code cell 2. The same command with --resume" in said
    assert "Traceback" not in said
    assert signal.getsignal(signal.SIGINT) == before
