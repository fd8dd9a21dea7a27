"""Every command of the READMEs is one that there is, with options that it takes."""

import pkgutil
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from lmcore import cli
from lmcore.cli.application import parse

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "papermill_jobs/README.md", "CONTRIBUTING.md", "results/README.md")
INSTALLED = {f".venv/bin/{name}" for name in ("python", "pytest", "mypy", "lint-imports")}
OTHERS = {"git", "cd", "source", "nano", "srun", "papermill", "torchrun"} | INSTALLED
"""Programs that are not ours."""

FILES = {"bin", "json", "jsonl", "md", "py", "safetensors", "toml", "yaml"}
"""Endings of what looks like a dotted name and is a file."""


def commands(page: str) -> list[str]:
    """Lines of the page's shell blocks without comments; && makes two of one."""
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL)
    lines = [re.sub(r"(^|\s+)#.*", "", line) for block in blocks for line in block.splitlines()]
    return [part for line in lines if line for part in ([line] if line.startswith("srun") else line.split(" && "))]


LINES = sorted({line for page in PAGES for line in commands(page)})
LMCORE = [line for line in LINES if line.startswith("lmcore ")]
SUBMITTED = [
    line for line in LMCORE if line.startswith("workbook submit ") and "data/" not in line.replace("data/mine", "")
]
"""Those that can be tried without Slurm and without that data."""


def words_of(line: str) -> tuple[dict[str, str], list[str]]:
    """Variables before the command, and the command's words."""
    words = shlex.split(line.replace("<this repository>", "repository"))
    count = next(number for number, word in enumerate(words) if not re.fullmatch(r"[A-Z]+=.*", word))
    return dict(word.split("=", 1) for word in words[:count]), words[count:]


@pytest.mark.parametrize("page", PAGES)
def test_the_programs_are_known(page):
    assert {words_of(line)[1][0] for line in commands(page)} <= {"lmcore", "make", "sbatch", *OTHERS}


@pytest.mark.parametrize("line", LMCORE)
def test_lmcore_takes_it(line):
    assert callable(parse(words_of(line)[1][1:]))


@pytest.mark.parametrize("line", SUBMITTED)
def test_it_can_be_submitted(line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    words = words_of(line)[1][1:]
    out = [] if words[:2] == ["submit", "train"] else ["--out", str(tmp_path)]  # a run has its own folder
    assert cli.main([*words, "--dry-run", *out]) == 0
    assert "sbatch" in capsys.readouterr().out


@pytest.mark.parametrize("line", [line for line in LINES if line.startswith("make ")])
def test_make_has_the_target(line):
    words = words_of(line)[1][1:]
    done = subprocess.run(
        ["make", "--dry-run", "PYTHON=python3", *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for word in words[1:]:
        assert f"\n{word.partition('=')[0]} ?=" in makefile


@pytest.mark.parametrize("line", [line for line in LINES if words_of(line)[1][0] == "sbatch"])
def test_the_script_is_there(line):
    variables, words = words_of(line)
    script = next(word for word in words[1:] if not word.startswith("-"))
    text = (ROOT / script).read_text(encoding="utf-8") + (ROOT / "papermill_jobs" / "job.sh").read_text(
        encoding="utf-8"
    )
    for name in variables:
        assert re.search(rf"\${{?{name}\b", text), f"{script} has no variable {name}"


def test_settings_and_links_of_the_cluster_guide_are_there():
    page = (ROOT / "papermill_jobs" / "README.md").read_text(encoding="utf-8")
    site = (ROOT / "papermill_jobs" / "site.yaml").read_text(encoding="utf-8")
    for setting in ("signal_seconds", "attempts_without_progress", "scratch", "gpus"):
        assert setting in page
        assert f"{setting}:" in site
    for target in re.findall(r"\]\(([^)#:]+)\)", page):
        assert (ROOT / "papermill_jobs" / target).exists()


def names_in_contributing() -> list[str]:
    """Modules, functions and methods that the page names outside of its blocks, each from lmcore down."""
    page = re.sub(r"```.*?```", "", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    modules = {path.stem: f"lmcore.{path.stem}" for path in (ROOT / "lmcore").iterdir()}
    for path in sorted((ROOT / "lmcore").rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        modules |= {name: f"{module}.{name}" for name in re.findall(r"^class (\w+)", path.read_text("utf-8"), re.M)}
    found = re.findall(r"`([A-Za-z_]+)((?:\.\w+)+)(?:\(.*?\))?`", page)
    return sorted({modules[first] + rest for first, rest in found if first in modules and rest[1:] not in FILES})


@pytest.mark.parametrize("name", names_in_contributing())
def test_what_contributing_names_is_there(name):
    assert pkgutil.resolve_name(name) is not None


def test_from_login_to_writeup_in_under_ten_lines():
    block = re.search(r"Student, cluster.*?```bash\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)[1]
    assert len(block.splitlines()) < 10
    for word in ("make install", "site.yaml", "workbook submit notebooks", "workbook status"):
        assert word in block


def test_both_mfus_of_the_longest_step_follow_from_its_time():
    """8b: 34 layers of width 4,096, d_ff 11,008, vocabulary 151,936, 32,768 tokens; matmuls of a sequence, forward."""
    width, tokens = 4096, 32_768
    projections = 2 * tokens * (34 * (4 * width**2 + 3 * width * 11_008) + 151_936 * width)
    scores = 34 * 2 * 2 * tokens**2 * width
    whole = 3 * 2 * (projections + scores) / 2 / 4.728023 / 989.4e12  # two GPUs take 4.728 s for two sequences
    share = 1 - scores / 2 / (projections + scores)
    said = f"{share * whole:.0%} MFU of causal attention, {whole:.0%} with its masked half"
    assert said in (ROOT / "README.md").read_text(encoding="utf-8")
