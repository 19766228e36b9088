"""verify_sample: the rule against exact arithmetic."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import Any

import pytest
import torch
from harness import (
    DEVICES,
    FLOATS,
    assert_same_bits,
    call,
    check_compiled,
    check_debug_error,
    check_device_errors,
    check_error,
    check_everything,
    forced,
    strided,
)
from head_cases import check_reads_nothing, check_threads
from torch import Tensor
from tree_cases import INT_MIN, PARENTS, distribution, interpreted, links_of, on, places, probabilities, sample_all

OP = "verify_sample"


def dyadic(*shape: int, seed: int) -> Tensor:
    """Distributions in multiples of 1/32, some 0: sums and differences are exact in any precision and order."""
    generator = torch.Generator().manual_seed(seed)
    *leading, vocab = shape
    rows = math.prod(leading)
    drawn = torch.randint(0, vocab, (rows, 32), generator=generator)
    counts = torch.zeros(rows, vocab).scatter_add_(1, drawn, torch.ones(rows, 32))
    return (counts / 32).view(*leading, vocab)


def grid(*shape: int, seed: int) -> Tensor:
    """Multiples of 1/32 in [0, 1): they often meet a threshold exactly."""
    return torch.randint(0, 32, shape, generator=torch.Generator().manual_seed(seed)) / 32


def arguments(batch: int = 2, vocab: int = 6, max_depth: int = 3, parents: list[int] | None = None, seed: int = 0,
              device: str = "cpu", dtype: torch.dtype = torch.float32, index: torch.dtype = torch.int64
              ) -> tuple[Any, ...]:
    """A tree for each request whose tokens, being few, often stand twice among siblings."""
    parents = PARENTS if parents is None else parents
    num_nodes = len(parents)
    next_token, next_sibling = (torch.tensor([links] * batch).view(batch, num_nodes) for links in links_of(parents))
    ids = torch.randint(0, vocab, (batch, num_nodes), generator=torch.Generator().manual_seed(seed))
    rows = torch.arange(batch * num_nodes).view(batch, num_nodes)
    probs = dyadic(batch, num_nodes, vocab, seed=seed + 1).to(dtype)
    draft = [t.to(index) for t in (ids, rows, next_token, next_sibling)]
    return (*on(device, *draft, probs, grid(batch, num_nodes, seed=seed + 2), grid(batch, seed=seed + 3)), max_depth)


def expected(*args: Any, draft_probs: Tensor | None = None) -> list[list[Any]]:
    *draft, probs, uniform, final, max_depth = args
    q = None if draft_probs is None else draft_probs.tolist()
    return sample_all([t.tolist() for t in draft], probs.flatten(0, -2).tolist(), uniform.tolist(), final.tolist(),
                      max_depth, q)


@pytest.mark.parametrize(("device", "implementation"), places(OP))
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("parents", "max_depth", "reached"),
    [(PARENTS, 3, 2), (PARENTS, 1, 1), (PARENTS, 0, 0), ([-1], 2, 0), ([-1, 0, 0, 0, 0, 0, 0, 0], 2, 1)],
)
def test_tree_against_exact_arithmetic(device: str, implementation: str, dtype: torch.dtype, parents: list[int],
                                       max_depth: int, reached: int) -> None:
    batch = 20 if interpreted(device, implementation) else 200
    args = arguments(batch, 6, max_depth, parents, device=device, dtype=dtype)
    with forced(implementation):
        got = call(OP, *args)
    assert [r.tolist() for r in got] == expected(*args)
    assert set(got[1].tolist()) >= set(range(reached + 1))
    assert got[0].shape == got[2].shape == (batch, max_depth + 1)
    assert [r.dtype for r in got] == [torch.int64] * 3


@pytest.mark.parametrize(("device", "implementation"), places(OP))
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("parents", [[-1, 0, 1, 2], PARENTS])
def test_sampled_against_exact_arithmetic(device: str, implementation: str, dtype: torch.dtype, parents: list[int]
                                          ) -> None:
    """Also with draft tokens that have q = 0, and in a tree, where only first children are tried."""
    batch = 25 if interpreted(device, implementation) else 300
    args = arguments(batch, 4, 3, parents, device=device, dtype=dtype)
    draft_probs = dyadic(batch, len(parents), 4, seed=77).to(device, dtype)
    with forced(implementation):
        got = call(OP, *args, draft_probs=draft_probs)
    assert [r.tolist() for r in got] == expected(*args, draft_probs=draft_probs)
    assert set(got[1].tolist()) >= {0, 1, 2}


def every_number(batch_of: int, size: int) -> Tensor:
    """All combinations of `batch_of` uniform numbers of a grid of `size`: [size ** batch_of, batch_of]."""
    return torch.tensor(list(itertools.product([i / size for i in range(size)], repeat=batch_of)))


@pytest.mark.parametrize(("device", "implementation"), places(OP))
def test_every_combination_of_uniform_numbers_on_a_tree(device: str, implementation: str) -> None:
    """Over the whole grid (0 too) each token comes out exactly as often as its probability says."""
    numbers = every_number(3, 4 if interpreted(device, implementation) else 8)
    batch = numbers.size(0)
    probs = torch.tensor([[0.5, 0.25, 0.0, 0.25], [0.0, 0.0, 1.0, 0.0], [1.0, 0, 0, 0], [1.0, 0, 0, 0]])
    ids = torch.tensor([0, 0, 2, 1]).expand(batch, -1)  # the children 0, then 2 (probability 0), then 1
    uniform = torch.cat([numbers.new_zeros(batch, 2), numbers[:, :2]], dim=1)
    uniform[:, 1], uniform[:, 2] = numbers[:, 0], 0.0
    links = [torch.tensor(x).expand(batch, -1) for x in ([1, -1, -1, -1], [-1, 2, 3, -1])]
    rows = torch.arange(batch * 4).view(batch, 4)
    args = on(device, ids, rows, *links, probs.expand(batch, -1, -1), uniform, numbers[:, 2].contiguous(), 1)
    with forced(implementation):
        _, num_accepted, accept_ids = call(OP, *args)
    assert Counter(accept_ids[:, 0].tolist()) == {0: batch // 2, 1: batch // 4, 3: batch // 4}
    assert (accept_ids[:, 0] == 3).eq(num_accepted == 0).all()


@pytest.mark.parametrize(("device", "implementation"), places(OP))
def test_every_combination_of_uniform_numbers_on_a_chain(device: str, implementation: str) -> None:
    numbers = every_number(2, 4 if interpreted(device, implementation) else 8)
    drafted = torch.tensor([0, 1, 1, 3])  # as often as q says
    p, q = torch.tensor([0.5, 0.25, 0.25, 0.0]), torch.tensor([0.25, 0.5, 0.0, 0.25])
    numbers, drafted = numbers.repeat(4, 1), drafted.repeat_interleave(numbers.size(0))
    batch = numbers.size(0)
    ids = torch.stack([torch.zeros_like(drafted), drafted], dim=1)
    links = [torch.tensor(x).expand(batch, -1) for x in ([1, -1], [-1, -1])]
    rows = torch.arange(batch * 2).view(batch, 2)
    args = on(device, ids, rows, *links, torch.stack([p, p]).expand(batch, -1, -1), numbers[:, :1].expand(-1, 2)
              .contiguous(), numbers[:, 1].contiguous(), 1)
    with forced(implementation):
        _, _, accept_ids = call(OP, *args, draft_probs=torch.stack([q, q]).to(device).expand(batch, -1, -1))
    assert Counter(accept_ids[:, 0].tolist()) == {0: batch // 2, 1: batch // 4, 2: batch // 4}


@pytest.mark.parametrize(("device", "implementation"), places(OP))
@pytest.mark.parametrize("chain", [False, True])
def test_no_token_of_probability_0(device: str, implementation: str, chain: bool) -> None:
    """Not for any uniform number, the ends of [0, 1) and worse: NaN, 1, infinities, negative ones."""
    below = 1 - 2**-24
    numbers = torch.tensor([0.0, -0.0, below, 2.0**-149, 1.0, 1.5, -1.0, math.nan, math.inf, -math.inf])
    pairs = torch.cartesian_prod(numbers, numbers)
    if interpreted(device, implementation):
        pairs = torch.stack([numbers, numbers.roll(3)], dim=1)
    batch = pairs.size(0)
    p = torch.tensor([0.0, 0.0, 0.3, 0.0, 0.7 - 2**-20, 0.0])
    links = [torch.tensor(x).expand(batch, -1) for x in ([1, -1, -1], [-1, 2, -1])]
    rows = torch.arange(batch * 3).view(batch, 3)
    q = torch.tensor([0.4, 0.1, 0.1, 0.0, 0.2, 0.2]).to(device)
    for token in range(6):
        ids = torch.tensor([0, token, 5]).expand(batch, -1)
        args = on(device, ids, rows, *links, p.expand(batch, 3, -1), pairs[:, :1].expand(-1, 3).contiguous(),
                  pairs[:, 1].contiguous(), 1)
        with forced(implementation):
            _, num_accepted, accept_ids = call(OP, *args, draft_probs=q.expand(batch, 3, -1) if chain else None)
        emitted = accept_ids[accept_ids >= 0]
        assert emitted.numel() == (num_accepted + 1).sum() and set(emitted.tolist()) <= {2, 4}


@pytest.mark.parametrize(("device", "implementation"), places(OP))
def test_accepts_strictly_below(device: str, implementation: str) -> None:
    p = torch.tensor([[0.25, 0.75], [1.0, 0.0]])
    u = torch.tensor([0.25 - 2**-26, 0.25])
    args = on(device, [[0, 0]] * 2, [[0, 1], [2, 3]], [[1, -1]] * 2, [[-1, -1]] * 2, p.repeat(2, 1),
              u.unsqueeze(1).expand(2, 2).contiguous(), torch.zeros(2), 1)
    with forced(implementation):
        assert call(OP, *args)[1].tolist() == [1, 0]
        chain = call(OP, *args, draft_probs=torch.tensor([1.0, 0.0], device=device).expand(2, 2, 2))
    assert chain[1].tolist() == [1, 0] and chain[2].tolist() == [[0, 0], [1, -1]]


@pytest.mark.parametrize(("device", "implementation"), places(OP))
def test_values_that_are_no_probabilities(device: str, implementation: str) -> None:
    """NaN, negative and infinite count as 0; a row with nothing else gives token 0; rows need not add up to 1."""
    nan, inf = math.nan, math.inf
    rows = [[nan, 2.0, -1.0, 2.0], [inf, 0.0, 3.0, -inf], [nan, -1.0, 0.0, inf], [0.0] * 4]
    probs = torch.tensor(rows).repeat_interleave(2, 0)  # a root and a child each
    for token, accepted in ((0, [0, 0, 0, 0]), (1, [1, 0, 0, 0]), (2, [0, 1, 0, 0]), (3, [0, 0, 0, 0])):
        args = on(device, [[0, token]] * 4, [[0, 1], [2, 3], [4, 5], [6, 7]], [[1, -1]] * 4, [[-1, -1]] * 4, probs,
                  torch.full((4, 2), 0.25 if token != 3 else 0.5), torch.full((4,), 0.75), 1)
        with forced(implementation):
            got = call(OP, *args)
        assert got[1].tolist() == accepted
        assert got[2][:, 0].tolist() == [1 if token in (1, 3) else 3, 2, 0, 0]
        assert [r.tolist() for r in got] == expected(*args)


@pytest.mark.parametrize(("device", "implementation"), places(OP))
def test_a_draft_without_probabilities(device: str, implementation: str) -> None:
    """q = 0 for the drafted token, or everywhere: it is accepted where p > 0, and the residual is p."""
    p = torch.tensor([[0.0, 0.5, 0.5]]).repeat(6, 1)
    q = torch.tensor([[1.0, 0.0, 0.0], [0.0] * 3, [math.nan] * 3]).unsqueeze(1).expand(3, 2, 3).to(device)
    for token, accepted in ((1, 1), (0, 0)):
        args = on(device, [[0, token]] * 3, [[0, 1], [2, 3], [4, 5]], [[1, -1]] * 3, [[-1, -1]] * 3, p,
                  torch.full((3, 2), 0.9), torch.full((3,), 0.25), 1)
        with forced(implementation):
            got = call(OP, *args, draft_probs=q)
        assert got[1].tolist() == [accepted] * 3
        assert [r.tolist() for r in got] == expected(*args, draft_probs=q)


@pytest.mark.parametrize(("device", "implementation"), places(OP))
def test_no_mass_left_falls_back_to_the_target(device: str, implementation: str) -> None:
    """p = q rejects for no number in [0, 1); where one outside does, the draw is from p."""
    p = torch.tensor([0.0, 0.5, 0.5])
    args = on(device, [[0, 1]] * 2, [[0, 1], [2, 3]], [[1, -1]] * 2, [[-1, -1]] * 2, p.repeat(4, 1),
              torch.tensor([[0.0, 1 - 2**-24], [0.0, 1.0]]), torch.full((2,), 0.75), 1)
    with forced(implementation):
        got = call(OP, *args, draft_probs=p.to(device).expand(2, 2, 3))
    assert got[1].tolist() == [1, 0] and got[2].tolist() == [[1, 2], [2, -1]]


@pytest.mark.parametrize(("device", "implementation"), places(OP))
@pytest.mark.parametrize("bad", [-1, 6, INT_MIN, 2**40])
def test_tokens_outside_the_vocabulary(device: str, implementation: str, bad: int) -> None:
    args = arguments(8 if interpreted(device, implementation) else 40, device=device)
    args[0][:, [1, 2, 5]] = bad
    with forced(implementation):
        got = call(OP, *args)
        chain = call(OP, *args, draft_probs=args[4])
    assert not got[1].any() and not chain[1].any()
    assert [r.tolist() for r in got] == expected(*args)
    assert [r.tolist() for r in chain] == expected(*args, draft_probs=args[4])


@pytest.mark.parametrize(("device", "implementation"), places(OP))
@pytest.mark.parametrize("bad", [-1, "the first past the end", INT_MIN, 2**40])
def test_rows_out_of_range(device: str, implementation: str, bad: Any) -> None:
    """A child without a row is passed over, and its token keeps its mass; a root without one gives -1."""
    half = 6 if interpreted(device, implementation) else 20
    args = arguments(2 * half, device=device)
    bad = args[0].numel() if isinstance(bad, str) else bad
    args[1][:half, 1] = bad
    args[1][half:, 0] = bad
    with forced(implementation):
        got = call(OP, *args)
    assert [r.tolist() for r in got] == expected(*args)
    assert got[0][half:].tolist() == [[bad, -1, -1, -1]] * half and got[2][half:].eq(-1).all()
    assert got[1][:half].any()


@pytest.mark.parametrize(("device", "implementation"), places(OP))
def test_malformed_links_end(device: str, implementation: str) -> None:
    args = arguments(60 if interpreted(device, implementation) else 100, device=device)
    generator = torch.Generator().manual_seed(3)
    for links in args[2:4]:
        links.copy_(torch.randint(-2, len(PARENTS) + 2, links.shape, generator=generator))
    with forced(implementation):
        got = call(OP, *args[:-1], 9)
    assert [r.tolist() for r in got] == expected(*args[:-1], 9)
    assert got[1].max() > 3


@pytest.mark.parametrize(("device", "implementation"), places(OP))
def test_target_probs_flat_or_by_node(device: str, implementation: str) -> None:
    batch = 5 if interpreted(device, implementation) else 20
    *draft, probs, uniform, final, max_depth = arguments(batch, device=device)
    flat = probs.flatten(0, 1)
    longer = torch.cat([flat, torch.full_like(flat[:3], math.nan)])
    with forced(implementation):
        results = [call(OP, *draft, p, uniform, final, max_depth) for p in (probs, flat, longer, strided(probs))]
    for other in results[1:]:
        for a, b in zip(results[0], other):
            assert_same_bits(a, b)


@pytest.mark.parametrize(("device", "implementation"), places(OP))
def test_a_large_vocabulary_is_summed_exactly_enough(device: str, implementation: str) -> None:
    """2^18 equal probabilities that do not add up to 1: a draw in the middle of each token's part finds it."""
    vocab, wanted = 2**18, torch.tensor([0, 1, 99_999, 2**17, 180_001, 2**18 - 2, 2**18 - 1])
    if interpreted(device, implementation):
        wanted = wanted[::3]
    batch = wanted.numel()
    u = ((wanted + 0.5) / vocab).float()
    probs = torch.tensor(1 / 3).expand(batch, 1, vocab).contiguous()
    nodes = torch.zeros(batch, 1, dtype=torch.int64)
    args = on(device, nodes, torch.arange(batch).view(batch, 1), nodes - 1, nodes - 1, probs, nodes.float(), u, 0)
    with forced(implementation):
        assert call(OP, *args)[2][:, 0].tolist() == wanted.tolist()


