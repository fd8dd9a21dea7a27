"""Cells of `benchmarks/speed.py`: what is measured, against whom, and how well it has to do."""
