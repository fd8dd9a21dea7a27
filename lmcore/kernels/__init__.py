"""Kernels of our own. Each module here is the plain-PyTorch definition of one and the choice between the two;
`lmcore.kernels.gpu` holds the Triton code, which is imported only where it can run."""
