"""generate(): a target and its drafter continue a batch of prompts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..draft import num_candidates
from ..ops._checks import check_device, check_dtype, check_range, fail, require, show_dtypes
from ..weights import AssistantWeights
from ._loop import GenerationChunk, Loop
from ._policy import RoundPolicy
from ._requests import make_requests
from ._sampling import Sampling
from ._statistics import GenerationStatistics
from ._target import Target

WHERE = "generate"


@dataclass(frozen=True)
class GenerationOutput:
    """The new tokens of each request, without its prompt; a stop id that ended one is its last token."""

    token_ids: list[list[int]]
    finish_reasons: list[str]  # "stop" or "length"
    statistics: GenerationStatistics

    def padded(self, pad_id: int) -> Tensor:
        """[batch, longest] int64, `pad_id` behind a request's last token.

        >>> GenerationOutput([[5, 6], [7]], ["length", "stop"], GenerationStatistics()).padded(0)
        tensor([[5, 6],
                [7, 0]])
        """
        longest = max(map(len, self.token_ids), default=0)
        rows = [ids + [pad_id] * (longest - len(ids)) for ids in self.token_ids]
        return torch.tensor(rows, dtype=torch.int64).view(len(rows), longest)


def generate(
    target: Any,
    assistant: Any,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    max_new_tokens: int | Sequence[int],
    num_steps: int = 4,
    topk: int = 1,
    num_draft_tokens: int | None = None,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int | Sequence[int] = 0,
    stop_ids: Sequence[int] | Tensor | None = None,
    callback: Callable[[GenerationChunk], None] | None = None,
    page_size: int = 16,
    policy: RoundPolicy | None = None,
    draft_enabled: bool | Sequence[bool] = True,
    suppress_ids: Sequence[int] | Tensor | None = None,
) -> GenerationOutput:
    """Continue every prompt of a batch, drafting with the assistant: the target's own text in fewer target runs.

    The reference serving loop: the target's KV lies in pages that the drafter reads by their block tables; every round
    drafts a chain or a tree (`draft`), verifies it in one run of the target, accepts (`verify_greedy` or
    `verify_sample`), cuts at a stop id and takes the next seed (`commit`), and keeps the accepted KV rows. A request
    that has ended leaves the batch and frees its pages. With temperature 0 the tokens are those of the target's greedy
    decoding; otherwise they have the distribution of sampling from the target. A request's tokens depend on nothing
    else in its batch, up to rounding in the target's own products, and but for a policy, which sees the whole batch.

    Args:
        target: transformers' Gemma4ForCausalLM (or Unified, or ForConditionalGeneration, for text), in eval mode.
        assistant: its `AssistantWeights`, or transformers' assistant, in the target's dtype and on its device.
        input_ids: [batch, length] int32 or int64, prompts of at least one token.
        attention_mask: [batch, length], 0 at padding, which may be on the left, on the right, or both; None for none.
        max_new_tokens: for all, or one a request; at least 1. Met exactly, unless a stop id comes first.
        num_steps: draft steps a round, the most that a policy may choose; 0 decodes with the target alone.
        topk: branches a step; 1 drafts a chain.
        num_draft_tokens: nodes of a round's tree with its root; None for all candidates.
        temperature: 0 takes the target's best token; above, tokens are drawn from softmax(logits / temperature).
        top_k: sample among the top_k best tokens only; 0 for all.
        top_p: of these, among the smallest set whose probabilities reach top_p.
        seed: of the draws. One for all gives request b the seed `seed + (b << 32)`; or one a request.
        stop_ids: tokens that end a request; they are the last it says.
        callback: called with a `GenerationChunk` for every request in every round, as its tokens come.
        page_size: rows of KV a page.
        policy: chooses the draft steps of each round, up to num_steps: a `DraftPolicy`, or anything that answers as
            `mtp_kernels.generation.RoundPolicy` does.
        draft_enabled: for all, or one a request: False decodes that request without drafts.
        suppress_ids: tokens that are never drafted; the target may still say them.

    Returns:
        GenerationOutput: token ids, why each request ended, and statistics.

    Raises:
        ArgumentError: a wrong argument, named with what it got and what it wants, before anything runs.
        CheckpointError: an assistant that is not supported.

    >>> from mtp_kernels import generate
    >>> from mtp_kernels.demo.pair import load_pair, pair_directory
    >>> pair = load_pair(pair_directory(), "centroid")
    >>> long, short = pair.encode("def mean(values):"), pair.encode("import os")
    >>> prompts = torch.tensor([long, [0] * (len(long) - len(short)) + short])  # 0 is padding
    >>> out = generate(pair.model, pair.weights, prompts, prompts != 0, max_new_tokens=8)
    >>> [len(ids) for ids in out.token_ids], out.finish_reasons
    ([8, 8], ['length', 'length'])
    """
    _check_shape_of_draft(num_steps, topk, num_draft_tokens)
    _check_sampling(temperature, top_k, top_p)
    check_range(WHERE, "page_size", page_size, 1)
    runner = Target(target)
    weights = _weights(assistant, runner, topk)
    stops, never = _ids("stop_ids", stop_ids, runner.device), _ids("suppress_ids", suppress_ids, runner.device)
    requests = make_requests(
        input_ids, attention_mask, max_new_tokens, draft_enabled, seed, runner.vocab, runner.device
    )
    most_nodes = num_draft_tokens or num_candidates(max(1, num_steps), topk) + 1
    runner.open_cache([r.prompt.numel() + r.max_new_tokens + most_nodes for r in requests], page_size)
    sampling = Sampling(float(temperature), top_k, float(top_p))
    loop = Loop(runner, weights, sampling, num_steps, topk, num_draft_tokens, stops, policy, callback, never)
    loop.run(requests)
    return GenerationOutput([r.output for r in requests], [r.finish_reason for r in requests], loop.statistics)


def _check_shape_of_draft(num_steps: int, topk: int, num_draft_tokens: int | None) -> None:
    check_range(WHERE, "num_steps", num_steps, 0)
    check_range(WHERE, "topk", topk, 1)
    if num_draft_tokens is not None:
        most = num_candidates(max(1, num_steps), topk) + 1
        check_range(WHERE, "num_draft_tokens", num_draft_tokens, 2, most, "root and candidates")


def _check_sampling(temperature: float, top_k: int, top_p: float) -> None:
    ok = math.isfinite(temperature) and temperature >= 0
    require(ok, WHERE, "temperature", "a number of at least 0", temperature)
    check_range(WHERE, "top_k", top_k, 0)
    require(0 < top_p <= 1, WHERE, "top_p", "a number above 0, at most 1", top_p)


def _weights(assistant: Any, target: Target, topk: int) -> AssistantWeights:
    if not isinstance(assistant, AssistantWeights):
        assistant = AssistantWeights.from_module(assistant, target.embed_weight)
    why = f"the target is {show_dtypes([target.dtype])}"
    check_dtype(WHERE, "assistant", assistant.pre_projection, (target.dtype,), why)
    check_device(WHERE, target.device, "target", assistant=assistant.pre_projection)
    for what, got, want in (
        ("backbone", assistant.backbone, target.config.hidden_size),
        ("vocabulary", assistant.vocab, target.vocab),
    ):
        require(got == want, WHERE, "assistant", f"{what} {want}", got, "the target's")
    check_range(WHERE, "topk", topk, 1, assistant.num_candidates, "the head's candidates")
    for layer in assistant.layers:
        if layer.layer_type not in target.layer_types:
            fail(WHERE, "target", f"a layer of {layer.layer_type}, which the assistant reads", list(target.layer_types))
    return assistant


def _ids(name: str, given: Sequence[int] | Tensor | None, device: torch.device) -> Tensor | None:
    """A list of token ids [n]; None for an empty one."""
    if given is None:
        return None
    ids = torch.as_tensor(given, device=device)
    if ids.numel() == 0:
        return None
    check_dtype(WHERE, name, ids, (torch.int32, torch.int64))
    return ids.long().flatten()
