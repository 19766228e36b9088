"""Memory asked into L2 ahead of its use (sm_90 and later): weights and keys, which no kernel of a round writes.

What a program that still waits (_early.py) has asked for is there when it loads it. Nothing is computed, so no bit
depends on it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


def can_prefetch(*tensors: Tensor) -> bool:
    """Whether the rows of these lie as the instruction needs them: at multiples of 16 bytes."""
    return all(
        t.data_ptr() % 16 == 0 and all(n * t.element_size() % 16 == 0 for n in (*t.stride()[:-1], t.size(-1)))
        for t in tensors
    )


@triton.jit
def prefetch(addresses, wanted, BYTES: tl.constexpr):
    """BYTES, a multiple of 16, at each of `addresses` (int64, multiples of 16) that is `wanted`, which is broadcast."""
    wanted = tl.broadcast_to(wanted, addresses.shape)
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], $3; mov.b32 $0, 0; }",
        "=r,l,r,r", [addresses, wanted.to(tl.int32), tl.full(addresses.shape, BYTES, tl.int32)], dtype=tl.int32,
        is_pure=False, pack=1,
    )
