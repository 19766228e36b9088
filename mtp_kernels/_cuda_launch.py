"""A launch of the CUDA library as data, as triton_ops/_launch.py has those of Triton."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from . import _native


@dataclass(frozen=True)
class CudaLaunch:
    """A launch of mtp_cuda::<op>, by its arguments' names."""

    op: str
    args: dict[str, Any]

    def run(self) -> None:
        _native.cuda_op(self.op)(**self.args)

    def with_early(self, early: bool) -> CudaLaunch:
        """This launch in a round, starting before those in front of it have ended or not."""
        return replace(self, args={**self.args, "early": early})
