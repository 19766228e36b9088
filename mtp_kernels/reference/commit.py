"""Reference of commit."""

from __future__ import annotations

import torch
from torch import Tensor


def commit(
    accept_index: Tensor, num_accepted: Tensor, accept_ids: Tensor, target_hidden: Tensor, *,
    stop_ids: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The accepted ids and the bonus, cut after the first stop id; the last one kept seeds the next round."""
    ids, width = accept_ids.long(), accept_ids.size(1)  # [batch, width]
    place = torch.arange(width, device=ids.device)
    num_ids = num_accepted.long().clamp(0, width - 1) + 1  # [batch], with the bonus
    stops = torch.zeros_like(ids, dtype=torch.bool)
    if stop_ids is not None:
        stops = (ids.unsqueeze(-1) == stop_ids.long()).any(-1) & (ids >= 0)
        stops = stops & (place < num_ids.unsqueeze(1))
    finished = stops.any(1)  # [batch]
    num_output = torch.where(finished, stops.byte().argmax(1) + 1, num_ids)

    output_ids = torch.where(place < num_output.unsqueeze(1), ids, -1)
    last = num_output.unsqueeze(1) - 1
    row = accept_index.long().gather(1, last).squeeze(1).clamp(0, max(target_hidden.size(0) - 1, 0))
    return output_ids, num_output, finished, ids.gather(1, last).squeeze(1), target_hidden.index_select(0, row)
