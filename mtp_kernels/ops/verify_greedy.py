"""verify_greedy: how far the target agrees with a draft."""

from __future__ import annotations

import torch
from torch import Tensor

from ..reference.verify_greedy import verify_greedy as reference
from ._checks import check_device, check_index, check_last_contiguous
from ._registry import Spec, cpp_kernel, register, triton_kernel
from ._tree_checks import check_draft, check_draft_contents, check_target_rows

NAME = "verify_greedy"
SCHEMA = """verify_greedy(Tensor draft_ids, Tensor retrieve_index, Tensor retrieve_next_token,
    Tensor retrieve_next_sibling, Tensor target_ids, SymInt max_depth) -> (Tensor accept_index,
    Tensor num_accepted, Tensor accept_ids)"""


def verify_greedy(
    draft_ids: Tensor, retrieve_index: Tensor, retrieve_next_token: Tensor, retrieve_next_sibling: Tensor,
    target_ids: Tensor, max_depth: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Walk from the root to the first child whose token is the target's, as long as there is one.

    The target's token at a node is target_ids[retrieve_index[node]], read flat. Children are tried in the order of
    their links, first child and then next siblings; a link outside 1..N - 1 counts as none (node 0 is the root,
    nobody's child). At most N children of a node are tried and at most min(max_depth, N - 1) nodes accepted, so links
    that form a ring end too.

    Nothing is read outside target_ids: a child whose retrieve_index is out of range is passed over, and a root with
    such a one accepts nothing and has the bonus -1.

    Args:
        draft_ids: [batch, N] int32 or int64, N >= 1; node 0 is the root, whose token does not matter.
        retrieve_index: [batch, N] int32 or int64, the row of the target's result that each node has.
        retrieve_next_token: [batch, N] int32 or int64, first child, -1 for none.
        retrieve_next_sibling: [batch, N] int32 or int64, next child of the same parent, -1 for none.
        target_ids: [T] with T >= batch * N, or [batch, N], int32 or int64: the target's choice at each row.
        max_depth: the most draft tokens to accept, at least 0.

    Returns:
        accept_index [batch, max_depth + 1] int64, the retrieve_index of the root and of the accepted nodes, -1 behind
        them; num_accepted [batch] int64, accepted draft tokens, the root not counted; accept_ids
        [batch, max_depth + 1] int64, their tokens, then the target's at the last node (the bonus), -1 behind it.

    Raises:
        ArgumentError: a wrong rank, size, dtype, stride or device.

    >>> draft_ids = torch.tensor([[5, 7, 8, 1, 4]])  # 5 -> (7 -> 1), (8 -> 4)
    >>> rows, next_token = torch.arange(5).view(1, 5), torch.tensor([[1, 3, 4, -1, -1]])
    >>> next_sibling = torch.tensor([[-1, 2, -1, -1, -1]])
    >>> target_ids = torch.tensor([8, 0, 4, 0, 9])  # after 5 comes 8, after 8 comes 4, after 4 comes 9
    >>> verify_greedy(draft_ids, rows, next_token, next_sibling, target_ids, 3)
    (tensor([[ 0,  2,  4, -1]]), tensor([2]), tensor([[ 8,  4,  9, -1]]))
    """
    return torch.ops.mtp.verify_greedy(
        draft_ids, retrieve_index, retrieve_next_token, retrieve_next_sibling, target_ids, max_depth
    )


def check(
    draft_ids: Tensor, retrieve_index: Tensor, retrieve_next_token: Tensor, retrieve_next_sibling: Tensor,
    target_ids: Tensor, max_depth: int
) -> None:
    check_draft(NAME, draft_ids, retrieve_index, retrieve_next_token, retrieve_next_sibling, max_depth)
    check_target_rows(NAME, "target_ids", target_ids, draft_ids, 0)
    check_index(NAME, "target_ids", target_ids)
    check_last_contiguous(NAME, target_ids=target_ids)
    check_device(NAME, draft_ids.device, "draft_ids", target_ids=target_ids)


def outputs(
    draft_ids: Tensor, retrieve_index: Tensor, retrieve_next_token: Tensor, retrieve_next_sibling: Tensor,
    target_ids: Tensor, max_depth: int
) -> tuple[Spec, ...]:
    batch = draft_ids.size(0)
    path = ((batch, max_depth + 1), torch.int64)
    return path, ((batch,), torch.int64), path


def contents(
    draft_ids: Tensor, retrieve_index: Tensor, retrieve_next_token: Tensor, retrieve_next_sibling: Tensor,
    target_ids: Tensor, max_depth: int
) -> None:
    check_draft_contents(
        NAME, draft_ids, retrieve_index, retrieve_next_token, retrieve_next_sibling, target_ids.numel()
    )


register(
    SCHEMA, check=check, outputs=outputs, reference=reference, contents=contents,
    kernels=(triton_kernel(NAME), cpp_kernel(NAME)),
)
