"""Answers of the notebooks, rendered from the committed records on a CPU: numbers, claims that hold, templates."""

import ast
import json
import re
import subprocess

import pytest
from matplotlib.figure import Figure
from notebook_cells import ANSWERS, PROJECT, RECORDS, answer_calls, cells_of, rendered, template_of, typed_numbers

NAMES = ["01_build", "02_train", "03_generate", "04_benchmark", "05_nsys", "06_memory", "07_kernels"]
NAMES += ["08_experiments", "09_distributed", "10_wikitext"]


@pytest.fixture
def nothing_drawn(monkeypatch):
    """Figures are made and written, but empty: drawing them is most of a notebook's time."""
    for name in ("draw", "tight_layout"):
        monkeypatch.setattr(Figure, name, lambda *_, **__: None)
    monkeypatch.setattr(Figure, "savefig", lambda _, file, **__: file.write(b"<svg/>"))


@pytest.mark.parametrize("name", NAMES)
def test_the_records_give_the_committed_answers(name, tmp_path, nothing_drawn):
    committed = json.loads(ANSWERS.read_text(encoding="utf-8"))[name]
    found = rendered(name, tmp_path)
    assert found.keys() == committed.keys()
    for problem, was in committed.items():
        assert found[problem] == was
        assert all(was.get("holds", {}).values())
    assert not (tmp_path / "runs").exists()  # nothing was trained


@pytest.mark.parametrize("name", NAMES)
def test_templates_hold_no_numbers(name):
    for call in answer_calls(name):
        assert typed_numbers(template_of(call)) == [], template_of(call)


@pytest.mark.parametrize("name", NAMES)
def test_what_a_cell_makes_to_be_seen_is_its_last_expression(name):
    """Jupyter shows nothing else: a table that a function does not return is lost."""
    for source in cells_of(name).values():
        tree = ast.parse(source)
        for node in ast.walk(tree):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and node is not tree.body[-1]:
                assert getattr(node.value.func, "id", "") not in ("table", "answer", "show"), ast.unparse(node)


@pytest.mark.parametrize(
    ("problem", "told"),
    [  # batch 4, four bytes a value: the logits, the hidden layer of an FFN or the scores of a block, at each context
        ("memory_profiling (c, CSE599-O)", {4 * 128 * 10_000: "19.53", 4 * 256 * 10_000: "39.06"}),
        ("memory_profiling (c, CSE599-O)", {4 * 20 * 512**2: "80"}),  # which asks for these three contexts
        ("memory_profiling (e, CS336)", {4 * 128 * 10_240: "20", 4 * 256 * 10_240: "40"}),
        ("memory_profiling (e, CS336)", {4 * 32 * 512**2: "128", 4 * 32 * 2048**2: "2,048"}),
    ],
)
def test_the_largest_allocations_are_told_for_every_context_asked_for(problem, told):
    text = json.loads(ANSWERS.read_text(encoding="utf-8"))["06_memory"][problem]["text"]
    assert [f"{4 * values / 2**20:,.4g}" for values in told] == [*told.values()]
    assert f"{' and '.join(told.values())} MiB" in text


def test_make_record_leaves_out_notebooks_without_records():
    said = subprocess.run(["make", "-n", "record"], cwd=PROJECT, capture_output=True, text=True, check=True).stdout
    recorded = list(json.loads(ANSWERS.read_text(encoding="utf-8")))
    assert f"--notebooks {' '.join(recorded)}\n" in said
    assert re.findall(r"echo '(\w+) has no records", said) == [name for name in NAMES if name not in recorded]


def test_one_gpu_has_one_peak():
    answers = json.loads(ANSWERS.read_text(encoding="utf-8"))
    told = [answers["04_benchmark"]["roofline"]["text"], answers["07_kernels"]["eager_attention"]["text"]]
    first, second = (re.search(r"the ridge.*? at (\d+\.\d)", text, re.DOTALL)[1] for text in told)
    assert first == second


def test_records_hold_what_was_measured_on_one_machine():
    devices = {json.loads(path.read_text())["provenance"]["device"] for path in RECORDS.glob("generate_*.json")}
    assert devices == {"NVIDIA H200"}
