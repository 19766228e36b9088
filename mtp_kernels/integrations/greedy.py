"""Greedy speculative decoding of one request, round by round: draft, verify, commit."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..draft import DraftTree, draft
from ..weights import AssistantWeights
from .target import TargetSession

ops = torch.ops.mtp


@dataclass(frozen=True)
class Round:
    """What one round added to the output.

    `token_ids` ends with the target's own token unless the round was cut; the first `num_accepted` were drafted.
    Seconds are wall clock, the device synchronised.
    """

    token_ids: list[int]
    num_accepted: int
    num_drafted: int
    draft_seconds: float
    verify_seconds: float


def decode_greedy(
    model: Any,
    weights: AssistantWeights,
    prompt_ids: Tensor,
    max_new_tokens: int,
    *,
    num_steps: int = 4,
    topk: int = 1,
    num_draft_tokens: int | None = None,
    stop_ids: Tensor | None = None,
) -> Iterator[Round]:
    """Yield rounds whose token ids, joined, are the target's greedy continuation of the prompt.

    The first round is the prefill: one token, none drafted. Ends at a stop id or at max_new_tokens exactly.

    Args:
        model: a `Gemma4ForCausalLM` in eval mode.
        weights: its assistant, in the model's dtype and on its device.
        prompt_ids: [length] int64, at least one token.
        stop_ids: [n] int64, or None.
    """
    sync = torch.cuda.synchronize if model.device.type == "cuda" else _nothing
    session = TargetSession(model)
    start = time.perf_counter()
    seed_ids, seed_state = session.prefill(prompt_ids)
    sync()
    first = seed_ids.tolist()
    yield Round(first, 0, 0, 0.0, time.perf_counter() - start)
    made = 1
    finished = stop_ids is not None and first[0] in stop_ids.tolist()
    while made < max_new_tokens and not finished:
        lengths = torch.tensor([session.committed], device=model.device)
        start = time.perf_counter()
        with torch.no_grad():
            tree = draft(
                weights, session.kv(), seed_ids, seed_state, lengths, num_steps, topk, num_draft_tokens, lengths
            )
        sync()
        drafted = time.perf_counter()
        target_ids, hidden = session.verify(tree)
        accepted, output, seed_ids, seed_state, finished = _commit(session, tree, target_ids, hidden, stop_ids)
        sync()
        done = time.perf_counter()
        output = output[: max_new_tokens - made]
        made += len(output)
        yield Round(output, min(accepted, len(output)), tree.draft_ids.size(1) - 1, drafted - start, done - drafted)


def _commit(
    session: TargetSession, tree: DraftTree, target_ids: Tensor, hidden: Tensor, stop_ids: Tensor | None
) -> tuple[int, list[int], Tensor, Tensor, bool]:
    """Accept, cut at a stop id, keep the accepted rows: (accepted, output ids, seed ids, seed state, finished)."""
    accept_index, num_accepted, accept_ids = ops.verify_greedy(
        tree.draft_ids,
        tree.retrieve_index,
        tree.retrieve_next_token,
        tree.retrieve_next_sibling,
        target_ids,
        tree.draft_ids.size(1) - 1,
    )
    output_ids, num_output, finished, seed_ids, seed_state = ops.commit(
        accept_index, num_accepted, accept_ids, hidden, stop_ids=stop_ids
    )
    kept = int(num_output[0])
    session.keep(accept_index[0, :kept])
    return int(num_accepted[0]), output_ids[0, :kept].tolist(), seed_ids, seed_state, bool(finished[0])


def greedy_reference(
    model: Any, prompt_ids: Tensor, max_new_tokens: int, stop_ids: list[int] | None = None
) -> list[int]:
    """The target's plain greedy continuation by transformers' own `generate`: what drafting must not change."""
    out = model.generate(
        prompt_ids[None],
        attention_mask=torch.ones_like(prompt_ids)[None],
        max_new_tokens=max_new_tokens,
        do_sample=False,
        eos_token_id=stop_ids or None,
        pad_token_id=0,
    )
    return out[0, prompt_ids.numel() :].tolist()


def _nothing() -> None:
    pass