@pytest.mark.parametrize(("device", "implementation"), places(OP))
@pytest.mark.parametrize("chain", [False, True])
def test_tokens_far_apart(device: str, implementation: str, chain: bool) -> None:
    """The same draft over a vocabulary of 5000, where its tokens lie far apart: token x becomes 997 * x."""
    *draft, probs, uniform, final, max_depth = arguments(12, 6, device=device)
    q = dyadic(12, len(PARENTS), 6, seed=77).to(device)
    far_ids = draft[0] * 997
    far = [t.new_zeros(*t.shape[:2], 5000).index_copy(2, torch.arange(6, device=device) * 997, t) for t in (probs, q)]
    with forced(implementation):
        got = call(OP, far_ids, *draft[1:], far[0], uniform, final, max_depth, draft_probs=far[1] if chain else None)
    index, accepted, ids = expected(*draft, probs, uniform, final, max_depth, draft_probs=q if chain else None)
    assert got[0].tolist() == index and got[1].tolist() == accepted
    assert got[2].tolist() == [[x if x < 0 else x * 997 for x in request] for request in ids]


@pytest.mark.parametrize(("device", "implementation"), places(OP))
@pytest.mark.parametrize("chain", [False, True])
def test_a_request_does_not_depend_on_the_batch(device: str, implementation: str, chain: bool) -> None:
    """Each request alone, and all of them the other way round, give the same, in sums that are not exact either."""
    *draft, _, uniform, final, max_depth = arguments(5, 3000, device=device)
    probs, q = (probabilities(5, len(PARENTS), 3000, seed=seed).to(device) for seed in (1, 2))
    draft[0] = probs.argmax(-1).roll(1, 1)
    tensors = (draft[0], *draft[2:], uniform, final, probs, q)

    def verify(chosen: list[int]) -> tuple[Tensor, ...]:
        ids, child, sibling, u, last, p, other = (t[chosen] for t in tensors)
        rows = torch.arange(ids.numel(), device=device).view(ids.shape)
        with forced(implementation):
            return call(OP, ids, rows, child, sibling, p, u * 1e-2, last, max_depth,
                        draft_probs=other if chain else None)[1:]

    together, reversed_order = verify([*range(5)]), verify([*reversed(range(5))])
    assert together[0].any()
    for b in range(5):
        for whole, turned, alone in zip(together, reversed_order, verify([b])):
            assert_same_bits(whole[b], alone[0])
            assert_same_bits(turned[4 - b], alone[0])


