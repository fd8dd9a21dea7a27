"""`python -m workbook.exercises`: copies the solutions of the notebooks, after one was changed."""

from pathlib import Path

from lmcore.files import write_json
from workbook.exercises.solutions import FILE, solutions

write_json(FILE, solutions(Path(__file__).parents[2] / "notebooks"))
