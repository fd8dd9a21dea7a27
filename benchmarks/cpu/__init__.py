"""Parts of `benchmarks/cpu.py`: taking turns, the loader, training."""
