"""Our kernels held against the definitions: bytes that move, memory, time and agreement (tasks of notebook 07)."""
