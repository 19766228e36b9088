"""Checks of `suppress_ids`, the tokens that a head must not choose."""

from __future__ import annotations

from torch import Tensor

from ._checks import check_index, check_last_contiguous, check_rank
from ._contents import check_contents, check_contents_range

MOST_IN_KERNELS = 1024  # each candidate is compared with each of them


def check_suppress_ids(op: str, suppress_ids: Tensor | None) -> None:
    if suppress_ids is not None:
        check_rank(op, "suppress_ids", suppress_ids, 1)
        check_index(op, "suppress_ids", suppress_ids)
        check_last_contiguous(op, suppress_ids=suppress_ids)


def check_suppress_contents(op: str, suppress_ids: Tensor | None, vocab: int | None = None) -> None:
    """Token ids, or -1 for none; of a shard of a head, whose vocabulary is not known, any."""
    if suppress_ids is None:
        return
    if vocab is None:
        check_contents(op, "suppress_ids", suppress_ids, suppress_ids < -1, "a token id, or -1 for none")
    else:
        check_contents_range(op, "suppress_ids", suppress_ids, -1, vocab - 1, "-1 is none")


def too_many_suppressed(suppress_ids: Tensor | None) -> str:
    """Why kernels that compare each candidate with the list do not serve it, or ""."""
    if suppress_ids is not None and suppress_ids.size(0) > MOST_IN_KERNELS:
        return f"{suppress_ids.size(0)} suppress_ids, more than {MOST_IN_KERNELS}"
    return ""
