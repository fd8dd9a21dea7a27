"""What a model costs, measured: time, kernels and memory, each benchmark case in a process of its own."""

import os

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # torch.profiler would list its probes on the terminal
