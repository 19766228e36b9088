"""The microbenchmark's package; `mtp-kernels bench` will live here."""
