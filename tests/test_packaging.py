"""What is committed beside the code: dependencies, pins, notebooks, hooks, commands."""

import ast
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import nbformat
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from workbook.notebook import (
    CHECK_OUTPUT,
    KEEP_OUTPUT,
    clean,
    code_cells,
    declared_parameters,
    read_notebook,
    tags,
)

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def requirements(*extras: str) -> list[Requirement]:
    """Direct dependencies, with those of the extras."""
    lines = PROJECT["dependencies"] + [line for e in extras for line in PROJECT["optional-dependencies"][e]]
    return [Requirement(line) for line in lines]


def pins() -> dict[str, str]:
    """Versions in constraints.txt by package."""
    lines = [re.sub("#.*", "", line) for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()]
    assert all(re.fullmatch("([a-z0-9-]+==[0-9][0-9a-z.]*)?", line) for line in lines)
    return {canonicalize_name(line.partition("==")[0]): line.partition("==")[2] for line in lines if line}


def test_constraints_pin_every_dependency():
    pinned = pins()
    assert pinned["torch"] == "2.13.0"
    for requirement in requirements("dev", "wikitext", "tensorboard", "benchmark"):
        version = pinned[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"{requirement} against {version}"


def test_environment_yml_installs_what_pyproject_says():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))
    python = next(item for item in environment["dependencies"] if str(item).startswith("python="))
    wanted = Requirement(f"python{PROJECT['requires-python']}").specifier
    assert wanted.contains(python.removeprefix("python=") + ".0")
    (pip,) = (item["pip"] for item in environment["dependencies"] if isinstance(item, dict))
    assert pip == ["-c constraints.txt", "-e .[dev]"]
    assert "-c constraints.txt -e '.[dev]'" in (ROOT / "Makefile").read_text(encoding="utf-8")


def imported_modules(folder: Path) -> set[str]:
    """Top-level names that the Python files of a folder import."""
    names = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize(
    ("folder", "extras"), [("lmcore", ("wikitext", "tensorboard", "wandb", "dev")), ("tests", ("dev", "wikitext"))]
)
def test_every_import_is_declared(folder, extras):
    declared = {canonicalize_name(requirement.name) for requirement in requirements(*extras)}
    declared |= {"packaging", "lmcore"}  # packaging comes with pytest, which is what uses it here
    distributions = metadata.packages_distributions()
    own = {path.stem for path in (ROOT / folder).glob("**/*.py" if folder == "tests" else "*.py")}
    scripts = [*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "results").glob("*.py")]
    own |= {path.stem for path in scripts} if folder == "tests" else set()
    for name in imported_modules(ROOT / folder) - set(sys.stdlib_module_names) - own - {"lmcore", "tiktoken_ext"}:
        owners = {canonicalize_name(owner) for owner in distributions.get(name, [name])}
        assert owners & declared, f"{folder} imports {name}, which pyproject.toml does not declare"


def test_package_data_is_declared():
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    for package, files in tool["package-data"].items():
        folder = ROOT / package.replace(".", "/")
        others = {path.name for path in folder.iterdir() if path.is_file() and path.suffix != ".py"}
        assert others == set(files)


def test_hooks_have_the_pinned_versions():
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    revisions = {repo["repo"].rsplit("/", 1)[-1].removesuffix("-pre-commit"): repo["rev"] for repo in config["repos"]}
    versions = {name: rev.removeprefix("v") for name, rev in revisions.items()}
    assert versions == {name: pins()[name] for name in ("ruff",)}
    command = [sys.executable, "-m", "pre_commit", "validate-config", ROOT / ".pre-commit-config.yaml"]
    assert subprocess.run(command, check=False).returncode == 0


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="there is no shellcheck")
def test_ci_script_is_clean():
    scripts = [ROOT / ".ci" / "run", ROOT / "benchmarks" / "parallel.sh"]
    done = subprocess.run(["shellcheck", *scripts], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_make_says_what_python_it_needs(tmp_path):
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).touch()
    command = ["make", "-C", str(tmp_path), "workbook", "PYTHON="]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "No Python from 3.11 on" in done.stderr
    assert not (tmp_path / ".venv").exists()


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def notebook(request):
    return request.param.stem, read_notebook(request.param)


def test_notebook_begins_with_parameters_and_their_check(notebook):
    name, content = notebook
    known = declared_parameters(content, name)
    assert (known["scale"], known["data"], known["out"]) == ("smoke", "embedded", "../runs/smoke")
    assert "begin_notebook()" in dict(code_cells(content))[2].source


def test_notebook_is_committed_clean(notebook):
    content = notebook[1]
    assert clean(content) == content
    assert len({cell.id for cell in content.cells}) == len(content.cells)


def test_git_strips_what_an_editor_saves(notebook):
    name, content = notebook
    saved = nbformat.from_dict(content)
    for number, cell in code_cells(saved):
        cell.execution_count, cell.metadata["collapsed"] = number, False
        if not cell.outputs:
            cell.outputs = [nbformat.v4.new_output("stream", text="this run's\n")]
    command = [sys.executable, "-m", "workbook.notebook"]
    done = subprocess.run(command, input=nbformat.writes(saved), capture_output=True, text=True, check=True)
    assert done.stdout == (ROOT / "notebooks" / f"{name}.ipynb").read_text(encoding="utf-8")
    attributes = (ROOT / ".gitattributes").read_text().split()
    assert "filter=notebook" in attributes
    assert "git config filter.notebook.clean" in (ROOT / "Makefile").read_text()


def test_kept_outputs_are_there_and_checked(notebook):
    cells = [cell for _, cell in code_cells(notebook[1])]
    assert sum(KEEP_OUTPUT in tags(cell) for cell in cells) >= 4, "nbval checks too few outputs"
    for cell in cells:
        assert (KEEP_OUTPUT in tags(cell)) == (CHECK_OUTPUT in tags(cell)), cell.source
        assert cell.outputs or KEEP_OUTPUT not in tags(cell), f"run `make refresh-notebooks`: {cell.source}"


def test_notebook_opens_with_what_it_is(notebook):
    opening = notebook[1].cells[0]
    assert opening.cell_type == "markdown"
    assert opening.source.startswith("# ")
    missing = [word for word in ("learn", "minute", "problem") if word not in opening.source.lower()]
    assert not missing, f"the opening cell does not speak of {missing}"
