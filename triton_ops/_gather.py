"""Which rows pre_project multiplies: a device function that its kernels share."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gathered_rows(
    token_ids, ids_stride0, ids_stride1, embed_weight, embed_stride, embed_scale, vocab_start, vocab, state,
    state_stride0, state_stride1, prev_rows, row_index, index_stride0, index_stride1, rows, row, row_mask, in_state
):
    """(pointers to the rows `row` [n], which of them exist, their scale): of the state, else of the embedding."""
    request, place = (row // rows).to(tl.int64), row % rows
    ids = tl.load(token_ids + request * ids_stride0 + place * ids_stride1, mask=row_mask, other=-1).to(tl.int64)
    # The difference can wrap around only where the first condition is false already.
    x_mask = (ids >= vocab_start) & (ids - vocab_start < vocab) & row_mask
    x_rows = embed_weight + tl.where(x_mask, ids - vocab_start, 0) * embed_stride
    scale = embed_scale
    if state is not None:
        source = place.to(tl.int64)
        if row_index is not None:
            pointers = row_index + request * index_stride0 + place * index_stride1
            source = tl.load(pointers, mask=row_mask, other=0).to(tl.int64)
            source = tl.minimum(tl.maximum(source, 0), prev_rows.to(tl.int64) - 1)
        x_rows = tl.where(in_state, state + request * state_stride0 + source * state_stride1, x_rows)
        x_mask = tl.where(in_state, row_mask, x_mask)
        scale = tl.where(in_state, 1.0, scale)  # 1 changes no bit
    return x_rows, x_mask, scale
