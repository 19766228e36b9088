"""Where generations end: stop ids inside a round, max_new_tokens to the token, and what is streamed on the way."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("transformers")

from generation_cases import VOCAB, pad, tiny_greedy, tiny_pair

from mtp_kernels import generate
from mtp_kernels.generation import GenerationChunk

pytestmark = pytest.mark.usefixtures("one_thread")
LENGTHS, LONGEST = (1, 6, 9, 14), 12


@functools.cache
def plain(row: int) -> tuple[int, ...]:
    return tuple(tiny_greedy(tiny_pair().target, prompt(row), LONGEST))


def prompt(row: int) -> torch.Tensor:
    return torch.randint(VOCAB, (LENGTHS[row],), generator=torch.Generator().manual_seed(row))


def cut(tokens: tuple[int, ...], stops: set[int], limit: int) -> tuple[list[int], str]:
    """What a request says: up to its first stop id, at most `limit` tokens; and why it ended."""
    for i, token in enumerate(tokens[:limit]):
        if token in stops:
            return list(tokens[: i + 1]), "stop"
    return list(tokens[:limit]), "length"


@st.composite
def shapes(draw: st.DrawFn) -> dict[str, Any]:
    steps, topk = draw(st.integers(0, 4)), draw(st.sampled_from([1, 1, 2, 4]))
    most = 1 + topk + (max(steps, 1) - 1) * topk**2
    nodes = draw(st.none() | st.integers(2, min(most, 16)))
    return {"num_steps": steps, "topk": topk, "num_draft_tokens": nodes, "page_size": draw(st.sampled_from([1, 3, 16]))}


@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(shapes(), st.sets(st.integers(0, VOCAB - 1), max_size=4), st.data())
def test_nothing_beyond_a_stop_or_the_limit(shape: dict[str, Any], stops: set[int], data: st.DataObject) -> None:
    """Every request ends where its greedy text does, and its chunks, joined, are its text."""
    pair = tiny_pair()
    rows = data.draw(st.lists(st.integers(0, len(LENGTHS) - 1), min_size=1, max_size=4), label="rows")
    limits = [data.draw(st.integers(1, LONGEST), label="max_new_tokens") for _ in rows]
    chunks: list[GenerationChunk] = []
    out = generate(
        pair.target, pair.weights, *pad([prompt(r) for r in rows]), max_new_tokens=limits, stop_ids=sorted(stops),
        callback=chunks.append, **shape,
    )
    for b, (row, limit) in enumerate(zip(rows, limits)):
        wanted, reason = cut(plain(row), stops, limit)
        assert (out.token_ids[b], out.finish_reasons[b]) == (wanted, reason)
        mine = [c for c in chunks if c.request == b]
        assert [token for c in mine for token in c.token_ids] == wanted
        assert [c.finish_reason for c in mine] == [""] * (len(mine) - 1) + [reason]
        assert all(c.token_ids for c in mine)


@settings(max_examples=10, deadline=None, derandomize=True, database=None)
@given(shapes(), st.sets(st.integers(0, VOCAB - 1), min_size=1, max_size=3), st.integers(0, 2**40))
def test_sampled_texts_end_the_same_way(shape: dict[str, Any], stops: set[int], seed: int) -> None:
    """A stop changes nothing before it: the same seed without stop ids begins alike."""
    pair = tiny_pair()
    ids, mask = pad([prompt(row) for row in range(3)])
    options: dict[str, Any] = {"max_new_tokens": 9, "temperature": 1.0, "seed": seed, **shape}
    free = generate(pair.target, pair.weights, ids, mask, **options)
    out = generate(pair.target, pair.weights, ids, mask, stop_ids=torch.tensor(sorted(stops)), **options)
    for stopped, reason, whole in zip(out.token_ids, out.finish_reasons, free.token_ids):
        assert (stopped, reason) == cut(tuple(whole), stops, 9)


def test_a_stop_in_the_middle_of_a_round() -> None:
    """The stop is a drafted token with accepted ones behind it: they are dropped."""
    pair = tiny_pair()
    options: dict[str, Any] = {"max_new_tokens": LONGEST, "num_steps": 4, "topk": 4}
    for row in range(len(LENGTHS)):
        chunks: list[GenerationChunk] = []
        generate(pair.target, pair.weights, prompt(row)[None], callback=chunks.append, **options)
        said: list[int] = []
        for chunk in chunks:
            inside = [t for t in chunk.token_ids[:-1] if t not in said]
            if inside:
                out = generate(pair.target, pair.weights, prompt(row)[None], stop_ids=inside[:1], **options)
                assert out.token_ids[0] == list(plain(row)[: plain(row).index(inside[0]) + 1])
                assert out.finish_reasons == ["stop"]
                return
            said += chunk.token_ids
    pytest.fail("no round of several tokens")


def test_the_limit_comes_before_a_stop_in_the_same_round() -> None:
    """The stop that a round reached beyond max_new_tokens was never said."""
    pair, rows, limits, stops = tiny_pair(), [], [], []
    for row in range(len(LENGTHS)):
        for limit in range(1, LONGEST):
            if plain(row)[limit] not in plain(row)[:limit]:
                rows.append(row)
                limits.append(limit)
                stops.append(plain(row)[limit])
    assert len(rows) > 10
    beyond = 0
    for row, limit, stop in zip(rows, limits, stops):
        options: dict[str, Any] = {"topk": 4, "num_steps": 3, "num_draft_tokens": 16, "stop_ids": [stop]}
        out = generate(pair.target, pair.weights, prompt(row)[None], max_new_tokens=limit, **options)
        assert (out.token_ids, out.finish_reasons) == ([list(plain(row)[:limit])], ["length"])
        chunks: list[GenerationChunk] = []
        generate(pair.target, pair.weights, prompt(row)[None], max_new_tokens=99, callback=chunks.append, **options)
        beyond += len(chunks[-1].token_ids) > 1  # the stop ended a round of several tokens
    assert beyond > 2


def test_padded_output() -> None:
    pair = tiny_pair()
    out = generate(pair.target, pair.weights, *pad([prompt(0), prompt(1)]), max_new_tokens=[2, 5])
    padded = out.padded(99)
    assert padded.tolist() == [out.token_ids[0] + [99] * 3, out.token_ids[1]]


def test_a_callback_that_raises_stops_the_generation() -> None:
    pair = tiny_pair()

    def refuse(chunk: GenerationChunk) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate(pair.target, pair.weights, prompt(0)[None], max_new_tokens=5, callback=refuse)
    assert generate(pair.target, pair.weights, prompt(0)[None], max_new_tokens=5).token_ids == [list(plain(0)[:5])]
