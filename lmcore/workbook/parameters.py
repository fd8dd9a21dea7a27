"""The notebooks of a project, and the parameters that each gets at a scale."""

import ast
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from lmcore.errors import UserError, require
from lmcore.workbook.notebook import check_parameters, declared_parameters, read_notebook


def find_project() -> Path:
    """Folder that holds notebooks/: the current one or one above it, else lmcore's checkout."""
    here = Path.cwd()
    for folder in (here, *here.parents, Path(__file__).resolve().parents[2]):
        if (folder / "notebooks").is_dir() and (folder / "papermill_jobs" / "parameters").is_dir():
            return folder
    raise UserError("There is no notebooks/ folder here: run this in a checkout of the project.")


def find_notebooks(project: Path, names: Sequence[str] | None = None) -> list[Path]:
    """The numbered notebooks in order; `names` ("02" or "02_train") picks some. Raises `UserError` on another name."""
    found = sorted((project / "notebooks").glob("[0-9][0-9]_*.ipynb"))
    require(bool(found), f"There are no notebooks named like 01_build.ipynb in {project / 'notebooks'}.")
    for name in names or []:
        known = ", ".join(path.stem for path in found)
        there = name and any(path.stem.startswith(name) for path in found)
        require(bool(there), f"There is no notebook {name!r}; there are {known}.")
    return [path for path in found if not names or any(path.stem.startswith(name) for name in names)]


def resolve_parameters(
    project: Path, notebooks: Sequence[Path], scale: str, overrides: Mapping[str, Any], common: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Parameters of each notebook by its name: `common`, then those of the scale's file, then `overrides`.

    The file papermill_jobs/parameters/<scale>.yaml has a mapping `common`, for all notebooks, and one for each notebook
    by name. An override goes to each notebook that declares it. Raises `UserError` on a parameter that no notebook
    declares, and on one of another type than the notebook's default: papermill would only warn.
    """
    folder = project / "papermill_jobs" / "parameters"
    file = folder / f"{scale}.yaml"
    scales = ", ".join(sorted(path.stem for path in folder.glob("*.yaml")))
    known = Path(scale).name == scale and file.is_file()  # a scale is a folder's name in runs/, too
    require(known, f"There is no scale {scale!r} ({file} is missing); choose one of {scales}.")
    try:
        sections = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
    except (yaml.YAMLError, OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file} is not YAML ({str(error).splitlines()[0]}).") from error
    names = {path.stem for path in find_notebooks(project)}
    for section, values in sections.items() if isinstance(sections, dict) else [(None, None)]:
        require(section == "common" or section in names, f"{file}: section {section!r} names no notebook.")
        require(isinstance(values, dict | None), f"{file}: section {section!r} must be a mapping of parameters.")
    declared = {path.stem: declared_parameters(read_notebook(path), path.stem) for path in notebooks}
    for key in overrides:
        known = ", ".join(sorted({name for parameters in declared.values() for name in parameters}))
        require(any(key in p for p in declared.values()), f"No notebook has a parameter {key!r}; there are {known}.")
    resolved = {}
    for name, known in declared.items():
        chosen = {key: value for key, value in overrides.items() if key in known}
        resolved[name] = {**(sections.get("common") or {}), **common, **(sections.get(name) or {}), **chosen}
        check_parameters(name, known, resolved[name])
    return resolved


def parse_overrides(pairs: Sequence[str]) -> dict[str, Any]:
    """`name=value` pairs as a mapping; values are read as Python literals, else as YAML."""
    overrides = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        named = all(word.isidentifier() for word in name.split("."))  # dotted: a setting within a setting
        require(bool(equals) and named, f"A parameter is given as name=value, not {pair!r}.")
        try:
            overrides[name] = ast.literal_eval(text)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):  # {[]: 1} is a TypeError
            try:
                overrides[name] = yaml.safe_load(text)
            except yaml.YAMLError:
                raise UserError(
                    f"The value of {pair!r} is neither a Python literal nor YAML; mend or quote it."
                ) from None
    return overrides
