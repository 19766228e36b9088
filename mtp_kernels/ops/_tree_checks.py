"""Checks that both verify ops share: the draft's ids and links, and the target's rows."""

from __future__ import annotations

import torch
from torch import Tensor

from ._checks import (
    check_device,
    check_index,
    check_last_contiguous,
    check_range,
    check_rank,
    check_shape,
    fail,
    require,
    show_shape,
)
from ._contents import check_contents, check_contents_range


def check_draft(
    op: str, draft_ids: Tensor, retrieve_index: Tensor, retrieve_next_token: Tensor, retrieve_next_sibling: Tensor,
    max_depth: int
) -> None:
    check_rank(op, "draft_ids", draft_ids, 2)
    check_index(op, "draft_ids", draft_ids)
    batch, num_nodes = draft_ids.shape
    require(num_nodes >= 1, op, "draft_ids", "at least 1 node", num_nodes, "node 0 is the root")
    links = {
        "retrieve_index": retrieve_index,
        "retrieve_next_token": retrieve_next_token,
        "retrieve_next_sibling": retrieve_next_sibling,
    }
    for name, tensor in links.items():
        check_shape(op, name, tensor, (batch, num_nodes), f"draft_ids is {show_shape(draft_ids.shape)}")
        check_index(op, name, tensor)
    check_last_contiguous(op, draft_ids=draft_ids, **links)
    check_device(op, draft_ids.device, "draft_ids", **links)
    check_range(op, "max_depth", max_depth, 0)


def check_target_rows(op: str, name: str, tensor: Tensor, draft_ids: Tensor, trailing: int) -> None:
    """`tensor` is [T, ...] with T >= batch * N, or [batch, N, ...], with `trailing` dimensions a row."""
    check_rank(op, name, tensor, trailing + 1, trailing + 2)
    batch, num_nodes = draft_ids.shape
    why = f"draft_ids is {show_shape(draft_ids.shape)}"
    if tensor.dim() == trailing + 2:
        check_shape(op, name, tensor, (batch, num_nodes, *[None] * trailing), why)
    elif tensor.size(0) < batch * num_nodes:
        fail(op, name, f"at least {batch * num_nodes} rows", tensor.size(0), why)


def check_draft_contents(
    op: str, draft_ids: Tensor, retrieve_index: Tensor, retrieve_next_token: Tensor, retrieve_next_sibling: Tensor,
    num_rows: int
) -> None:
    """Ids are tokens, rows are there, and every link is -1 or leads to another node, not the root."""
    check_contents(op, "draft_ids", draft_ids, draft_ids < 0, "a token id of at least 0")
    check_contents_range(op, "retrieve_index", retrieve_index, 0, num_rows - 1, f"the target has {num_rows} rows")
    last = draft_ids.size(1) - 1
    own = torch.arange(last + 1, device=draft_ids.device)
    links = {"retrieve_next_token": retrieve_next_token, "retrieve_next_sibling": retrieve_next_sibling}
    for name, link in links.items():
        bad = (link < -1) | (link == 0) | (link > last) | (link == own)
        check_contents(op, name, link, bad, f"-1 or another node, 1 to {last}")
