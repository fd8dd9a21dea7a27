"""Fails where a part of the project has more lines than its budget in pyproject.toml: `make lint` runs it.

Counted are the lines of .py files, of shell scripts, and of the code cells of notebooks.
"""

import json
import sys
import tomllib
from pathlib import Path

PROJECT = Path(__file__).parents[1]


def count_lines(path: Path) -> int:
    """Lines of a file, or of all files below a folder."""
    if path.is_dir():
        return sum(count_lines(file) for file in sorted(path.rglob("*")) if file.suffix in (".py", ".sh", ".ipynb"))
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    return len(text.splitlines())


def main() -> int:
    """Prints each part with its lines and its budget; 1 if one has too many."""
    budgets = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["lmcore"]["budgets"]
    lines = {part: sum(count_lines(PROJECT / path) for path in part.split()) for part in budgets}
    for part, budget in budgets.items():
        print(f"{lines[part]:7,} of {budget:6,}  {part}{'' if lines[part] <= budget else ': too many lines'}")
    return int(any(lines[part] > budget for part, budget in budgets.items()))


if __name__ == "__main__":
    sys.exit(main())