@pytest.mark.kernels_only
@pytest.mark.parametrize("implementation", [i for d, i in places(OP) if d == "cpu" and i != "triton"])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("chain", [False, True])
def test_several_chunks_and_threads(implementation: str, dtype: torch.dtype, chain: bool) -> None:
    """A vocabulary of many chunks: the exact rule's tokens, and the same bits with one thread and with two."""
    args = arguments(3, 40_000, device="cpu", dtype=dtype)
    args[0][:, 1:] = args[4].argmax(-1)[:, :1]
    kwargs = {"draft_probs": dyadic(3, len(PARENTS), 40_000, seed=77).to(dtype)} if chain else {}
    with forced(implementation):
        got = call(OP, *args, **kwargs)
    assert [r.tolist() for r in got] == expected(*args, **kwargs)
    check_threads(OP, implementation, *args, **kwargs)


@pytest.mark.parametrize(("device", "implementation"), places(OP))
def test_batch_0(device: str, implementation: str) -> None:
    args = arguments(0, device=device)
    with forced(implementation):
        got = call(OP, *args)
        chain = call(OP, *args, draft_probs=args[4])
    assert [list(r.shape) for r in got] == [list(r.shape) for r in chain] == [[0, 4], [0], [0, 4]]


@pytest.mark.parametrize(("device", "implementation"), places(OP))
@pytest.mark.parametrize(
    ("chain", "dtype", "index"),
    [(False, torch.float32, torch.int64), (True, torch.bfloat16, torch.int32), (True, torch.float16, torch.int32)],
)
def test_contract(device: str, implementation: str, chain: bool, dtype: torch.dtype, index: torch.dtype) -> None:
    args = arguments(device=device, dtype=dtype, index=index)
    kwargs = {"draft_probs": args[4].clone()} if chain else {}
    with forced(implementation):
        check_everything(OP, *args, **kwargs)


