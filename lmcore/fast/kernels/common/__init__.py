"""What several operations share: which kernels run where, and helpers for kernels. `gpu` and `hopper` need Triton."""
