"""The training step and decoding with fused kernels: the same mathematics as the plain model, written out by hand."""
