"""`mtp-kernels bench`: every op, step and round beside its floor and what others run today, checked before timed."""

from .command import BenchError, add_arguments, run

__all__ = ["BenchError", "add_arguments", "run"]
