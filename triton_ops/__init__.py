"""Triton kernels, one file an op: what a GPU runs. Imported at the first call of an op on a GPU."""
