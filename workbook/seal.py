"""Hashes of what an execution made: the cells with their outputs, and the files of results and runs.

They stand in the executed notebook, under `SEAL` in its metadata, and show what was changed by hand afterwards.
"""

import hashlib
import json
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

from workbook.notebook import read_notebook, write_notebook

SEAL = "lmcore"
FOLDERS, SUFFIXES = ("results", "runs"), (".json", ".jsonl")


def cell_hashes(notebook: Any) -> list[str]:
    """SHA-256 of each cell's text and outputs."""
    cells = [[cell.cell_type, cell.source, cell.get("outputs", [])] for cell in notebook.cells]
    return [hashlib.sha256(json.dumps(cell, sort_keys=True, ensure_ascii=False).encode()).hexdigest() for cell in cells]


def notebooks_digest(notebooks: list[Any]) -> str:
    """SHA-256 of all cells of these notebooks: a PDF that was made from them holds it among its keywords."""
    hashes = "".join(found for notebook in notebooks for found in cell_hashes(notebook))
    return hashlib.sha256(hashes.encode()).hexdigest()


def seal(out: Path, name: str) -> None:
    """Puts into an executed notebook the hashes of its cells and of the files in `out` that no other one has sealed."""
    file = out / "notebooks" / f"{name}.ipynb"
    others = [path for path in (out / "notebooks").glob("*.ipynb") if path != file]
    known = {item for path in others for item in sealed_files(read_notebook(path)).items()}
    notebook = read_notebook(file)
    files = {path: found for path, found in file_hashes(out) if (path, found) not in known}
    notebook.metadata[SEAL] = {"cells": cell_hashes(notebook), "files": files}
    write_notebook(file, notebook)


def sealed_files(notebook: Any) -> dict[str, str]:
    """SHA-256 of the files that an executed notebook made, by their paths in its output folder."""
    sealed = notebook.metadata.get(SEAL)
    return sealed.get("files", {}) if isinstance(sealed, dict) else {}


def file_hashes(out: Path) -> Iterator[tuple[str, str]]:
    """Path in `out` and SHA-256 of each file of results and runs."""
    for folder in FOLDERS:
        for path in sorted((out / folder).rglob("*")):
            if path.suffix in SUFFIXES and path.is_file():
                yield path.relative_to(out).as_posix(), hashlib.sha256(path.read_bytes()).hexdigest()


def changed_by_hand(out: Path, names: list[str]) -> list[str]:
    """A sentence for each cell and file that is not what the execution of these notebooks left."""
    faults, known = [], {}
    for name in names:
        notebook = read_notebook(out / "notebooks" / f"{name}.ipynb")
        sealed = notebook.metadata.get(SEAL)
        if not isinstance(sealed, dict) or not {"cells", "files"} <= sealed.keys():
            faults.append(f"Notebook {name} has no hashes of its outputs: execute it with `workbook run`.")
            continue
        for path, found in sealed["files"].items():
            known.setdefault(path, {})[found] = name
        pairs = enumerate(zip_longest(cell_hashes(notebook), sealed["cells"]), 1)
        changed = [number for number, (here, executed) in pairs if here != executed]
        faults += [f"Notebook {name}: cell {number} is not what was executed; run it again." for number in changed[:1]]
    files = dict(file_hashes(out))
    for path, by in known.items():
        if files.get(path) not in by:
            is_not = "is not" if path in files else "is gone:"
            faults.append(f"{out / path} {is_not} what notebook {[*by.values()][-1]} made; run it again.")
    return faults
