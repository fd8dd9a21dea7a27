"""The notebooks of a project, and the parameters that each gets at a scale."""

import ast
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from lmcore.errors import UserError, require, require_path
from workbook.notebook import declared_parameters, read_notebook

PARAMETERS_FOLDER = Path("papermill_jobs") / "parameters"
"""One folder for each scale, with a YAML file for each notebook: what `papermill -f` takes."""


def find_project() -> Path:
    """Folder that holds notebooks/: the current one or one above it, else this package's checkout."""
    for folder in (Path.cwd(), *Path.cwd().parents, Path(__file__).resolve().parents[1]):
        if (folder / "notebooks").is_dir() and (folder / PARAMETERS_FOLDER).is_dir():
            return folder
    raise UserError("There is no notebooks/ folder here: run this in a checkout of the project.")


def find_notebooks(project: Path, names: Sequence[str] = ()) -> list[Path]:
    """The numbered notebooks in order; `names` ("02" or "02_train") picks some. Raises `UserError` on another name."""
    found = {path.stem: path for path in sorted((project / "notebooks").glob("[0-9][0-9]_*.ipynb"))}
    for name in names:
        there = name and any(stem.startswith(name) for stem in found)
        require(bool(there), f"There is no notebook {name!r}; there are {', '.join(found)}.")
    return [path for stem, path in found.items() if not names or stem.startswith(tuple(names))]


def resolve_parameters(
    project: Path, notebooks: Sequence[Path], scale: str, overrides: Mapping[str, Any], common: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Parameters of each notebook by its name: those of papermill_jobs/parameters/<scale>/<notebook>.yaml, then
    `common`, then `overrides`, each for the notebooks that declare it.

    Raises `UserError` on an unknown scale, on a parameter that no notebook declares (papermill would only warn), and on
    a value of another type than the default's.
    """
    folder = project / PARAMETERS_FOLDER / scale
    scales = ", ".join(sorted(path.name for path in folder.parent.iterdir() if path.is_dir()))
    known = Path(scale).name == scale and folder.is_dir()  # a scale is a folder's name in runs/, too
    require(known, f"There is no scale {scale!r} ({folder} is missing); choose one of {scales}.")
    declared = {path.stem: declared_parameters(read_notebook(path), path.stem) for path in notebooks}
    every = sorted({key for known in declared.values() for key in known})
    for key in overrides:
        require(key in every, f"No notebook has a parameter {key!r}; there are {', '.join(every)}.")
    resolved = {}
    for name, known in declared.items():
        chosen = {key: value for key, value in {**common, **overrides}.items() if key in known}
        file = folder / f"{name}.yaml"  # without one, the notebook has its defaults
        resolved[name] = (read_mapping(file) if file.exists() else {}) | chosen
        for key, value in resolved[name].items():
            require(key in known, f"Notebook {name} has no parameter {key!r}; its parameters are {', '.join(known)}.")
            kind = type(known[key])
            typed = known[key] is None or value is None or type(value) in {float: (float, int)}.get(kind, (kind,))
            require(typed, f"Parameter {key!r} of notebook {name} must be of type {kind.__name__}, not {value!r}.")
    return resolved


def read_mapping(file: Path) -> dict[str, Any]:
    """The mapping in a YAML file, empty if it holds nothing. Raises `UserError` where it holds something else."""
    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
    except (yaml.YAMLError, OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file} cannot be read as YAML ({str(error).splitlines()[0]}).") from error
    require(isinstance(values, dict), f"{file} must be a mapping, not {values!r}.")
    return values


def parse_overrides(pairs: Sequence[str]) -> dict[str, Any]:
    """`name=value` pairs as a mapping; values that are no Python literals are text."""
    overrides = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        require(bool(equals) and name.isidentifier(), f"A parameter is given as name=value, not {pair!r}.")
        try:
            overrides[name] = ast.literal_eval(text)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):  # {[]: 1} is a TypeError
            overrides[name] = text
    return overrides


def locate(data: str) -> str:
    """`data` as the notebooks need it: a name as it is, a path in full. Raises `UserError` if it has no text."""
    from lmcore.data.corpora import open_corpus
    from lmcore.data.downloads import HUB, SOURCES
    from lmcore.data.prepared import is_prepared

    require_path("data", data)
    if data in ("embedded", *SOURCES) or data.startswith(HUB):
        return data
    there = is_prepared(data) or any(path.stat().st_size for path in open_corpus(data).train_files)
    require(there, f"The data {data} are empty: there is no text.")
    return str(Path(data).resolve())


# ---- in the notebook


def begin_notebook() -> None:
    """Goes to notebooks/, where relative paths start, wherever papermill was started."""
    os.chdir(find_project() / "notebooks")
