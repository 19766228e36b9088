"""Counter-based random numbers, Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).

The same (counter, key) gives the same word on every device and in every language: nothing is stored between draws.
Words are held in int64, and no product passes 2^63, so plain tensor arithmetic is exact.
"""

from __future__ import annotations

import torch
from torch import Tensor

MASK = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)  # constants of the paper, as are the key's increments
INCREMENTS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
BELOW_ONE = 1.0 - 2.0**-24  # the largest fp32 below 1

Word = Tensor | int


def gumbel_noise(seed: Tensor, offset: Tensor, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Standard Gumbel noise of each (seed, offset, id), broadcast; always finite, and a function of these three alone.

    With `uint32(x)` the low and `hi(x)` the high 32 bits of an int64:

        key     = (uint32(seed), hi(seed))
        counter = (uint32(id), hi(id), uint32(offset), hi(offset))
        word    = philox(counter, key)[0]
        u       = min((fp32(word) + 0.5) * 2^-32, 1 - 2^-24)      in fp32, conversion rounded to nearest even
        noise   = -log(-log1p(-u))                                 in `dtype`, normally fp32

    u is uniform in (0, 1). The draw is decided by the large noises, and they come from small u, where fp32 is fine
    (steps of 2^-32); -log(-log(u)) would take them from u near 1, where its steps are 2^-24 and 262144 tokens would
    often tie.
    """
    word = philox((*_halves(ids), *_halves(offset)), _halves(seed))[0]
    assert isinstance(word, Tensor)
    u = ((word.to(torch.float32) + 0.5) * 2.0**-32).clamp(max=BELOW_ONE)
    return -torch.log(-torch.log1p(-u.to(dtype)))


def philox(counter: tuple[Word, Word, Word, Word], key: tuple[Word, Word]) -> tuple[Word, Word, Word, Word]:
    """The four 32-bit words of Philox-4x32-10 for a counter of four words and a key of two."""
    a, b, c, d = counter
    first, second = key
    for _ in range(ROUNDS):
        high_a, low_a = _multiply(a, MULTIPLIERS[0])
        high_c, low_c = _multiply(c, MULTIPLIERS[1])
        a, b, c, d = high_c ^ b ^ first, low_c, high_a ^ d ^ second, low_a
        first, second = (first + INCREMENTS[0]) & MASK, (second + INCREMENTS[1]) & MASK
    return a, b, c, d


def _multiply(x: Word, by: int) -> tuple[Word, Word]:
    """High and low 32 bits of x * by, in halves of `by` so that int64 never overflows."""
    upper, lower = x * (by >> 16), x * (by & 0xFFFF)  # both below 2^48
    return (upper + (lower >> 16)) >> 16, (((upper & 0xFFFF) << 16) + lower) & MASK


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.to(torch.int64)
    return x & MASK, (x >> 32) & MASK
