"""CUDA's kernel of draft_attention: against fp64, and the same bits however the work is shared out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attend_cases import LENGTHS, OPTIONS, absent, has_frontiers, heads_here, made, ways
from attention_cases import check_call
from harness import assert_same_bits, call, forced
from pairwise import pairwise
from real_attention import CONTEXTS, SLIDING, AttentionCase, check_attention

from mtp_kernels import _attention

OP, IMPLEMENTATION = "draft_attention", "cuda"
pytestmark = pytest.mark.skipif(bool(absent()), reason=absent() or "runs")

TREES = (("12B", 4), ("26B-A4B", 4), ("31B", 4), ("31B", 8), ("12B", 2))  # and rows


def real_cases() -> list[AttentionCase]:
    """All pairs of the sizes that are served, of the checkpoints' layers."""
    axes = {
        "layer": [
            *(("full_attention", *one) for one in (("E4B", 1), ("E4B", 2), ("E4B", 3), ("E4B", 4))),
            *(("full_attention", *one) for one in (("E2B", 1), ("E2B", 3), ("E2B", 4))),
            *(("full_attention", model, 1) for model in ("12B", "26B-A4B", "31B")),
            *(("full_attention", *one) for one in TREES if has_frontiers()),
            *((SLIDING, *one) for one in (("12B", 1), ("26B-A4B", 3), ("31B", 1), ("31B", 4))),
        ],  # and rows
        "context": (*CONTEXTS, 2049),
        "batch": (1, 3, 8, 64),
        "page_size": (1, 16, 64, 61),
        "table": ("exact", "wide", "flat"),
        "layout": ("NHD", "HND"),
    }
    found = []
    for values in pairwise(axes):
        layer_type, model, rows = values.pop("layer")
        found.append(AttentionCase(model, layer_type, rows=rows, **values))
    return found


@pytest.mark.parametrize("case", real_cases(), ids=lambda case: case.name)
def test_real_sizes(case: AttentionCase) -> None:
    check_attention(case, "cuda", IMPLEMENTATION)
    torch.cuda.empty_cache()


@pytest.mark.parametrize("heads", heads_here(), ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda lengths: f"{len(lengths)} requests")
@pytest.mark.parametrize("more", OPTIONS, ids=lambda more: ", ".join(more))
def test_small_sizes(heads: tuple[int, int, int, int], lengths: list[int], more: dict[str, Any]) -> None:
    scales = {name: torch.tensor(value, device="cuda") for name, value in more.items() if name.endswith("_scale")}
    args, kwargs = made(heads, lengths, **{**more, **scales})
    check_call(args, kwargs, IMPLEMENTATION)


@pytest.mark.parametrize("heads", heads_here(), ids=str)
@pytest.mark.parametrize("lengths", [[700], [33, 0, 64, 5000], [*[300] * 9, *[0] * 25, 1100, 7]], ids=len)
def test_the_same_bits_however_it_is_shared_out(
    heads: tuple[int, int, int, int], lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks, folds or two of these; in many blocks or one a KV head; each request alone; in a narrower table."""
    args, kwargs = made(heads, lengths, page_size=16)
    with forced(IMPLEMENTATION):
        expected = call(OP, *args, **kwargs)
        for way in ways(heads).values():
            for sms in (132, 5, 1):
                with monkeypatch.context() as patch:
                    patch.setattr(_attention, "spread", lambda *_, way=way: way)
                    patch.setattr(_attention, "count_sms", lambda device, sms=sms: sms)
                    assert_same_bits(call(OP, *args, **kwargs), expected)
        q, k, v, table, seq_lens, scale = args
        for b in {0, len(lengths) - 1, len(lengths) // 2}:
            alone = {**kwargs, "positions": kwargs["positions"][b : b + 1]}
            for pages in (max(1, -(-lengths[b] // 16)), table.size(1)):
                mine = (q[b : b + 1], k, v, table[b : b + 1, :pages], seq_lens[b : b + 1], scale)
                assert_same_bits(call(OP, *mine, **alone), expected[b : b + 1])


def test_ten_thousand_requests() -> None:
    """Of which blocks have to find their own."""
    lengths = [0 if b % 3 else 1 + b % 50 for b in range(10000)]
    args, kwargs = made((512, 1, 4, 2), lengths[:600], page_size=16)
    many = [t.repeat(17, *[1] * (t.dim() - 1))[:10000].contiguous() for t in (args[0], args[3], args[4])]
    positions = kwargs["positions"].repeat(17, 1)[:10000]
    with forced(IMPLEMENTATION):
        expected = call(OP, *args, **kwargs)
        got = call(OP, many[0], args[1], args[2], many[1], many[2], args[5], **{**kwargs, "positions": positions})
    assert_same_bits(got, torch.cat([expected] * 17)[:10000])


def test_captured() -> None:
    """New queries, lengths and tables at every replay."""
    args, kwargs = made((512, 1, 4, 2), [300, 0, 1100], page_size=16)
    start = [t.clone() for t in args[:5]]
    with forced(IMPLEMENTATION):
        expected = call(OP, *args, **kwargs)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = call(OP, *args, **kwargs)
        args[4].fill_(0)
        graph.replay()
        assert not got.any()
        args[4].copy_(start[4])
        graph.replay()
        assert_same_bits(got, expected)
        args[0].copy_(start[0].flip(-1))
        graph.replay()
        assert_same_bits(got, call(OP, *args, **kwargs))
    assert not torch.equal(got, expected)