@pytest.mark.parametrize("device", DEVICES)
def test_compiled(device: str) -> None:
    check_compiled(OP, *arguments(device=device))


def test_reads_nothing() -> None:
    args = arguments()
    check_reads_nothing(OP, *args)
    check_reads_nothing(OP, *args, draft_probs=args[4])


def test_errors() -> None:
    *draft, probs, uniform, final, depth = arguments()
    shape = "(draft_ids is [2, 7])"
    for message, *args in (
        ("target_probs: expected 2 dimensions or 3 dimensions, got 1 ([6])", probs[0, 0], uniform, final, depth),
        (f"target_probs: expected [2, 7, *], got [2, 6, 6] {shape}", probs[:, 1:], uniform, final, depth),
        (f"target_probs: expected at least 14 rows, got 13 {shape}", probs.flatten(0, 1)[1:], uniform, final, depth),
        ("target_probs: expected bfloat16 or float16 or float32, got float64", probs.double(), uniform, final, depth),
        ("target_probs: expected at least 1 column, got 0", probs[..., :0], uniform, final, depth),
        (f"uniform: expected [2, 7], got [2, 6] {shape}", probs, uniform[:, 1:], final, depth),
        ("uniform: expected float32, got float16", probs, uniform.half(), final, depth),
        (f"uniform_final: expected [2], got [1] {shape}", probs, uniform, final[:1], depth),
        ("uniform_final: expected float32, got bfloat16", probs, uniform, final.bfloat16(), depth),
        ("max_depth: expected at least 0, got -2", probs, uniform, final, -2),
        ("target_probs: expected a contiguous last dimension, got strides [42, 1, 7]",
         probs.mT.contiguous().mT, uniform, final, depth),
    ):
        check_error(OP, f"verify_sample: {message}", *draft, *args)
    args = [*draft, probs, uniform, final, depth]
    check_error(OP, f"verify_sample: draft_probs: expected [2, 7, 6], got [2, 7, 5] (target_probs has 6 columns, "
                f"{shape[1:]}", *args, draft_probs=probs[..., 1:])
    check_error(OP, "verify_sample: draft_probs: expected float32, got float16 (target_probs is float32)", *args,
                draft_probs=probs.half())
    check_error(OP, "verify_sample: draft_ids: expected int32 or int64, got float32", draft[0].float(), *args[1:])
    check_error(OP, f"verify_sample: retrieve_next_sibling: expected [2, 7], got [2, 6] {shape}", *draft[:3],
                draft[3][:, 1:], *args[4:])


