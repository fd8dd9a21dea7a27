"""What is committed beside the code: dependencies, pins, notebooks, hooks, commands."""

import ast
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import nbformat
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from workbook.notebook import CHECK_OUTPUT, KEEP_OUTPUT, clean, code_cells, declared_parameters, read_notebook, tags

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PROJECTS = {
    name: tomllib.loads((ROOT / file).read_text(encoding="utf-8"))
    for name, file in {"lmcore": "pyproject.toml", "workbook": "workbook/pyproject.toml"}.items()
}


def requirements(distribution: str, *extras: str) -> dict[str, Requirement]:
    """Direct dependencies by package, with those of the extras."""
    project = PROJECTS[distribution]["project"]
    lines = project["dependencies"] + [line for e in extras for line in project["optional-dependencies"][e]]
    return {canonicalize_name(requirement.name): requirement for requirement in map(Requirement, lines)}


def test_constraints_pin_every_dependency_and_the_hooks():
    lines = [re.sub("#.*", "", line) for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()]
    pins = dict(line.split("==") for line in lines if line)
    extras = ("dev", "data", "plot", "hf", "gguf", "benchmark", "chat", "wandb", "tensorboard", "fast-tokenizer")
    wanted = requirements("lmcore", *extras) | requirements("workbook")
    for name in wanted.keys() - {"lmcore"}:
        assert wanted[name].specifier.contains(pins[name]), name
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    (ruff,) = (repo["rev"] for repo in config["repos"] if repo["repo"].endswith("/ruff-pre-commit"))
    assert ruff == f"v{pins['ruff']}"


def test_environment_yml_installs_what_make_does():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))
    (python,) = (line for line in environment["dependencies"] if str(line).startswith("python="))
    (pip,) = (line["pip"] for line in environment["dependencies"] if isinstance(line, dict))
    assert pip == ["-c constraints.txt", "-e .[dev]", "-e ./workbook"]
    assert "-c constraints.txt -e '.[dev]' -e ./workbook" in (ROOT / "Makefile").read_text(encoding="utf-8")
    for project in PROJECTS.values():
        wanted = Requirement(f"python{project['project']['requires-python']}").specifier
        assert wanted.contains(python.removeprefix("python=") + ".0")


def imported_modules(folder: Path) -> set[str]:
    """Top-level names that the Python files of a folder import."""
    names = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names.add(node.module.split(".")[0])
    return names - set(sys.stdlib_module_names)


def test_other_ways_in_have_the_same_pins():
    """The development container, the page on installing, the citation; and Colab's notebook asks for an address."""
    torch = re.search(r"^torch==\S+", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)[0]
    for file in (".devcontainer/devcontainer.json", "docs/pages/guides/install.md"):
        assert f"--torch-backend=cpu {torch}" in (ROOT / file).read_text(encoding="utf-8")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == PROJECTS["lmcore"]["project"]["version"]
    cells = [cell.source for cell in nbformat.read(ROOT / "docs" / "colab.ipynb", 4).cells if cell.cell_type == "code"]
    with pytest.raises(SystemExit, match="Set ADDRESS"):
        exec("\n".join(cells), {})


@pytest.mark.parametrize("folder", PROJECTS)
def test_every_import_is_declared(folder):
    extras = ("dev", "data", "plot", "chat", "fast-tokenizer") if folder == "lmcore" else ()
    known = {folder} | requirements(folder, *extras).keys()
    own = {"tiktoken_ext", "IPython", "__main__"}  # a part of tiktoken; what every notebook's kernel has; this program
    distributions = metadata.packages_distributions()
    for name in imported_modules(ROOT / folder) - own:
        owners = {canonicalize_name(owner) for owner in distributions.get(name, [name])}
        assert owners & known, f"{folder} imports {name}, which its pyproject.toml does not declare"


def test_training_imports_little():
    """The loop and all that it imports are read in an afternoon; kernels and parallelism are no part of it."""
    code = "import sys, lmcore.train; print(*(m.__file__ for n, m in sys.modules.items() if n.startswith('lmcore')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    files = [Path(name) for name in done.stdout.split()]
    assert not any({"fast", "distributed", "cli", "profiling"} & set(file.parts) for file in files)
    assert len(files) <= 32
    assert sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files) <= 5500


def test_training_leaves_the_compiler_alone():
    """PyTorch's takes two seconds to import, in each of a sweep's processes."""
    code = """import sys, torch
from lmcore import device, optimizer, train
with device.reproducible(train.TrainConfig(), torch.device("cpu")):
    made = optimizer.build_optimizer(torch.nn.Linear(2, 2), train.TrainConfig().optimizer)
    made.zero_grad()
    made.load_state_dict(made.state_dict())
sys.exit("torch._dynamo" in sys.modules)"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", PROJECTS)
def test_a_wheel_holds_its_own_package_alone_and_all_of_it(name, tmp_path):
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
    for package in PROJECTS:
        shutil.copytree(ROOT / package, tmp_path / package, ignore=ignored)
    for file in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / file, tmp_path)
    committed = {str(path.relative_to(tmp_path)) for path in (tmp_path / name).rglob("*") if path.is_file()}
    build = [sys.executable, "-c", "from setuptools.build_meta import build_wheel; build_wheel('.')"]
    source = tmp_path if name == "lmcore" else tmp_path / name
    subprocess.run(build, cwd=source, check=True, stdout=subprocess.DEVNULL)
    (wheel,) = source.glob("*.whl")
    held = {entry for entry in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in entry}
    assert held == committed - {"workbook/pyproject.toml"}


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def notebook(request):
    return request.param.stem, read_notebook(request.param)


def test_a_notebook_says_what_it_is_and_begins_with_its_parameters(notebook):
    name, content = notebook
    opening = content.cells[0]
    assert opening.cell_type == "markdown"
    assert opening.source.startswith("# ")
    assert all(word in opening.source.lower() for word in ("learn", "minute", "problem"))
    known = declared_parameters(content, name)
    assert (known["scale"], known["out"], known.get("data", "embedded")) == ("smoke", "../runs/smoke", "embedded")
    assert "begin_notebook()" in dict(code_cells(content))[2].source


def test_a_notebook_is_committed_clean_whatever_an_editor_saves(notebook):
    name, content = notebook
    assert len({cell.id for cell in content.cells}) == len(content.cells)
    saved = nbformat.from_dict(content)
    for number, cell in code_cells(saved):
        cell.execution_count, cell.metadata["collapsed"] = number, False
        if not cell.outputs:
            cell.outputs = [nbformat.v4.new_output("stream", text="this run's\n")]
    assert nbformat.writes(clean(saved)) + "\n" == (ROOT / "notebooks" / f"{name}.ipynb").read_text(encoding="utf-8")


def test_git_cleans_notebooks():
    assert "filter=notebook" in (ROOT / ".gitattributes").read_text().split()
    assert "git config filter.notebook.clean '$(BIN)/python -m workbook.notebook'" in (ROOT / "Makefile").read_text()
    saved = NOTEBOOKS[0].read_bytes()
    assert subprocess.check_output([sys.executable, "-m", "workbook.notebook"], input=saved) == saved


def test_kept_outputs_are_there_and_checked(notebook):
    cells = [cell for _, cell in code_cells(notebook[1])]
    assert sum(KEEP_OUTPUT in tags(cell) for cell in cells) >= 4, "nbval checks too few outputs"
    for cell in cells:
        assert (KEEP_OUTPUT in tags(cell)) == (CHECK_OUTPUT in tags(cell)), cell.source
        assert cell.outputs or KEEP_OUTPUT not in tags(cell), f"run `make refresh-notebooks`: {cell.source}"
