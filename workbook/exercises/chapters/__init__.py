"""The exercises, in the order of the notebooks."""

from workbook.exercises.chapters import build, generate, measure, scale, train

__all__ = ["build", "generate", "measure", "scale", "train"]
