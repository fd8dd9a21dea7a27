"""What a model costs, measured: time, kernels and memory, each cell in a process of its own."""
