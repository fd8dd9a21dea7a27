"""Our kernels, a package for each operation.

The package itself holds the implementation in plain PyTorch, which explains the kernel and runs where there is no
Triton (attention's is in `reference`); `gpu` holds the Triton kernels and `hopper` those for Hopper alone, both
imported only where they can run. `dispatch` says where that is.
"""
