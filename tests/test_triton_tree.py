"""The tree ops' Triton kernels compile for every architecture at the sizes of real drafts, without spills."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from mtp_kernels.triton_ops import commit, tree_build, tree_expand, verify_greedy, verify_sample
from mtp_kernels.triton_ops._launch import Launch
from triton_compile import ARCHITECTURES, SHARED_LIMIT, TYPES, Compiled, compile_launch

from mtp_kernels.weights import PRESETS

CHECKPOINTS = ("E2B", "E4B", "12B", "26B-A4B", "31B")
BATCH = 3
DRAFTS = [(4, 1, 5), (3, 4, 16), (6, 4, 32), (6, 8, 64), (10, 8, 128)]  # num_steps, topk, num_draft_tokens


def meta(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def launches() -> Iterator[Launch]:
    for steps, topk, num_nodes in DRAFTS:
        candidates = topk + (steps - 1) * topk**2
        first, later = (meta(BATCH, rows, topk, dtype=torch.float32) for rows in (1, topk))
        yield from tree_expand.plan(first, meta(BATCH, 1, topk), 0)[0]
        rows = (BATCH, topk)
        yield from tree_expand.plan(later, meta(BATCH, topk, topk, dtype=torch.int32), topk,
                                    scores=meta(*rows, dtype=torch.float32), frontier=meta(*rows))[0]
        scores = meta(BATCH, candidates, dtype=torch.float32)
        yield from tree_build.plan(meta(BATCH), scores, meta(BATCH, candidates), meta(BATCH, candidates), meta(BATCH),
                                   num_nodes)[0]
        draft = [meta(BATCH, num_nodes) for _ in range(4)]
        yield from verify_greedy.plan(*draft, meta(BATCH * num_nodes), steps)[0]
        uniform = meta(BATCH, num_nodes, dtype=torch.float32), meta(BATCH, dtype=torch.float32)
        for vocab in {PRESETS[name].vocab for name in CHECKPOINTS if num_nodes in (5, 64)}:
            probs = meta(BATCH, num_nodes, vocab, dtype=torch.bfloat16 if topk == 1 else torch.float32)
            yield from verify_sample.plan(*draft, probs if topk == 1 else probs.flatten(0, 1), *uniform, steps,
                                          draft_probs=probs if topk == 1 else None)[0]
        for backbone in {PRESETS[name].backbone for name in CHECKPOINTS}:
            path = meta(BATCH, steps + 1)
            yield from commit.plan(path, meta(BATCH), path, meta(BATCH * num_nodes, backbone, dtype=torch.bfloat16),
                                   stop_ids=meta(4))[0]


def signature(launch: Launch) -> str:
    """What the compiler sees of a launch: equal ones are compiled once."""
    def kind(value: Any) -> Any:
        if isinstance(value, Tensor):
            return TYPES[value.dtype]
        return value if value is None else (type(value), value % 16 == 0)

    args = {name: kind(value) for name, value in launch.args.items()}
    return f"{launch.kernel.__name__} {args} {launch.constants} {launch.num_warps} {launch.num_stages}"


DISTINCT = list({signature(launch): launch for launch in launches()}.values())
compiled: Callable[[int, int], Compiled] = cache(lambda which, arch: compile_launch(DISTINCT[which], arch))


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("which", range(len(DISTINCT)), ids=[launch.kernel.__name__ for launch in DISTINCT])
def test_compiles(which: int, arch: int) -> None:
    got = compiled(which, arch)
    assert got.shared <= SHARED_LIMIT[arch]
    assert got.spill_stores == 0


def test_the_batch_changes_only_the_grid() -> None:
    """A plan for another batch has the same tiles and constants: a request cannot depend on its neighbours."""
    def shapes(batch: int) -> list[Any]:
        uniform = meta(batch, 16, dtype=torch.float32), meta(batch, dtype=torch.float32)
        draft = [meta(batch, 16) for _ in range(4)]
        probs, path = meta(batch, 16, 262144, dtype=torch.bfloat16), meta(batch, 5)
        scores = meta(batch, 52, dtype=torch.float32)
        plans = (
            tree_expand.plan(meta(batch, 1, 4, dtype=torch.float32), meta(batch, 1, 4), 0),
            tree_build.plan(meta(batch), scores, meta(batch, 52), meta(batch, 52), meta(batch), 16),
            verify_greedy.plan(*draft, meta(batch, 16), 4),
            verify_sample.plan(*draft, probs, *uniform, 4),
            commit.plan(path, meta(batch), path, meta(batch * 16, 2560, dtype=torch.bfloat16)),
        )
        return [(launch.kernel, launch.constants, launch.num_warps, launch.grid[1:]) for made, _ in plans
                for launch in made]

    assert shapes(1) == shapes(7) == shapes(64)
