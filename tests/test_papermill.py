"""The notebooks by papermill alone, without `lmcore workbook`: parameters are checked, and a stopped run is resumed."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest
import yaml
from notebook_projects import code, make_project, parameters

from lmcore.config import OptimizerConfig, TrainConfig, model_config, to_dict
from lmcore.data import CorpusConfig, prepare
from lmcore.errors import EXIT_USER_ERROR, UserError
from lmcore.run import RunFolder
from lmcore.workbook.notebook import declared_parameters, read_notebook
from lmcore.workbook.parameters import (
    RULES,
    begin_notebook,
    check_parameters,
    find_notebooks,
    locate,
    parse_overrides,
    read_parameters,
    resolve_parameters,
)

ROOT = Path(__file__).parents[1]
NOTEBOOKS = find_notebooks(ROOT)
DECLARED = {path.stem: declared_parameters(read_notebook(path), path.stem) for path in NOTEBOOKS}
SCALES = ("smoke", "laptop", "gpu")
PAPERMILL = Path(sys.executable).with_name("papermill")

BEGIN = code('from lmcore.workbook.parameters import begin_notebook\n\nbegin_notebook("01_toy", globals())')
TRAIN = code("""import json
from lmcore.config import TrainConfig, from_dict
from lmcore.workbook.sweep import run_or_reuse
config = from_dict(TrainConfig, json.load(open("../config.json")))
run_or_reuse(config, f"{out}/runs/toy").status()["state"]""")


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_each_notebook_has_sound_parameters_at_each_scale(notebook, scale):
    given = read_parameters(ROOT / "papermill_jobs" / "parameters" / scale / f"{notebook.stem}.yaml")
    assert (given["scale"], given["out"]) == (scale, f"../runs/{scale}")
    check_parameters(notebook.stem, DECLARED[notebook.stem], DECLARED[notebook.stem] | given, ROOT / "notebooks")


def test_there_are_no_other_parameter_files():
    files = (ROOT / "papermill_jobs" / "parameters").rglob("*.*")
    wanted = {(scale, f"{path.stem}.yaml") for scale in SCALES for path in NOTEBOOKS}
    assert {(file.parent.name, file.name) for file in files} == wanted


def test_every_parameter_has_a_rule():
    apart = {"scale", "data", "out", "tokenizer", "study", "records"}
    apart |= {"leaderboard_corpus", "leaderboard_tokenizer", "wikitext", "context_model"}
    free = apart | {"picture_prompt", "story_prompt", "web_prompt", "web", "reference", "comment", "comment_of"}  # text
    ruled = {rule.rpartition(".")[2] for rule in RULES}
    for name, known in DECLARED.items():
        assert {key for key, value in known.items() if type(value) not in (bool, int)} - free <= ruled, name


@pytest.mark.parametrize("scale", ["smoke", "laptop", "gpu"])
def test_two_notebooks_share_the_cases_of_the_report(scale):
    parameters = resolve_parameters(ROOT, find_notebooks(ROOT, ["04", "10"]), scale, {}, {})
    there = parameters["04_benchmark"].get("study", DECLARED["04_benchmark"]["study"])
    assert parameters["10_wikitext"].get("study", DECLARED["10_wikitext"]["study"]) == there


@pytest.mark.parametrize("scale", ["smoke", "laptop", "gpu"])
def test_notebooks_that_share_a_folder_of_data_ask_for_the_same(scale):
    """Those that run side by side would replace each other's data, under the runs that read them."""
    wanted = {}
    for notebook in NOTEBOOKS:
        source = notebook.read_text(encoding="utf-8")
        if '{out}/data\\"' in source:
            values = resolve_parameters(ROOT, [notebook], scale, {}, {})[notebook.stem]
            known = DECLARED[notebook.stem] | values
            wanted[notebook.stem] = [known[key] for key in ("out", "data", "tokenizer", "num_documents")]
    assert list(wanted) == ["02_train", "03_generate", "07_kernels"]
    assert len({tuple(request) for request in wanted.values()}) == 1, wanted


