"""Our kernels, a package for each operation.

`reference` is the implementation in plain PyTorch, which explains the kernel and runs where there is no Triton; `gpu`
holds the Triton kernels and `hopper` those for Hopper alone, both imported only where they can run; the package itself
chooses between them. `common` holds what several operations share.
"""
