"""Triton and Gluon code of `lmcore.kernels`. Importing a module of this folder needs Triton."""
