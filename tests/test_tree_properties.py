"""Properties of the tree ops, for drawn inputs good and bad: equal to plain Python, and right when put together."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from harness import assert_same_bits, call, forced
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from tree_cases import INDICES, INT_MIN, build, children, links_of, path_to_root, places, rank, sample_all, walk_all

OPS = ("tree_expand", "tree_build", "verify_greedy", "commit")
PLACES = sorted(set().union(*(places(op) for op in OPS)))
checked = settings(max_examples=60, deadline=None, derandomize=True, database=None,
                   suppress_health_check=[HealthCheck.too_slow])

index_dtypes = st.sampled_from(INDICES)
odd_ints = st.sampled_from([-1, 0, -2, INT_MIN, 2**31 - 1])
odd_floats = st.sampled_from([math.nan, -math.inf, math.inf, 0.0, -0.0, -1.0, -0.5]) | st.floats(-3, 0, width=32)


@st.composite
def forests(draw: Any, max_nodes: int = 7) -> tuple[list[int], list[int]]:
    """Tokens (few, so that siblings share them) and parents of a tree."""
    num_nodes = draw(st.integers(1, max_nodes))
    parents = [-1, *(draw(st.integers(0, i - 1)) for i in range(1, num_nodes))]
    return draw(st.lists(st.integers(0, 3), min_size=num_nodes, max_size=num_nodes)), parents


@st.composite
def linked(draw: Any) -> dict[str, list[list[int]]]:
    """Requests with any links at all: ids, rows, next_token and next_sibling as lists [batch, N]."""
    batch, num_nodes = draw(st.integers(1, 3)), draw(st.integers(1, 6))
    link = st.integers(-2, num_nodes + 1) | odd_ints
    row = st.integers(0, batch * num_nodes - 1) | st.integers(-2, batch * num_nodes + 2) | odd_ints
    of = {"ids": st.integers(-1, 2), "rows": row, "next_token": link, "next_sibling": link}
    return {name: draw(st.lists(st.lists(values, min_size=num_nodes, max_size=num_nodes), min_size=batch,
                                max_size=batch)) for name, values in of.items()}


def served(place: tuple[str, str], op: str, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    """The op on the device of `place`, by its implementation, or by the reference where the op has no such kernel."""
    device, implementation = place
    move = [a.to(device) if isinstance(a, Tensor) else a for a in args]
    with forced(implementation if place in places(op) else "reference"):
        got = call(op, *move, **{k: v.to(device) if isinstance(v, Tensor) else v for k, v in kwargs.items()})
    return tuple(t.cpu() for t in got)


@pytest.mark.parametrize("place", PLACES)
@checked
@given(st.data(), st.integers(1, 4), st.integers(1, 3), st.integers(1, 2))
def test_a_drafted_tree(place: tuple[str, str], data: Any, steps: int, topk: int, batch: int) -> None:
    """tree_expand step by step, then tree_build: whatever the logprobs, kept candidates bring their ancestors."""
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    coarse = data.draw(st.sampled_from([1, 4, 1000]))
    all_scores, all_ids, all_parents = [], [], []
    scores = frontier = None
    offset = 0
    for step in range(steps):
        rows = 1 if step == 0 else topk
        logprobs = (torch.rand(batch, rows, topk, generator=generator) * coarse).round() / -coarse
        logprobs.masked_fill_(torch.rand(batch, rows, topk, generator=generator) < 0.1, -math.inf)
        ids = torch.randint(0, 50, (batch, rows, topk), generator=generator).to(data.draw(index_dtypes))
        next_ids, row_index, scores, frontier, cand_scores, cand_parent = served(
            place, "tree_expand", logprobs, ids, offset, scores=scores, frontier=frontier)
        assert_same_bits(next_ids, ids.flatten(1).long().gather(1, frontier - offset))
        assert_same_bits(row_index, (frontier - offset) // topk)
        assert_same_bits(scores, cand_scores.gather(1, frontier - offset))
        for b in range(batch):
            assert (frontier[b] - offset).tolist() == rank(cand_scores[b].tolist(), topk)
        offset += rows * topk
        all_scores.append(cand_scores)
        all_ids.append(ids.flatten(1).long())
        all_parents.append(cand_parent)
    cand_scores, cand_ids, cand_parent = (torch.cat(x, dim=1) for x in (all_scores, all_ids, all_parents))
    num_nodes = data.draw(st.integers(1, offset + 1))
    root, position = torch.arange(batch), torch.arange(batch) * 10 + 3
    got = served(place, "tree_build", root, cand_scores, cand_ids, cand_parent, position, num_nodes)
    _, positions, parents, selected, mask, *_ = got
    assert (parents[:, 1:] >= 0).all()  # nobody is an orphan
    assert mask[:, :, 0].all()
    for b in range(batch):
        check_round_trip(*(t[b].tolist() for t in (parents, got[6], got[7])))
        for node in range(1, num_nodes):
            candidate = int(selected[b, node - 1])
            parent = int(parents[b, node])
            assert int(cand_parent[b, candidate]) == (-1 if parent == 0 else int(selected[b, parent - 1]))
            assert positions[b, node] == positions[b, parent] + 1


def check_round_trip(parents: list[int], next_token: list[int], next_sibling: list[int]) -> None:
    """The links name every child once, in node order, under its parent: so they give the parents back."""
    back = [-1] * len(parents)
    for node in range(len(parents)):
        own = list(children(node, next_token, next_sibling))
        assert own == sorted(set(own))
        for child in own:
            assert back[child] == -1
            back[child] = node
    assert back == parents


@pytest.mark.parametrize("place", PLACES)
@checked
@given(st.data(), st.integers(0, 9), st.integers(1, 2))
def test_tree_build_of_anything(place: tuple[str, str], data: Any, candidates: int, batch: int) -> None:
    """Scores and parents of any kind: equal to plain Python."""
    def rows(values: Any) -> list[list[Any]]:
        row = st.lists(values, min_size=candidates, max_size=candidates)
        return data.draw(st.lists(row, min_size=batch, max_size=batch))

    scores, parents = rows(odd_floats), rows(st.integers(-2, candidates + 1) | odd_ints)
    ids, root, position = rows(odd_ints), [data.draw(odd_ints)] * batch, [data.draw(st.integers(-5, 2**31 - 1))] * batch
    num_nodes = data.draw(st.integers(1, candidates + 1))
    ints = [torch.tensor(x, dtype=torch.int64).to(data.draw(index_dtypes)) for x in (root, ids, parents, position)]
    score = torch.tensor(scores, dtype=torch.float32).view(batch, candidates)
    got = served(place, "tree_build", ints[0], score, ints[1].view(batch, candidates),
                 ints[2].view(batch, candidates), ints[3], num_nodes)
    exact = [build(root[b], scores[b], ids[b], parents[b], position[b], num_nodes, b) for b in range(batch)]
    assert [r.tolist() for r in got] == [[request[i] for request in exact] for i in range(8)]
    for b in range(batch):
        check_round_trip(*(t[b].tolist() for t in (got[2], got[6], got[7])))


@pytest.mark.parametrize("place", PLACES)
@checked
@given(st.data(), linked(), st.integers(0, 7), st.booleans())
def test_verify_greedy_of_anything(place: tuple[str, str], data: Any, draft: dict[str, list[list[int]]],
                                   max_depth: int, flat: bool) -> None:
    """Links, rows and ids of any kind, in rings too: it ends, and equals plain Python."""
    batch, num_nodes = len(draft["ids"]), len(draft["ids"][0])
    size = batch * num_nodes + (data.draw(st.integers(0, 2)) if flat else 0)
    target = data.draw(st.lists(st.integers(-1, 2), min_size=size, max_size=size))
    tensors = [torch.tensor(x).to(data.draw(index_dtypes)) for x in (*draft.values(), target)]
    got = served(place, "verify_greedy", *tensors[:4], tensors[4] if flat else tensors[4].view(batch, num_nodes),
                 max_depth)
    assert [r.tolist() for r in got] == walk_all(list(draft.values()), target, max_depth)


@pytest.mark.parametrize("place", places("verify_sample"))
@checked
@given(st.data(), linked(), st.integers(0, 7), st.booleans())
def test_verify_sample_of_anything(place: tuple[str, str], data: Any, draft: dict[str, list[list[int]]],
                                   max_depth: int, chain: bool) -> None:
    """The same, with probabilities of any kind in steps of 1/4 (their sums are exact)."""
    batch, num_nodes, vocab = len(draft["ids"]), len(draft["ids"][0]), 2
    masses = st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0, -1.0, math.nan])

    def rows(count: int) -> list[list[float]]:
        """What counts of each row adds up to a power of two, or to nothing."""
        row = st.tuples(masses, masses).filter(lambda r: sum(x for x in r if x > 0) in (0, 0.25, 0.5, 1, 2))
        return [list(r) for r in data.draw(st.lists(row, min_size=count, max_size=count))]

    target = rows(batch * num_nodes)
    q = torch.tensor(rows(batch * num_nodes)).view(batch, num_nodes, vocab)
    numbers = st.sampled_from([0.0, 0.25, 0.5, 0.75])
    uniform = data.draw(st.lists(numbers, min_size=batch * num_nodes, max_size=batch * num_nodes))
    final = data.draw(st.lists(numbers, min_size=batch, max_size=batch))
    tensors = [torch.tensor(x).to(data.draw(index_dtypes)) for x in draft.values()]
    probs = torch.tensor(target).view(batch, num_nodes, vocab)
    number = torch.tensor(uniform).view(batch, num_nodes)
    got = served(place, "verify_sample", *tensors, probs, number, torch.tensor(final), max_depth,
                 draft_probs=q if chain else None)
    assert [r.tolist() for r in got] == sample_all(list(draft.values()), target, number.tolist(), final, max_depth,
                                                   q.tolist() if chain else None)


@pytest.mark.parametrize("place", PLACES)
@checked
@given(st.data(), forests(), st.integers(0, 5))
def test_an_accepted_path(place: tuple[str, str], data: Any, forest: tuple[list[int], list[int]], max_depth: int
                          ) -> None:
    """Of a good tree: a path from the root, each token the target's at its parent, as long as it can be."""
    tokens, parents = forest
    num_nodes = len(tokens)
    target = data.draw(st.lists(st.integers(0, 3), min_size=num_nodes, max_size=num_nodes))
    links = [torch.tensor([x]) for x in links_of(parents)]
    got = served(place, "verify_greedy", torch.tensor([tokens]), torch.arange(num_nodes).view(1, -1), *links,
                 torch.tensor(target), max_depth)
    num_accepted, accept_ids = int(got[1]), got[2][0].tolist()
    path = got[0][0, : num_accepted + 1].tolist()
    assert path == path_to_root(parents, path[-1])[::-1]
    assert accept_ids[: num_accepted + 1] == [target[node] for node in path]
    assert accept_ids[:num_accepted] == [tokens[node] for node in path[1:]]
    may_go_on = any(p == path[-1] and t == target[path[-1]] for p, t in zip(parents[1:], tokens[1:]))
    assert not may_go_on or num_accepted == max_depth


