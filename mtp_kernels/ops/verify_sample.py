"""verify_sample: accept a draft so that the output has the target's distribution."""

from __future__ import annotations

import torch
from torch import Tensor

from ..reference.verify_sample import verify_sample as reference
from ._checks import check_device, check_dtype, check_float, check_last_contiguous, check_shape, require, show_shape
from ._contents import check_contents
from ._registry import Spec, cpp_kernel, register, triton_kernel
from ._tree_checks import check_draft, check_draft_contents, check_target_rows

NAME = "verify_sample"
MAX_NODES = 1024  # draft tokens a request, of the Triton kernel, whose programs hold the tokens of all of them
MAX_VOCAB = 2**26  # its chunks are the second dimension of a grid
SCHEMA = """verify_sample(Tensor draft_ids, Tensor retrieve_index, Tensor retrieve_next_token,
    Tensor retrieve_next_sibling, Tensor target_probs, Tensor uniform, Tensor uniform_final, SymInt max_depth, *,
    Tensor? draft_probs=None) -> (Tensor accept_index, Tensor num_accepted, Tensor accept_ids)"""


def verify_sample(
    draft_ids: Tensor, retrieve_index: Tensor, retrieve_next_token: Tensor, retrieve_next_sibling: Tensor,
    target_probs: Tensor, uniform: Tensor, uniform_final: Tensor, max_depth: int, *, draft_probs: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Walk from the root to the first child that is accepted, as long as one is; then draw one more token.

    p is the target's distribution at the node where the walk stands: its row of target_probs, divided by its sum.

    Without draft_probs the draft is deterministic. The children are tried in the order of their links against the
    mass that remains (1 before the first): child c with token x is accepted if uniform[c] * remaining < p(x);
    otherwise the mass of x is taken out, of `remaining` too. A second child with the same token has no mass left.
    Where no child is accepted, the last token is drawn from what remains of p.

    With draft_probs the draft is a chain, sampled: q is draft_probs[node], divided by its sum, the distribution that
    the node's child was drawn from. It is accepted if uniform[c] * q(x) < p(x), otherwise the last token is drawn from
    max(p - q, 0) (Leviathan et al. 2023). Siblings of that child are not tried. An honest q(x) is positive; where it is
    0, x is accepted whenever p(x) > 0.

    At a node without children, and at max_depth, the last token is drawn from p. Draws take the first token whose
    cumulative mass exceeds uniform_final * total. All of this is computed in fp64, and what is drawn or accepted has
    p > 0. Where rounding leaves no mass, the draw is from p. NaN, negative and infinite probabilities count as 0; a
    row with nothing else accepts no child and gives token 0. A draft token outside the vocabulary has p = 0.
    A number outside [0, 1), or NaN, gives a valid token all the same.

    Links and retrieve_index are read as in `verify_greedy`, with the same bounds: a child without a row is passed over
    (its mass stays), and a root without one accepts nothing and gives the token -1.

    Args:
        draft_ids: [batch, N] int32 or int64, N >= 1; node 0 is the root, whose token does not matter.
        retrieve_index: [batch, N] int32 or int64, the row of target_probs that each node has.
        retrieve_next_token: [batch, N] int32 or int64, first child, -1 for none.
        retrieve_next_sibling: [batch, N] int32 or int64, next child of the same parent, -1 for none.
        target_probs: [T, vocab] with T >= batch * N, or [batch, N, vocab], bf16, fp16 or fp32; rows need not be
            normalised.
        uniform: [batch, N] fp32 in [0, 1), one number a node; entry c is used when child c is tried.
        uniform_final: [batch] fp32 in [0, 1), for the last token.
        max_depth: the most draft tokens to accept, at least 0.
        draft_probs: [batch, N, vocab] in the dtype of target_probs, or None.

    Returns:
        accept_index [batch, max_depth + 1] int64, the retrieve_index of the root and of the accepted nodes, -1 behind
        them; num_accepted [batch] int64, accepted draft tokens, the root not counted; accept_ids
        [batch, max_depth + 1] int64, their tokens, then the last token, -1 behind it.

    Raises:
        ArgumentError: a wrong rank, size, dtype, stride or device.

    >>> draft_ids, rows = torch.tensor([[0, 1, 2]]), torch.arange(3).view(1, 3)  # a root with the children 1 and 2
    >>> next_token, next_sibling = torch.tensor([[1, -1, -1]]), torch.tensor([[-1, 2, -1]])
    >>> target_probs = torch.tensor([[0.5, 0.25, 0.25], [0.0, 0.0, 1.0], [0.9, 0.1, 0.0]])
    >>> uniform, uniform_final = torch.tensor([[0.0, 0.3, 0.3]]), torch.tensor([0.95])
    >>> verify_sample(draft_ids, rows, next_token, next_sibling, target_probs, uniform, uniform_final, 2)
    (tensor([[ 0,  2, -1]]), tensor([1]), tensor([[ 2,  1, -1]]))
    """
    return torch.ops.mtp.verify_sample(
        draft_ids, retrieve_index, retrieve_next_token, retrieve_next_sibling, target_probs, uniform, uniform_final,
        max_depth, draft_probs=draft_probs,
    )


def check(
    draft_ids: Tensor, retrieve_index: Tensor, retrieve_next_token: Tensor, retrieve_next_sibling: Tensor,
    target_probs: Tensor, uniform: Tensor, uniform_final: Tensor, max_depth: int, *, draft_probs: Tensor | None = None
) -> None:
    check_draft(NAME, draft_ids, retrieve_index, retrieve_next_token, retrieve_next_sibling, max_depth)
    batch, num_nodes = draft_ids.shape
    why = f"draft_ids is {show_shape(draft_ids.shape)}"
    check_target_rows(NAME, "target_probs", target_probs, draft_ids, 1)
    check_float(NAME, "target_probs", target_probs)
    vocab = target_probs.size(-1)
    require(vocab >= 1, NAME, "target_probs", "at least 1 column", vocab)
    check_shape(NAME, "uniform", uniform, (batch, num_nodes), why)
    check_shape(NAME, "uniform_final", uniform_final, (batch,), why)
    for name, tensor in (("uniform", uniform), ("uniform_final", uniform_final)):
        check_dtype(NAME, name, tensor, (torch.float32,))
    if draft_probs is not None:
        columns = f"target_probs has {vocab} columns, {why}"
        check_shape(NAME, "draft_probs", draft_probs, (batch, num_nodes, vocab), columns)
        check_float(NAME, "draft_probs", draft_probs, target_probs, "target_probs")
    check_last_contiguous(
        NAME, target_probs=target_probs, uniform=uniform, uniform_final=uniform_final, draft_probs=draft_probs
    )
    check_device(
        NAME, draft_ids.device, "draft_ids", target_probs=target_probs, uniform=uniform, uniform_final=uniform_final,
        draft_probs=draft_probs,
    )


def outputs(
    draft_ids: Tensor, retrieve_index: Tensor, retrieve_next_token: Tensor, retrieve_next_sibling: Tensor,
    target_probs: Tensor, uniform: Tensor, uniform_final: Tensor, max_depth: int, *, draft_probs: Tensor | None = None
) -> tuple[Spec, ...]:
    batch = draft_ids.size(0)
    path = ((batch, max_depth + 1), torch.int64)
    return path, ((batch,), torch.int64), path


def contents(
    draft_ids: Tensor, retrieve_index: Tensor, retrieve_next_token: Tensor, retrieve_next_sibling: Tensor,
    target_probs: Tensor, uniform: Tensor, uniform_final: Tensor, max_depth: int, *, draft_probs: Tensor | None = None
) -> None:
    vocab = target_probs.size(-1)
    num_rows = target_probs.numel() // vocab
    check_draft_contents(NAME, draft_ids, retrieve_index, retrieve_next_token, retrieve_next_sibling, num_rows)
    check_contents(NAME, "draft_ids", draft_ids, draft_ids >= vocab, f"a token id below {vocab}")
    for name, probs in (("target_probs", target_probs), ("draft_probs", draft_probs)):
        if probs is not None:
            check_contents(NAME, name, probs, ~(probs >= 0) | probs.isinf(), "a probability")
    for name, numbers in (("uniform", uniform), ("uniform_final", uniform_final)):
        check_contents(NAME, name, numbers, ~((numbers >= 0) & (numbers < 1)), "a number in [0, 1)")


def serves(
    draft_ids: Tensor, retrieve_index: Tensor, retrieve_next_token: Tensor, retrieve_next_sibling: Tensor,
    target_probs: Tensor, uniform: Tensor, uniform_final: Tensor, max_depth: int, *, draft_probs: Tensor | None = None
) -> str:
    """Why the Triton kernel does not take these arguments; "" if it does."""
    num_nodes, vocab = draft_ids.size(1), target_probs.size(-1)
    if num_nodes > MAX_NODES:
        return f"draft_ids has {num_nodes} nodes: at most {MAX_NODES}"
    return "" if vocab <= MAX_VOCAB else f"target_probs has {vocab} columns: at most {MAX_VOCAB}"


register(
    SCHEMA, check=check, outputs=outputs, reference=reference, contents=contents,
    kernels=(triton_kernel(NAME, serves), cpp_kernel(NAME)),
)
