"""Exercises of the notebooks: `check` compares a reader's function with the library's and names the mistake."""

from workbook.exercises.checking import check, predict, reveal, status

__all__ = ["check", "predict", "reveal", "status"]
