"""One draft step against transformers' assistant, on the same weights and committed KV, in fp32 on the CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("transformers")

from parity_helpers import (
    Pair,
    hf_step,
    make_pair,
    random_kv,
    random_seeds,
    relative_error,
    small_config,
)

from mtp_kernels.draft import draft_step, hidden_step
from mtp_kernels.weights import PRESETS

WINDOW = 8
LENGTHS = (1, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW)
LIMIT = 1e-4


def check_step(pair: Pair, lengths: tuple[int, ...], shift: int = 0) -> None:
    """State, candidates' logits and best ids of one step agree, each request at position length + shift."""
    config = pair.weights.config
    kv = random_kv(lengths, config)
    ids, state = random_seeds(config, len(lengths))
    positions = torch.tensor(lengths) + shift
    logits, next_state = hf_step(pair.assistant, pair.embed, ids, state, positions, kv)
    views = kv.views(window_left=config.sliding_window)
    normed, got_state = hidden_step(pair.weights, views, ids[:, None], state[:, None], positions)
    assert relative_error(got_state[:, 0], next_state) < LIMIT
    if config.head == "dense":
        assert relative_error(normed[:, 0] @ pair.weights.lm_head.T, logits) < LIMIT
    else:
        check_candidates(pair, normed, logits)
    step = draft_step(pair.weights, views, ids[:, None], state[:, None], positions)
    assert step.token_ids[:, 0, 0].tolist() == logits.argmax(-1).tolist()


def check_candidates(pair: Pair, normed: torch.Tensor, logits: torch.Tensor) -> None:
    """The same tokens are candidates, with the same logits; transformers fills the others with the lowest - 1."""
    weights = pair.weights
    got, tokens = torch.ops.mtp.centroid_logits(
        normed, weights.centroids, weights.token_ordering, weights.lm_head, weights.num_active
    )
    expected = logits.gather(1, tokens[:, 0])
    assert relative_error(got[:, 0], expected) < LIMIT
    fill = expected.amin(1, keepdim=True) - 1
    others = logits.scatter(1, tokens[:, 0], fill.expand_as(expected))
    torch.testing.assert_close(others, fill.expand_as(logits))


@pytest.mark.parametrize("unified", [False, True])
@pytest.mark.parametrize("head", ["centroid", "dense"])
def test_every_length_around_the_window(head: str, unified: bool) -> None:
    pair = make_pair(head, WINDOW, seed=3, unified=unified)
    check_step(pair, LENGTHS)
    check_step(pair, LENGTHS, shift=-1)
    check_step(pair, LENGTHS, shift=100_000)


@pytest.mark.parametrize("window", [1, 5])
def test_other_windows(window: int) -> None:
    check_step(make_pair(window=window, seed=4), (1, 2, window, window + 1, window + 2))


def test_another_partial_rotation() -> None:
    config = small_config()
    sliding, full = config.attention
    pair = make_pair(config=replace(config, attention=(sliding, replace(full, num_pairs=64))), seed=5)
    check_step(pair, LENGTHS)


def test_a_real_size() -> None:
    """E2B's sizes but for the vocabulary, which is two tokens a centroid, and the window, so that it cuts."""
    config = replace(PRESETS["E2B"], vocab=4096, sliding_window=16)
    check_step(make_pair(config=config, seed=6), (1, 15, 16, 17, 48))


@pytest.mark.parametrize("wrong", [-1, 1])
def test_a_window_off_by_one_would_show(wrong: int) -> None:
    pair = make_pair(window=WINDOW)
    lengths = (WINDOW, WINDOW + 1, WINDOW + 2)
    kv = random_kv(lengths)
    ids, state = random_seeds(pair.weights.config, len(lengths))
    positions = torch.tensor(lengths)
    _, expected = hf_step(pair.assistant, pair.embed, ids, state, positions, kv)
    views = kv.views(window_left=WINDOW + wrong)
    _, got = hidden_step(pair.weights, views, ids[:, None], state[:, None], positions)
    errors = [relative_error(got[b, 0], expected[b]) for b in range(len(lengths))]
    differs = [False, wrong < 0, True]
    assert [e > 100 * LIMIT for e in errors] == differs and [e > LIMIT for e in errors] == differs