def test_device_errors() -> None:
    args = arguments()
    check_device_errors(OP, *args, draft_probs=args[4])


def test_debug_names_the_first_offender() -> None:
    def changed(place: int, *index: int, to: float) -> tuple[Any, ...]:
        args = arguments()
        args[place][index] = to
        return args

    for message, args in (
        ("draft_ids[1, 2]: expected a token id of at least 0, got -3", changed(0, 1, 2, to=-3)),
        ("draft_ids[0, 1]: expected a token id below 6, got 6", changed(0, 0, 1, to=6)),
        ("retrieve_index[0, 6]: expected 0 to 13, got 14 (the target has 14 rows)", changed(1, 0, 6, to=14)),
        ("target_probs[1, 2, 3]: expected a probability, got nan", changed(4, 1, 2, 3, to=math.nan)),
        ("target_probs[0, 0, 5]: expected a probability, got -0.5", changed(4, 0, 0, 5, to=-0.5)),
        ("uniform[0, 4]: expected a number in [0, 1), got 1.0", changed(5, 0, 4, to=1.0)),
        ("uniform_final[1]: expected a number in [0, 1), got -0.5", changed(6, 1, to=-0.5)),
    ):
        check_debug_error(OP, f"verify_sample: {message}", *args)
    args = arguments()
    check_debug_error(OP, "verify_sample: draft_probs[0, 0, 0]: expected a probability, got inf", *args,
                      draft_probs=torch.full_like(args[4], math.inf))


def test_the_exact_model() -> None:
    """The plain Python rule itself: its distributions are exact."""
    assert sum(distribution([0.1, math.nan, 0.7, -1.0]).values()) == 1
