"""Every command of the READMEs is one that there is, with options that it takes."""

import pkgutil
import re
import shlex
import subprocess
from pathlib import Path

import pytest

import workbook.cli
from lmcore.cli import application
from workbook.parameters import find_notebooks, parse_overrides, resolve_parameters

ROOT = Path(__file__).parents[1]
GUIDES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs" / "pages" / "guides").glob("*.md"))
PAGES = ("README.md", "papermill_jobs/README.md", "CONTRIBUTING.md", "results/README.md", *GUIDES)
PROGRAMS = {"lmcore": application.application, "workbook": workbook.cli.commands}
INSTALLED = {f".venv/bin/{name}" for name in ("python", "pytest", "mypy", "lint-imports")}
SLURM = {"sbatch", "srun", "squeue", "sacct"}
OTHERS = (
    {"git", "cd", "source", "nano", "papermill", "torchrun", "make", "tail", "uv", "python3", "tensorboard"}
    | SLURM
    | INSTALLED
    | {"papermill_jobs/submit.sh"}
)
"""Programs that are not ours."""

FILES = {"bin", "json", "jsonl", "md", "py", "safetensors", "sh", "toml", "yaml"}
"""Endings of what looks like a dotted name and is a file."""


def text_of(file: str) -> str:
    return (ROOT / file).read_text(encoding="utf-8")


def commands(page: str) -> list[str]:
    """Lines of the page's shell blocks without comments; && makes two of one."""
    blocks = re.findall(r"```bash\n(.*?)```", text_of(page), flags=re.DOTALL)
    lines = [re.sub(r"(^|\s+)#.*", "", line) for block in blocks for line in block.splitlines()]
    return [part for line in lines if line for part in ([line] if line.startswith("srun") else line.split(" && "))]


def words_of(line: str) -> tuple[dict[str, str], list[str]]:
    """Variables before the command, and the command's words."""
    words = shlex.split(line.replace("<address>", "address"))
    count = next(number for number, word in enumerate(words) if not re.fullmatch(r"[A-Z_]+=.*", word))
    return dict(word.split("=", 1) for word in words[:count]), words[count:]


@pytest.mark.parametrize("line", sorted({line for page in PAGES for line in commands(page)}))
def test_a_command_is_one_that_there_is(line):
    variables, (program, *words) = words_of(line)
    assert program in PROGRAMS.keys() | OTHERS
    if program in PROGRAMS:
        assert callable(application.parse(words, program, PROGRAMS[program]))
    if program == "make":
        dry = ["make", "--dry-run", "PYTHON=python3", *words]
        assert subprocess.run(dry, cwd=ROOT, capture_output=True, check=False).returncode == 0
        assert all(f"\n{word.partition('=')[0]} ?=" in text_of("Makefile") for word in words[1:])
    if program == "sbatch":
        script = next(word for word in words if not word.startswith("-"))
        text = text_of(script) + text_of("papermill_jobs/job.sh")
        assert all(re.search(rf"\${{?{name}\b", text) for name in variables)


def test_the_cluster_guide():
    """The commands that submit show what they would submit, as one would type it, and parameters are the notebook's."""
    submitted = [
        line for line in commands("papermill_jobs/README.md") if line.endswith("submit.sh") or "submit.sh " in line
    ]
    assert len(submitted) > 5
    for line in submitted:
        dry = subprocess.run(
            ["bash", "-c", f"export DRY_RUN=1; {line}"], cwd=ROOT, capture_output=True, text=True, check=True
        )
        assert dry.stdout.count(" sbatch ") >= 2
        assert subprocess.run(["bash", "-n", "-c", dry.stdout], check=False).returncode == 0
        variables, words = words_of(line)
        names = variables.get("NOTEBOOKS", "").split()
        resolve_parameters(ROOT, find_notebooks(ROOT, names), "gpu", parse_overrides(words[2:]), {})


def test_what_contributing_names_is_there():
    """Modules, functions and methods that the page names outside of its blocks, each from its package down."""
    known = {}
    for package in ("workbook", "lmcore"):
        known |= {path.stem: f"{package}.{path.stem}" for path in (ROOT / package).iterdir()}
        for path in sorted((ROOT / package).rglob("*.py")):
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            known |= {name: f"{module}.{name}" for name in re.findall(r"^class (\w+)", path.read_text("utf-8"), re.M)}
    known["workbook"] = "workbook"
    page = re.sub(r"```.*?```", "", text_of("CONTRIBUTING.md"), flags=re.DOTALL)
    found = re.findall(r"`([A-Za-z_]+)((?:\.\w+)+)(?:\(.*?\))?`", page)
    named = [(known[first], rest) for first, rest in found if first in known and rest[1:] not in FILES]
    assert len(named) > 30
    for first, rest in named:
        assert pkgutil.resolve_name(first + rest) is not None


def test_both_mfus_of_the_longest_step_follow_from_its_time():
    """8b: 34 layers of width 4,096, d_ff 11,008, vocabulary 151,936, 32,768 tokens; matmuls of a sequence, forward."""
    width, tokens = 4096, 32_768
    projections = 2 * tokens * (34 * (4 * width**2 + 3 * width * 11_008) + 151_936 * width)
    scores = 34 * 2 * 2 * tokens**2 * width
    whole = 3 * 2 * (projections + scores) / 2 / 4.728023 / 989.4e12  # two GPUs take 4.728 s for two sequences
    share = 1 - scores / 2 / (projections + scores)
    assert f"{share * whole:.0%} MFU of causal attention, {whole:.0%} with its masked half" in text_of("README.md")
