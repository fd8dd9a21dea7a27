"""Our kernels against the reference implementations: bytes moved, memory, time and parity."""
