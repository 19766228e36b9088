"""Problems for the tests of a centroid head behind its scores in CUDA, and what a right result is."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

KINDS = ["random", "ties", "equal", "few", "one place", "two each"]
CENTROIDS, ACTIVE, SIZE, HIDDEN, PART = 2048, 32, 64, 256, 32  # SIZE: tokens of a centroid
PARTS = ACTIVE * SIZE // PART


def head_problem(
    kind: str, rows: int, index: torch.dtype, device: str
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(what is given, the outputs) of mtp_cuda::candidates."""
    generator = torch.Generator(device).manual_seed(3)
    scores = torch.randn(rows, CENTROIDS, generator=generator, device=device)
    if kind == "ties":
        scores = scores.mul(4).round().div(4)
    elif kind == "equal":
        scores.fill_(1.5)
    elif kind == "few":  # most are what NaN becomes
        scores[:, torch.arange(CENTROIDS, device=device) % 100 != 3] = -torch.inf
    elif kind == "one place":  # all of them in the scores of four threads
        scores[:, 64:96] += 100
    elif kind == "two each":  # of a half warp's 128; but none of the last warp's in every other row, whose bound is low
        high = torch.arange(CENTROIDS, device=device) % 128 < 2
        scores[::2, high] += 100
        scores[1::2, high & (torch.arange(CENTROIDS, device=device) < CENTROIDS - 256)] += 100
    given = {
        "scores": scores,
        "normed": torch.randn(rows, HIDDEN, generator=generator, device=device).bfloat16(),
        "token_ordering": torch.randperm(CENTROIDS * SIZE, generator=generator, device=device).to(index),
        "lm_head": lm_head(device),
    }
    if kind == "ties":
        given["lm_head"] = given["lm_head"][::2].repeat_interleave(2, 0)  # equal logits too
    out = {
        "part_values": torch.full((rows, PARTS, 1), torch.nan, device=device),
        "part_orders": torch.full((rows, PARTS, 1), -1, device=device),
        "part_max": torch.full((rows, PARTS), torch.nan, device=device),
        "part_sum": torch.full((rows, PARTS), torch.nan, device=device),
    }
    return given, out


@functools.cache
def lm_head(device: str) -> Tensor:
    generator = torch.Generator(device).manual_seed(4)
    return torch.randn(CENTROIDS * SIZE, HIDDEN, generator=generator, device=device).bfloat16()


def check_parts(kind: str, given: dict[str, Tensor], out: dict[str, Tensor], ordered: bool) -> None:
    """The best token and the sum, against fp64 over the 32 best centroids; equal scores go by centroid."""
    rows, device = given["scores"].size(0), given["scores"].device
    chosen = given["scores"].sort(dim=1, descending=True, stable=True).indices[:, :ACTIVE]
    place = chosen.unsqueeze(-1) * SIZE + torch.arange(SIZE, device=device)  # [rows, ACTIVE, SIZE]
    ids = given["token_ordering"][place].long()
    weight = given["lm_head"][place if ordered else ids].double()
    logits = (weight @ given["normed"].double()[:, None, :, None]).flatten(1)  # [rows, ACTIVE * SIZE]
    by_part = logits.view(rows, PARTS, PART)
    torch.testing.assert_close(out["part_max"].double(), by_part.amax(-1), rtol=1e-5, atol=1e-4)
    assert torch.equal(out["part_values"][..., 0], out["part_max"])
    total = (out["part_max"].double() + out["part_sum"].double().log()).logsumexp(-1)
    torch.testing.assert_close(total, logits.logsumexp(-1), rtol=1e-5, atol=1e-4)
    order = out["part_orders"][..., 0]
    token, found_place = order >> 32, order & 0xFFFFFFFF
    assert torch.equal(given["token_ordering"][found_place].long(), token)
    if kind == "ties":
        best = by_part == by_part.amax(-1, keepdim=True)
        assert torch.equal(token, ids.view(rows, PARTS, PART).masked_fill(~best, 2**40).amin(-1))
    at = (ids.view(rows, PARTS, PART) == token.unsqueeze(-1)).int().argmax(-1, keepdim=True)
    found = by_part.gather(-1, at).squeeze(-1)
    torch.testing.assert_close(found, by_part.amax(-1), rtol=1e-5, atol=1e-4)
