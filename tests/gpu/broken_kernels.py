"""Kernels that do what compute-sanitizer must report; `sanitize.py` runs them to see that it does.

    python tests/gpu/broken_kernels.py store_one_too_many|copy_what_was_never_written
"""

from __future__ import annotations

import sys

import torch
import triton
import triton.language as tl

SIZE = 100  # elements: 400 bytes, so that no allocation begins right behind them


@triton.jit
def store_one_too_many(out_ptr, size, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    tl.store(out_ptr + place, place.to(tl.float32), mask=place <= size)


@triton.jit
def copy_what_was_never_written(out_ptr, in_ptr, size, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    tl.store(out_ptr + place, tl.load(in_ptr + place, mask=place < size), mask=place < size)


def main(what: str, device: str = "cuda") -> None:
    out = torch.zeros(SIZE, device=device)
    if what == store_one_too_many.__name__:
        store_one_too_many[(1,)](out, SIZE, BLOCK=128)
    else:
        copy_what_was_never_written[(1,)](out, torch.empty(SIZE, device=device), SIZE, BLOCK=128)
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main(sys.argv[1])