@pytest.mark.parametrize("place", PLACES)
@checked
@given(st.data(), st.integers(0, 3), st.integers(0, 2**32))
def test_rounds_put_together(place: tuple[str, str], data: Any, start: int, seed: int) -> None:
    """Whatever is drafted, the outputs of rounds joined are the target's own text, up to its first stop id.

    The target says step(token) after a token; a drafted tree has its tokens in some places and others elsewhere.
    """
    vocab, rounds = 11, 4
    generator = torch.Generator().manual_seed(seed)
    step = torch.randint(0, vocab, (vocab,), generator=generator)
    stop_ids = torch.tensor([int(step[3]), -1]) if data.draw(st.booleans()) else None
    token, text, finished = start, [], False
    for _ in range(rounds):
        _, parents = data.draw(forests())
        tokens = [token]
        for parent in parents[1:]:
            right = data.draw(st.booleans())
            tokens.append(int(step[tokens[parent]]) if right else data.draw(st.integers(0, vocab - 1)))
        ids = torch.tensor([tokens])
        links = [torch.tensor([x]) for x in links_of(parents)]
        accepted = served(place, "verify_greedy", ids, torch.arange(len(tokens)).view(1, -1), *links, step[ids],
                          len(tokens) - 1)
        output_ids, num_output, done, seed_ids, seed_state = served(
            place, "commit", *accepted, ids.view(-1, 1).float(), stop_ids=stop_ids)
        kept = int(num_output)
        assert output_ids[0, :kept].tolist() == accepted[2][0, :kept].tolist() and (output_ids[0, kept:] == -1).all()
        text += output_ids[0, :kept].tolist()
        token, finished = int(seed_ids), bool(done)
        assert token == text[-1]
        before = start if len(text) == 1 else text[-2]
        assert seed_state.item() == before  # the state of the row that predicted the seed: here, its token
        if finished:
            break
    exact, at = [], start
    for _ in text:
        at = int(step[at])
        exact.append(at)
    assert text == exact
    stops = [] if stop_ids is None else [int(stop_ids[0])]
    assert finished == any(t in stops for t in text) and not any(t in stops for t in text[:-1])


