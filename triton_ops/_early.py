"""Programmatic dependent launch (sm_90 and later): a kernel starts while the one in front of it still runs.

Such a kernel may read nothing that another kernel wrote, and write nothing at all, before wait_for_others: until then
it reads weights, which no kernel of a round writes. Only a round's private kernels start early; a public op may
follow whatever its caller launched, a kernel that writes the weights included.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def let_others_start(EARLY: tl.constexpr):
    """The next kernel may start as soon as every program of this one has come here, or ended."""
    if EARLY:
        gdc_launch_dependents()


@triton.jit
def wait_for_others(EARLY: tl.constexpr):
    """Returns when the kernels in front have ended and what they wrote can be read."""
    if EARLY:
        gdc_wait()
