"""`mtp-kernels bench`: every op, step and round beside its floor and what others run today, checked before timed."""

from .arguments import add_arguments
from .command import BenchError, run

__all__ = ["BenchError", "add_arguments", "run"]