WRONG = [
    ("01_build", "vocab_size=5", "must be a whole number above 256"),
    ("01_build", "context_length=-1", "must be a positive whole number, not -1"),
    ("01_build", "model_size=nope", "must be one of tinystories, small"),
    ("03_generate", "records=nowhere", "must be empty, or a folder of tables, not 'nowhere'"),
    ("01_build", "seed=-1", "must be a whole number from 0 to"),
    ("01_build", "batch_size=null", "must be a positive whole number, not None"),
    ("01_build", "compare_gpt2=1", "must be of type bool, not 1"),
    ("01_build", "corpora={embedded: 600}", "must be a mapping from two corpora, or their files, to sizes"),
    ("01_build", "corpora={embedded: 256, tinystories: 600}", "each a whole number above 256"),
    ("01_build", "corpora={embedded: 600, nowhere: 600}", "nowhere is not a file or folder; name one, or one of"),
    ("01_build", "corpora={../README.md: 600, ../results/README.md: 600}", "with names of their own, not README.md"),
    ("01_build", "corpus_characters=0", "must be a positive whole number, or None, not 0"),
    ("02_train", "recipe=none", "must be one of smoke, laptop"),
    ("02_train", "learning_rates=[]", "must be a list that is not empty, each value a positive number"),
    ("02_train", "learning_rates=[1, nan]", "each value a positive number"),
    ("02_train", "batch_sizes=[1, 0]", "each value a positive whole number"),
    ("02_train", "sweep_steps=0", "must be a positive whole number, or None"),
    ("02_train", "repeated_rates=[0]", "each value a positive number"),
    ("02_train", "batch_factors=[-1]", "each value a positive number"),
    ("02_train", "batch_rounds=-1", "must be a whole number from 0 on"),
    ("02_train", "best_rate=0", "must be a positive number"),
    ("02_train", "seeds=[-1]", "each value a whole number from 0 on"),
    ("02_train", "seeds=[]", "must be a list that is not empty"),
    ("02_train", "batch_steps=0", "must be a positive whole number, or None"),
    ("02_train", "tokenizer=bpe:256", "must be gpt2, bpe: and a size above 256, or a tokenizer's folder"),
    ("02_train", "tokenizer=nowhere", "not 'nowhere'"),
    ("03_generate", "top_ps=[1.5]", "each value a number in (0, 1]"),
    ("03_generate", 'prompts=["Once"]', "a list of at least two texts"),
    ("03_generate", "device=gpu", "must be auto, cpu, mps, cuda or cuda:N"),
    ("04_benchmark", "handouts={CSE599-O: [small]}", "must be a mapping from CS336 (2025), CS336 (2026), CSE599-O"),
    ("04_benchmark", "study={d_model: 3}", "d_model (3) must be divisible by num_heads"),
    ("04_benchmark", "study={width: 3}", "StudyConfig has no field width"),
    ("05_nsys", "warmup_steps=-1", "must be a whole number from 0 on"),
    ("06_memory", "timeline_context=3", "must be one of contexts, [64, 128], not 3"),
    ("06_memory", "precisions=[bf16]", "must be a list that begins with fp32"),
    ("07_kernels", "precision=fp8", "must be one of fp32, tf32"),
    ("08_experiments", "best_rate=0", "must be a positive number"),
    ("08_experiments", "seeds=[-1]", "each value a whole number from 0 on"),
    ("08_experiments", "additions=[layer_drop]", "each value one of qk_norm, tied, z_loss, parallel, autograd, not"),
    ("08_experiments", "tuned_rates={no_norm: [0.01]}", "must be a mapping from no_norm, post_norm, nope, silu, each"),
    (
        "08_experiments",
        "tuned_rates={no_norm: [0.01], post_norm: [0], nope: [0.01], silu: [0.01]}",
        "to lists of learning rates, each a positive number",
    ),
    ("08_experiments", "z_loss=-1", "must be a positive number, not -1"),
    ("08_experiments", "web=nowhere", "nowhere is not a file or folder; name one, or one of embedded"),
    ("08_experiments", "web_tokenizers=[bpe:300]", "must be a list of at least two that differ, each gpt2, or bpe:"),
    ("08_experiments", "web_tokenizers=[bpe:300, bpe:300]", "must be a list of at least two that differ"),
    ("08_experiments", "leaderboard_recipe=best", "must be one of smoke, laptop"),
    ("08_experiments", "leaderboard_corpus=nowhere", "one of embedded, tinystories, openwebtext, wikitext103, or"),
    ("08_experiments", "leaderboard_tokenizer=bpe:9", "must be gpt2, bpe: and a size above 256"),
    ("08_experiments", "leaderboard_steps=0", "must be a positive whole number, not 0"),
    ("09_distributed", "world_sizes=[1]", "each value a whole number from 2 on"),
    ("09_distributed", "gloo_ranks=[1]", "each value a whole number from 2 on"),
    ("09_distributed", "backend=mpi", "must be one of auto, gloo, nccl, not 'mpi'"),
    ("09_distributed", "bucket_sizes_mb=[0]", "each value a positive number"),
    ("09_distributed", "sizes=[huge]", "of sizes that differ, each one of tinystories"),
    ("09_distributed", "sizes=[xl, xl]", "of sizes that differ"),
    ("10_wikitext", "wikitext=../LICENCE", "or a file or folder with text, not '../LICENCE'"),
    ("02_train", "num_documents=1", "must be a whole number from 2 on, not 1"),
    ("10_wikitext", "models={}", "must be a mapping from names to sizes, not {}"),
    ("10_wikitext", "models={a: {width: 3}}", "ModelConfig has no field width"),
    ("10_wikitext", "context_model=huge", "must be one of models, 1 x 32, 1 x 64, not 'huge'"),
    ("10_wikitext", "step_tokens=100", "must be a multiple of each of contexts, [64, 32], not 100"),
    ("10_wikitext", "learning_rate=0", "must be a positive number"),
    ("10_wikitext", "seeds=[-1]", "each value a whole number from 0 on"),
    ("10_wikitext", "precision=fp8", "must be one of fp32, tf32"),
    ("10_wikitext", "ops=fast", "must be one of plain, fused"),
    ("10_wikitext", "study={width: 3}", "StudyConfig has no field width"),
]


