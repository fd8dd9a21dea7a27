"""Tables, figures and sentences of notebook 07, and of the reference speed measurements (`benchmarks/speed.py`)."""
