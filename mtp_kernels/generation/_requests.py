"""Requests: prompts taken out of their padding, limits and seeds, and what each has said so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..ops._checks import check_index, check_range, check_shape, fail, require

WHERE = "generate"


@dataclass
class Request:
    """One row of the batch."""

    id: int
    prompt: Tensor  # [length] int64, without padding
    max_new_tokens: int
    drafts: bool
    seed: int
    output: list[int] = field(default_factory=list)
    rounds: int = 0  # the prefill is the first
    finish_reason: str = ""  # "stop" or "length" once it has ended

    @property
    def remaining(self) -> int:
        return self.max_new_tokens - len(self.output)

    def add(self, token_ids: list[int], stopped: bool) -> list[int]:
        """Take a round's tokens, as many as are still wanted, and return these; notices the end."""
        room = self.remaining
        self.rounds += 1
        self.output += token_ids[:room]
        if stopped and len(token_ids) <= room:
            self.finish_reason = "stop"
        elif self.remaining == 0:
            self.finish_reason = "length"
        return token_ids[:room]


def make_requests(
    input_ids: Tensor,
    attention_mask: Tensor | None,
    max_new_tokens: int | Sequence[int],
    draft_enabled: bool | Sequence[bool],
    seed: int | Sequence[int],
    vocab: int,
    device: torch.device,
) -> list[Request]:
    """Check what generate() was given and take each row out of its padding."""
    check_shape(WHERE, "input_ids", input_ids, (None, None))
    check_index(WHERE, "input_ids", input_ids)
    batch = input_ids.size(0)
    prompts = _prompts(input_ids, attention_mask)
    for b, prompt in enumerate(prompts):
        bad = prompt[(prompt < 0) | (prompt >= vocab)]
        if bad.numel():
            fail(WHERE, "input_ids", f"token ids of 0 to {vocab - 1}", int(bad[0]), f"row {b}")
    limits = _each("max_new_tokens", max_new_tokens, batch)
    for limit in limits:
        check_range(WHERE, "max_new_tokens", limit, 1)
    drafts = _each("draft_enabled", draft_enabled, batch)
    # One seed for all gives request b the seed + (b << 32).
    seeds = [seed + (b << 32) for b in range(batch)] if isinstance(seed, int) else _each("seed", seed, batch)
    return [
        Request(b, prompts[b].to(device), limits[b], bool(drafts[b]), _int64(seeds[b])) for b in range(batch)
    ]


def _prompts(input_ids: Tensor, attention_mask: Tensor | None) -> list[Tensor]:
    rows = input_ids.cpu().long()
    if attention_mask is None:
        require(rows.size(1) >= 1, WHERE, "input_ids", "at least 1 token a request", 0)
        return list(rows)
    check_shape(WHERE, "attention_mask", attention_mask, tuple(input_ids.shape), "the shape of input_ids")
    prompts = []
    for b, (row, mask) in enumerate(zip(rows, attention_mask.cpu() != 0)):
        places = mask.nonzero()[:, 0]
        require(places.numel() > 0, WHERE, "attention_mask", "at least 1 token a request", 0, f"row {b}")
        first, last = int(places[0]), int(places[-1])
        whole = places.numel() == last - first + 1
        require(whole, WHERE, "attention_mask", "padding on the left and the right only", "a gap", f"row {b}")
        prompts.append(row[first : last + 1])
    return prompts


def _each(name: str, value: int | Sequence[int], batch: int) -> list[int]:
    """A value for each request from one for all or one a request."""
    if isinstance(value, int):
        return [value] * batch
    require(len(value) == batch, WHERE, name, f"one for all or {batch} of them", len(value), "the batch of input_ids")
    return [int(v) for v in value]


def _int64(number: int) -> int:
    return (number + 2**63) % 2**64 - 2**63