@pytest.mark.parametrize("place", PLACES)
@checked
@given(st.data(), st.integers(1, 3), st.integers(1, 4), st.booleans())
def test_commit_of_anything(place: tuple[str, str], data: Any, batch: int, width: int, stops: bool) -> None:
    """Counts and rows of any kind are clamped; the output is a start of accept_ids that no stop id lies inside."""
    def ints(values: Any, *shape: int) -> Tensor:
        count = math.prod(shape)
        drawn = data.draw(st.lists(values, min_size=count, max_size=count))
        return torch.tensor(drawn, dtype=torch.int64).view(shape).to(data.draw(index_dtypes))

    index, accepted = ints(st.integers(-1, 6) | odd_ints, batch, width), ints(st.integers(0, 4) | odd_ints, batch)
    ids, hidden = ints(st.integers(-1, 5), batch, width), torch.arange(5).view(5, 1).half()
    stop_ids = ints(st.integers(-1, 5), data.draw(st.integers(0, 3))) if stops else None
    output_ids, num_output, finished, seed_ids, seed_state = served(place, "commit", index, accepted, ids, hidden,
                                                                    stop_ids=stop_ids)
    stopping = {s for s in (stop_ids.tolist() if stop_ids is not None else []) if s >= 0}
    for b in range(batch):
        most, kept = min(max(int(accepted[b]), 0), width - 1) + 1, int(num_output[b])
        tokens = ids[b, :kept].tolist()
        assert 1 <= kept <= most
        assert output_ids[b].tolist() == tokens + [-1] * (width - kept)
        assert not stopping & set(tokens[:-1])
        assert bool(finished[b]) == (tokens[-1] in stopping)
        assert finished[b] or kept == most
        assert int(seed_ids[b]) == tokens[-1]
        assert seed_state[b].item() == min(max(int(index[b, kept - 1]), 0), 4)