@pytest.mark.parametrize(("name", "pair", "words"), WRONG, ids=[pair for _, pair, _ in WRONG])
def test_a_wrong_value_is_one_sentence(name, pair, words):
    given = parse_overrides([pair])
    with pytest.raises(UserError) as caught:
        resolve_parameters(ROOT, find_notebooks(ROOT, [name]), "smoke", given, {})
    sentence = str(caught.value)
    assert sentence.startswith(f"Parameter {pair.partition('=')[0]!r} of notebook {name}")
    assert words in sentence
    assert "\n" not in sentence


def test_data_without_text_are_refused(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty.txt").touch()
    for name, words in {
        "empty.txt": "are empty: there is no text",
        "folder": "no text file",
        "x": "no file or",
    }.items():
        with pytest.raises(UserError, match=words):
            locate(str(tmp_path / name))


@pytest.mark.parametrize("pair", ["02_train data", "08_experiments data", "08_experiments web", "10_wikitext wikitext"])
def test_a_corpus_without_dev_is_refused_before_the_first_cell(tmp_path, pair):
    """Settings are chosen on the last training documents, so there must be others, and one to validate on."""
    name, key = pair.split()

    def resolved(path: Path, **more: str) -> dict:
        return resolve_parameters(ROOT, find_notebooks(ROOT, [name]), "smoke", {key: str(path)} | more, {})

    text, folder = tmp_path / "text.txt", tmp_path / "folder"
    folder.mkdir()
    (folder / "valid.txt").write_text("Other words.")
    for documents, least, place, file in ((1, 3, text, text), (2, 3, text, text), (1, 2, folder, folder / "train.txt")):
        file.write_text("<|endoftext|>".join(["Some words. "] * documents))
        words = f"must be a corpus of at least {least} documents, .* has {documents}\\."
        with pytest.raises(UserError, match=f"Parameter '{key}' of notebook {name} {words}"):
            resolved(place)
        assert resolved(place, records=str(ROOT / "results" / "h200"))  # nothing is trained
    for file, least in ((text, 3), (folder / "train.txt", 2)):
        file.write_text("<|endoftext|>".join(["Some words. "] * least))
    assert resolved(text)
    assert resolved(folder)
    if key != "web":  # which is prepared with several tokenizers
        few = prepare(str(text), "bpe:257", tmp_path / "few", CorpusConfig(valid_fraction=0.6), progress=False).folder
        with pytest.raises(UserError, match="has 1 training document, and dev"):
            resolved(few)
        assert resolved(prepare(str(text), "bpe:257", tmp_path / "more", progress=False).folder)


def test_the_command_refuses_before_it_starts_a_kernel(tmp_path):
    command = [sys.executable, "-m", "lmcore", "workbook", "--out", str(tmp_path / "made"), "--parameters"]
    began = time.monotonic()
    done = subprocess.run([*command, "vocab_size=5"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert time.monotonic() - began < 30  # on any machine; 1.3 s on a quiet one
    assert done.returncode == EXIT_USER_ERROR
    assert done.stderr.startswith("lmcore: Parameter 'vocab_size' of notebook 01_build must be")
    assert not (tmp_path / "made").exists()


def papermill(notebook: Path, folder: Path, *options: str) -> subprocess.Popen:
    """papermill, started in a folder from which the notebook has this relative path."""
    command = [PAPERMILL, os.path.relpath(notebook, folder), "out.ipynb", "--no-progress-bar", *options]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.fixture
def elsewhere(tmp_path) -> Path:
    """A folder in no project."""
    (tmp_path / "some" / "where").mkdir(parents=True)
    return tmp_path / "some" / "where"


def test_the_first_cell_refuses_in_a_sentence(elsewhere):
    file = str(ROOT / "papermill_jobs" / "parameters" / "smoke" / "01_build.yaml")
    process = papermill(ROOT / "notebooks" / "01_build.ipynb", elsewhere, "-f", file, "-p", "vocab_syze", "300")
    said, _ = process.communicate(timeout=200)
    assert process.returncode != 0
    assert "\nUserError: Notebook 01_build has no parameter 'vocab_syze'; its parameters are scale, data, out" in said
    cells = nbformat.read(elsewhere / "out.ipynb", 4).cells
    (error,) = [out for cell in cells for out in cell.get("outputs", []) if out.output_type == "error"]
    assert error.traceback == [f"UserError: {error.evalue}"]  # nothing of the calls that led to it


@pytest.mark.parametrize(
    ("changed", "injected", "words"),
    [
        ({}, "# Parameters\nbatch_size = 4\n", None),
        ({"batch_size": 0}, "# Parameters\nbatch_size = 0\n", "'batch_size' of notebook 01_build must be a positive"),
        ({"seed": -1}, None, "'seed' of notebook 01_build must be"),  # edited in the notebook, without papermill
        ({"seeds": 3}, "# Parameters\nseeds = 3\n", "Notebook 01_build has no parameter 'seeds'"),
        ({"seeds": 3}, None, None),  # a variable of some other cell
        ({"data": "nowhere"}, None, "There is no file or folder nowhere"),
        ({"model_size": object()}, None, None),  # the cells below have made something of it, and it is run again
    ],
)
def test_what_the_first_cell_checks(elsewhere, monkeypatch, changed, injected, words):
    monkeypatch.chdir(elsewhere)
    variables = DECLARED["01_build"] | changed | {"In": ["", "seed = 0", *([injected] if injected else []), "1"]}
    with pytest.raises(UserError, match=words) if words else contextlib.nullcontext():
        begin_notebook("01_build", variables)
    assert Path.cwd() == ROOT / "notebooks"


def test_the_same_command_resumes_after_a_stop(tmp_path, elsewhere, embedded_data):
    """papermill is killed while a cell trains; the training continues by itself, and the next papermill follows it."""
    project = make_project(
        tmp_path / "project", {"01_toy": "steps: 5\n"}, _01_toy=["# 01", parameters(), BEGIN, TRAIN, code("out, steps")]
    )
    config = TrainConfig(
        model=model_config("smoke", vocab_size=300, context_length=16, d_model=16, num_heads=2, d_ff=24),
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=0),
        data=str(embedded_data),
        batch_size=4,
        steps=600,
        eval_batch_size=4096,
        eval_interval=600,
        checkpoint_interval=100,
        device="cpu",
    )
    (project / "config.json").write_text(json.dumps(to_dict(config)))
    run = RunFolder(project / "runs" / "smoke" / "runs" / "toy")  # by the default ../runs/smoke, from notebooks/
    file = str(project / "papermill_jobs" / "parameters" / "smoke" / "01_toy.yaml")
    notebook = project / "notebooks" / "01_toy.ipynb"
    first = papermill(notebook, elsewhere, "-f", file)
    deadline = time.monotonic() + 120
    while not run.log_file.exists():
        assert time.monotonic() < deadline
        assert first.poll() is None, first.communicate()[0]
        time.sleep(0.02)
    first.send_signal(signal.SIGKILL)
    first.wait()  # its pipe is the kernel's, too, which ends by itself
    for _ in range(2):
        again = papermill(notebook, elsewhere, "-f", file)
        said, _ = again.communicate(timeout=120)
        assert again.returncode == 0, said
        cells = [cell for cell in read_notebook(elsewhere / "out.ipynb").cells if cell.cell_type == "code"]
        assert cells[-1].outputs[0].data["text/plain"] == "('../runs/smoke', 5)"
        assert cells[-2].outputs[-1].data["text/plain"] == "'complete'"
    assert "toy: reused, complete at step 600." in cells[-2].outputs[0].text
    assert yaml.safe_load(Path(file).read_text()) == {"steps": 5}


def test_some_cells_of_a_notebook(tmp_path):
    def cells(*words):
        command = [sys.executable, "papermill_jobs/cells.py", *words]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    done = cells("09_distributed", str(tmp_path), "=print(scale, steps)", "distributed-fit", "--scale", "smoke")
    assert done.returncode == 0, done.stderr
    assert "smoke 10\nfitted to times made by 20 µs and 1 GB/s: 20 µs and 1 GB/s\n" in done.stdout
    for words, sentence in (
        (
            ("09_distributed", str(tmp_path), "nothing"),
            "09_distributed has no cell 'nothing'; it has ",
        ),
        (("99_other", str(tmp_path)), "There is no notebook '99_other'; there are 01_build, "),
        (("09_distributed", str(tmp_path), "--scale", "huge"), "There is no scale 'huge' ("),
        (("09_distributed", str(tmp_path), "=1 / 0", "--scale", "smoke"), "This cell failed: 1 / 0"),
    ):
        done = cells(*words)
        assert done.returncode == 1
        assert done.stderr.splitlines()[-1].startswith(sentence)
