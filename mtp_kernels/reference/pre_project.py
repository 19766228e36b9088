"""Reference of pre_project."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ._math import accumulate, linear


def pre_project(
    token_ids: Tensor,
    embed_weight: Tensor,
    embed_scale: float,
    state: Tensor | None,
    weight: Tensor,
    *,
    row_index: Tensor | None = None,
    vocab_start: int = 0,
) -> Tensor:
    """concat(round(embed_weight[id - vocab_start] * embed_scale), state[row]) @ weight.T, rounded once at the end."""
    x, _ = embed(token_ids, embed_weight, embed_scale, vocab_start)  # [batch, rows, backbone]
    if state is None:
        return linear(x, weight[:, : x.size(-1)]).to(weight.dtype)
    if row_index is not None:
        row = row_index.long().clamp(0, state.size(1) - 1)
        state = torch.take_along_dim(state, row.unsqueeze(-1), dim=1)  # [batch, rows, backbone]
    return linear(torch.cat((x, state), dim=-1), weight).to(weight.dtype)  # [batch, rows, hidden]


def embed(token_ids: Tensor, embed_weight: Tensor, embed_scale: float, vocab_start: int) -> tuple[Tensor, Tensor]:
    """The scaled embedding rows, rounded once to the table's dtype, and which ids this shard of the table holds.

    A row that the shard does not hold is zero. Only the wanted rows are read and widened, never the table. A table in
    fp64 is not rounded: an oracle passes a table that already holds the rounded products, and the scale 1.
    """
    ids = token_ids.long()
    # The difference is looked at only where id >= vocab_start >= 0, so it cannot wrap around, however small an id is.
    present = (ids >= vocab_start) & (ids - vocab_start < embed_weight.size(0))
    if embed_weight.size(0) == 0:
        return embed_weight.new_zeros((*ids.shape, embed_weight.size(1))), present
    rows = F.embedding(torch.where(present, ids - vocab_start, 0), embed_weight)  # [batch, rows, backbone]
    rows = (accumulate(rows) * embed_scale).to(embed_weight.dtype)
    return rows.masked_fill(~present.unsqueeze(-1), 0), present
