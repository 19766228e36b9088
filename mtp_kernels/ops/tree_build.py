"""tree_build: the best candidates of all steps as a draft tree."""

from __future__ import annotations

import torch
from torch import Tensor

from ..reference.tree_build import tree_build as reference
from ._checks import (
    check_device,
    check_dtype,
    check_index,
    check_last_contiguous,
    check_range,
    check_rank,
    check_shape,
    show_shape,
)
from ._contents import check_contents
from ._registry import Spec, cpp_kernel, register, triton_kernel

NAME = "tree_build"
MAX_CANDIDATES, MAX_NODES = 4096, 1024  # a request, of the Triton kernel, whose program holds all of them at once
SCHEMA = """tree_build(Tensor root_ids, Tensor cand_scores, Tensor cand_ids, Tensor cand_parent, Tensor root_positions,
    SymInt num_draft_tokens) -> (Tensor draft_ids, Tensor draft_positions, Tensor parents, Tensor selected,
    Tensor tree_mask, Tensor retrieve_index, Tensor retrieve_next_token, Tensor retrieve_next_sibling)"""


def tree_build(
    root_ids: Tensor, cand_scores: Tensor, cand_ids: Tensor, cand_parent: Tensor, root_positions: Tensor,
    num_draft_tokens: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Keep the num_draft_tokens - 1 best candidates and link them into a tree behind its root, node 0.

    The best have the highest scores; NaN counts as -inf, -0.0 equals 0.0, and the lowest index wins a tie. They become
    nodes 1 to N - 1 in the order of their indices. Where scores are sums of logprobs <= 0, the ancestors of a kept
    candidate are kept too: their scores are no lower and their indices are.

    A candidate whose parent is below -1, not before it, or not kept keeps its place, with parent -1, depth 0 and
    itself as its whole mask, and no link leads to it. What hangs under it is linked to it as usual: depth 1 below it,
    both in the mask; from the root none of it can be reached.

    Args:
        root_ids: [batch] int32 or int64, the bonus token of each request.
        cand_scores: [batch, num_candidates] fp32, those of every `tree_expand` step, concatenated.
        cand_ids: [batch, num_candidates] int32 or int64, the tokens (`token_ids.flatten(1)` of every step).
        cand_parent: [batch, num_candidates] int32 or int64, the candidate that each grew from, -1 for the root.
        root_positions: [batch] int32 or int64, the target's position of the root: the committed length.
        num_draft_tokens: N, nodes with the root, 1 to num_candidates + 1.

    Returns:
        draft_ids [batch, N] int64, the root's token first; draft_positions [batch, N] int64, root_positions + depth;
        parents [batch, N] int64, node, -1 for the root; selected [batch, N - 1] int64, the candidate that each node
        after the root is; tree_mask [batch, N, N] bool, [b, i, j] where j is i or an ancestor of i; retrieve_index
        [batch, N] int64, b * N + node; retrieve_next_token [batch, N] int64, the first (lowest) child;
        retrieve_next_sibling [batch, N] int64, the next child of the same parent; -1 for none.

    Raises:
        ArgumentError: a wrong rank, size, dtype, stride or device, or more nodes than there are candidates.

    >>> root_ids, root_positions = torch.tensor([5]), torch.tensor([10])
    >>> cand_scores = torch.tensor([[-0.1, -2.0, -0.3, -4.0, -2.5, -2.1]])  # two steps of topk 2
    >>> cand_ids, cand_parent = torch.tensor([[7, 8, 1, 2, 3, 4]]), torch.tensor([[-1, -1, 0, 0, 1, 1]])
    >>> draft_ids, draft_positions, parents, selected, tree_mask, _, next_token, next_sibling = tree_build(
    ...     root_ids, cand_scores, cand_ids, cand_parent, root_positions, 5)
    >>> draft_ids.tolist(), draft_positions.tolist(), parents.tolist(), selected.tolist()
    ([[5, 7, 8, 1, 4]], [[10, 11, 11, 12, 12]], [[-1, 0, 0, 1, 2]], [[0, 1, 2, 5]])
    >>> next_token.tolist(), next_sibling.tolist()
    ([[1, 3, 4, -1, -1]], [[-1, 2, -1, -1, -1]])
    >>> tree_mask[0, 4].tolist()
    [True, False, True, False, True]
    """
    return torch.ops.mtp.tree_build(root_ids, cand_scores, cand_ids, cand_parent, root_positions, num_draft_tokens)


def check(
    root_ids: Tensor, cand_scores: Tensor, cand_ids: Tensor, cand_parent: Tensor, root_positions: Tensor,
    num_draft_tokens: int
) -> None:
    check_rank(NAME, "root_ids", root_ids, 1)
    check_index(NAME, "root_ids", root_ids)
    batch = root_ids.size(0)
    check_shape(NAME, "cand_scores", cand_scores, (batch, None), f"batch of root_ids is {batch}")
    check_dtype(NAME, "cand_scores", cand_scores, (torch.float32,))
    candidates = cand_scores.size(1)
    for name, tensor in (("cand_ids", cand_ids), ("cand_parent", cand_parent)):
        check_shape(NAME, name, tensor, (batch, candidates), f"cand_scores is {show_shape(cand_scores.shape)}")
        check_index(NAME, name, tensor)
    check_shape(NAME, "root_positions", root_positions, (batch,), f"batch of root_ids is {batch}")
    check_index(NAME, "root_positions", root_positions)
    check_range(NAME, "num_draft_tokens", num_draft_tokens, 1, candidates + 1, f"the root and {candidates} candidates")
    others = {
        "cand_scores": cand_scores,
        "cand_ids": cand_ids,
        "cand_parent": cand_parent,
        "root_positions": root_positions,
    }
    check_last_contiguous(NAME, root_ids=root_ids, **others)
    check_device(NAME, root_ids.device, "root_ids", **others)


def outputs(
    root_ids: Tensor, cand_scores: Tensor, cand_ids: Tensor, cand_parent: Tensor, root_positions: Tensor,
    num_draft_tokens: int
) -> tuple[Spec, ...]:
    batch, num_nodes = root_ids.size(0), num_draft_tokens
    nodes = ((batch, num_nodes), torch.int64)
    selected, mask = ((batch, num_nodes - 1), torch.int64), ((batch, num_nodes, num_nodes), torch.bool)
    return nodes, nodes, nodes, selected, mask, nodes, nodes, nodes


def contents(
    root_ids: Tensor, cand_scores: Tensor, cand_ids: Tensor, cand_parent: Tensor, root_positions: Tensor,
    num_draft_tokens: int
) -> None:
    for name, ids in (("root_ids", root_ids), ("cand_ids", cand_ids)):
        check_contents(NAME, name, ids, ids < 0, "a token id of at least 0")
    check_contents(NAME, "cand_scores", cand_scores, ~(cand_scores <= 0), "at most 0")
    own = torch.arange(cand_parent.size(1), device=cand_parent.device)
    bad = (cand_parent < -1) | (cand_parent >= own)
    check_contents(NAME, "cand_parent", cand_parent, bad, "-1 or an earlier candidate")
    check_contents(NAME, "root_positions", root_positions, root_positions < 0, "at least 0")


def serves(
    root_ids: Tensor, cand_scores: Tensor, cand_ids: Tensor, cand_parent: Tensor, root_positions: Tensor,
    num_draft_tokens: int
) -> str:
    """Why the Triton kernel does not take these arguments; "" if it does."""
    candidates = cand_scores.size(1)
    if candidates > MAX_CANDIDATES:
        return f"{candidates} candidates a request: at most {MAX_CANDIDATES}"
    return "" if num_draft_tokens <= MAX_NODES else f"num_draft_tokens is {num_draft_tokens}: at most {MAX_NODES}"


register(
    SCHEMA, check=check, outputs=outputs, reference=reference, contents=contents,
    kernels=(triton_kernel(NAME, serves), cpp_kernel(NAME)),
)
