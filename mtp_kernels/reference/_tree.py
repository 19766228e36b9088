"""What the tree ops share: children from links, rows by retrieve_index, the path that a verification accepted."""

from __future__ import annotations

import torch
from torch import Tensor


def in_range(index: Tensor, size: int) -> Tensor:
    """0 <= index < size."""
    return (index >= 0) & (index < size)


def list_children(next_token: Tensor, next_sibling: Tensor) -> Tensor:
    """The children of every node in sibling order, -1 behind them: [batch, N] links -> [batch, N, N].

    A link outside 1..N - 1 ends the list (node 0 is the root, nobody's child). N links are followed at most, so that
    cyclic ones end too.
    """
    num_nodes = next_token.size(1)
    child, sibling = next_token.long(), next_sibling.long()  # [batch, N]
    children = []
    for _ in range(num_nodes):
        there = in_range(child - 1, num_nodes - 1)
        child = torch.where(there, child, -1)
        children.append(child)
        child = torch.where(there, sibling.gather(1, child.clamp(min=0)), -1)
    return torch.stack(children, dim=-1)


def at(values: Tensor, node: Tensor) -> Tensor:
    """values[b, node[b]]: [batch, N, ...] -> [batch, ...]."""
    return values[torch.arange(node.size(0), device=node.device), node]


def take_rows(values: Tensor, rows: Tensor, trailing: int) -> Tensor:
    """The flat `rows` of values [T, ...], or of [batch, N, ...] read flat, with `trailing` dimensions a row.

    Rows out of range are clamped, so nothing outside is read; nothing but the rows is copied.
    """
    if values.dim() == trailing + 1:
        return values[rows.clamp(0, max(values.size(0) - 1, 0))]
    batch, num_nodes = values.shape[:2]
    rows = rows.clamp(0, max(batch * num_nodes - 1, 0))
    return values[rows // num_nodes, rows % num_nodes]


def accepted_path(
    nodes: list[Tensor], taken: list[Tensor], bonus: Tensor, draft_ids: Tensor, rows: Tensor, max_depth: int
) -> tuple[Tensor, Tensor, Tensor]:
    """accept_index, num_accepted, accept_ids of a walk.

    nodes[i] [batch] is the node that step i accepted where taken[i] [batch] is true; once false, it stays false.
    """
    batch = draft_ids.size(0)
    root = torch.zeros(batch, 1, dtype=torch.int64, device=draft_ids.device)
    path = torch.stack([root[:, 0], *nodes], dim=1)  # [batch, 1 + steps]
    on_path = torch.stack([root[:, 0] == 0, *taken], dim=1)
    padding = (0, max_depth + 1 - path.size(1))
    path = torch.nn.functional.pad(path, padding)  # [batch, max_depth + 1]
    on_path = torch.nn.functional.pad(on_path, padding)

    num_accepted = on_path.sum(1) - 1
    accept_index = torch.where(on_path, rows.gather(1, path), -1)
    tokens = torch.where(on_path, draft_ids.gather(1, path), -1)
    accept_ids = torch.cat([tokens[:, 1:], root - 1], dim=1)  # the root is no draft token
    accept_ids = accept_ids.scatter(1, num_accepted.unsqueeze(1), bonus.unsqueeze(1))
    return accept_index, num_accepted, accept_ids
