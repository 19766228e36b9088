"""A kernel launch as data: made by a pure function of the op's arguments, run on a GPU, compiled anywhere by tests."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch


@dataclass(frozen=True)
class Launch:
    """One launch of a Triton kernel. Tensors in `args` may be on the meta device where only compilation is asked for.

    An op's file has `plan(...)`, which takes the op's arguments and returns its launches with the results that they
    write; the launcher runs them in order.
    """

    kernel: Any  # triton.JITFunction
    grid: tuple[int, ...]
    args: dict[str, Any]  # by parameter name: tensors, ints and floats that differ from call to call
    constants: dict[str, Any] = field(default_factory=dict)  # tl.constexpr parameters
    num_warps: int = 4
    num_stages: int = 1
    early: bool = False  # may start before the kernel in front of it has ended: it calls wait_for_others itself
    in_round: bool = False  # a kernel of a round's, which shares SMs with those in front of it and behind it
    registers: int = 0  # of a thread at most; 0: as many as the compiler likes

    def run(self) -> None:
        """Launch, unless the grid is empty."""
        if all(self.grid):
            options: dict[str, Any] = {"launch_pdl": True} if self.early else {}
            options |= {"maxnreg": self.registers} if self.registers else {}
            compiled = self.kernel[self.grid](
                **self.args, **self.constants, num_warps=self.num_warps, num_stages=self.num_stages, **options
            )
            if self.early and self.in_round:
                _share_memory(compiled)

    def with_early(self, early: bool) -> Launch:
        """This launch in a round, of a kernel that has the constant EARLY, starting early or not."""
        return replace(self, constants={**self.constants, "EARLY": early}, early=early, in_round=True)


CARVEOUT = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT


def _share_memory(compiled: Any) -> None:
    """Asks for SMs whose memory is all shared memory, from the next launch of this kernel on.

    An SM divides its memory into shared memory and cache anew only when it is empty, so a kernel that starts early
    finds no room beside one that left most to the cache. A wish, which no result depends on: it may go unheard.
    Microseconds of a 31B step on an H200, batch 1 and 1024 keys, without and with: 309.3 and 306.9.
    """
    handle = getattr(compiled, "function", None)
    if handle is not None and not getattr(compiled, "mtp_shares_memory", False):
        compiled.mtp_shares_memory = True
        if (driver := _driver()) is not None:
            driver.cuFuncSetAttribute(ctypes.c_void_p(handle), CARVEOUT, 100)


@lru_cache(maxsize=1)
def _driver() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


@lru_cache(maxsize=32)
def capability(device: torch.device) -> int:
    """Compute capability * 10; on no GPU, as in the interpreter, 0."""
    major, minor = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    return 10 * major + minor


@lru_cache(maxsize=32)
def count_sms(device: torch.device) -> int:
    """Of a GPU; on no GPU those of an H200."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132
