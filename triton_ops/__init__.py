"""Triton kernels, one file an op; imported only when a kernel is first needed. No op has one yet."""
