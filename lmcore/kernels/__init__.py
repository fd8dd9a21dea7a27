"""Kernels of our own. Each package here is the plain-PyTorch definition of one and the choice between the two;
its modules `gpu` and `hopper` hold the Triton code, which is imported only where it can run."""
