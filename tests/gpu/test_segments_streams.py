"""Two runners at once: each one's segments want all their blocks resident, and must still both end."""

from __future__ import annotations

import pytest
import torch
from harness import assert_same_bits
from segment_cases import weights_of
from test_captured import seeds, views

from mtp_kernels import CapturedDraft

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_two_runners_on_streams_of_other_priorities() -> None:
    weights = weights_of("small")
    kv = views(weights, 4)
    runners = [CapturedDraft(weights, kv, max_batch=4, num_steps=4) for _ in range(2)]
    expected = []
    for runner, seed in zip(runners, (1, 2)):
        ids, state, positions = seeds(weights, 4, seed)
        expected.append([t.clone() for t in runner.draft(kv, ids, state, positions, positions + 1)])
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream(priority=priority) for priority in (0, -1)]
    for _ in range(200):
        for runner, stream in zip(runners, streams):
            with torch.cuda.stream(stream):
                runner.replay(4)
    torch.cuda.synchronize()
    for runner, tree in zip(runners, expected):
        for one, two in zip(runner.replay(4), tree):
            assert_same_bits(one, two)
