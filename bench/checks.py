"""Whether a result is right: its deviation from fp64 against what plain PyTorch in the same dtype deviates.

DESIGN's rule is err(candidate, fp64) <= 2 * err(same-dtype PyTorch, fp64) + atol, and ids agree except where the fp64
logits of both choices lie closer than that. Ids, links and masks that no rounding decides are exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..reference._math import matmul

ATOL = 1e-6  # of a largest result of 1; two orders of fp32 sums differ by a few units in the last place
SPARE = 16  # centroids looked at beyond the active ones
CHUNK = 1 << 24  # elements of a head converted to fp64 at a time


@dataclass(frozen=True)
class Verdict:
    """The worst deviation found, beside what was allowed there."""

    error: float = 0.0
    allowed: float = ATOL
    why: str = ""  # what is wrong that no deviation measures

    @property
    def ok(self) -> bool:
        return not self.why and self.error <= self.allowed

    def worse(self, other: Verdict) -> Verdict:
        """The one that is further beyond, or nearer to, what is allowed."""
        if self.why or other.why:
            return self if self.why else other
        return self if self.error * other.allowed >= other.error * self.allowed else other


def check_floats(
    got: Sequence[Tensor | None], exact: Sequence[Tensor], naive: Sequence[Tensor], atol: float = ATOL
) -> Verdict:
    """Every result against fp64; None is a result that the candidate does not give."""
    verdict = Verdict()
    for one, true, plain in zip(got, exact, naive):
        if one is not None:
            verdict = verdict.worse(_floats(one, true, plain, atol))
    return verdict


def _floats(got: Tensor, exact: Tensor, naive: Tensor, atol: float) -> Verdict:
    if got.shape != exact.shape:
        return Verdict(why=f"shape {list(got.shape)} instead of {list(exact.shape)}")
    if got.numel() == 0:
        return Verdict()
    if not torch.isfinite(got).all():
        return Verdict(why="a result is not finite")
    largest = max(1.0, exact.abs().max().item())
    allowed = 2 * (naive.double() - exact).abs().max().item() + atol * largest
    return Verdict((got.double() - exact).abs().max().item(), allowed)


def check_exact(got: Sequence[Tensor | None], exact: Sequence[Tensor]) -> Verdict:
    """Integers and masks equal the reference's; floats are within ATOL, relative beyond 1."""
    verdict = Verdict()
    for place, (one, true) in enumerate(zip(got, exact)):
        if one is None:
            continue
        if one.shape != true.shape:
            return Verdict(why=f"result {place} has shape {list(one.shape)} instead of {list(true.shape)}")
        if true.is_floating_point():
            same = one.double() == true.double()  # infinities too
            scale = true.double().abs().clamp(min=1.0)
            gap = torch.where(same, 0.0, (one.double() - true.double()).abs() / scale)
            if gap.numel():
                worst = gap.nan_to_num(nan=torch.inf).max().item()
                verdict = verdict.worse(Verdict(worst, ATOL))
        elif not torch.equal(one.long(), true.long()):
            return Verdict(why=f"result {place}: {int((one.long() != true.long()).sum())} of {true.numel()} differ")
    return verdict


class HeadOracle:
    """The candidates of a head in fp64, with those that rounding may let in or out, for rows of the same head.

    A centroid whose score lies within rounding of the last active one's is possible, one further above is certain. A
    right result picks possible tokens only, none of them worse than the certain ones by more than rounding.
    """

    def __init__(
        self,
        normed: Tensor,  # [n, hidden] fp64
        naive_normed: Tensor,  # [n, hidden], what plain PyTorch in the candidate's dtype has there
        lm_head: Tensor,  # [vocab, hidden]
        centroids: Tensor | None = None,
        token_ordering: Tensor | None = None,
        num_active: int = 0,
        centroid_ordered: bool = False,
    ) -> None:
        if centroids is None or token_ordering is None:
            self.ids = None
            self.logits = _all_logits(normed, lm_head)  # [n, vocab]
            naive = F.linear(naive_normed, lm_head)
            self.possible = self.certain = torch.ones_like(self.logits, dtype=torch.bool)
        else:
            chosen, possible, certain = _active(normed, naive_normed, centroids, num_active)
            size = token_ordering.numel() // centroids.size(0)
            places = chosen.unsqueeze(-1) * size + torch.arange(size, device=chosen.device)
            places = places.flatten(1)  # [n, candidates]
            self.ids = token_ordering[places]
            self.possible, self.certain = (m.repeat_interleave(size, 1) for m in (possible, certain))
            rows = places if centroid_ordered else self.ids
            parts = [_gathered(normed[i], naive_normed[i], lm_head, rows[i]) for i in range(normed.size(0))]
            self.logits, naive = (torch.stack(part) for part in zip(*parts))
        self.allowed = 2 * (naive.double() - self.logits).abs().max().item() + ATOL
        low, high = (self.logits.masked_fill(~m, -torch.inf).logsumexp(-1) for m in (self.certain, self.possible))
        self.logsumexp, self.band = (low + high) / 2, ((high - low) / 2).max().item()

    def check(self, ids: Tensor, logprobs: Tensor | None = None, logsumexp: Tensor | None = None) -> Verdict:
        """ids [n, k], best first, with their logprobs and the logsumexp of the row where the candidate gives them."""
        picked, known = self._find(ids)  # [n, k]
        if not known.all():
            return Verdict(why=f"token {int(ids[~known][0])} is no candidate of its row")
        if ids.size(1) > 1 and (ids.sort(-1).values.diff(dim=-1) == 0).any():
            return Verdict(why="a row has the same token twice")
        best = self.logits.masked_fill(~self.certain, -torch.inf).topk(ids.size(1), -1).values
        verdict = Verdict((best - picked).clamp(min=0).max().item(), self.allowed)
        wide = self.allowed + self.band
        if logprobs is not None:
            gap = (logprobs.double() - (picked - self.logsumexp.unsqueeze(-1))).abs().max().item()
            verdict = verdict.worse(Verdict(gap, wide))
        if logsumexp is not None:
            verdict = verdict.worse(Verdict((logsumexp.double() - self.logsumexp).abs().max().item(), wide))
        return verdict

    def check_candidates(self, logits: Tensor, ids: Tensor) -> Verdict:
        """All candidates [n, m] with their logits: every certain token is there, no impossible one, values are near."""
        true, known = self._find(ids)
        if not known.all():
            return Verdict(why=f"token {int(ids[~known][0])} is no candidate of its row")
        if (ids.sort(-1).values.diff(dim=-1) == 0).any():
            return Verdict(why="a row has the same token twice")
        return Verdict((logits.double() - true).abs().max().item(), self.allowed)

    def _find(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """fp64 logits of the ids, and whether they may be candidates at all."""
        if self.ids is None:
            inside = (ids >= 0) & (ids < self.logits.size(1))
            return self.logits.gather(1, ids.clamp(0, self.logits.size(1) - 1)), inside
        order = self.ids.argsort(-1)
        place = torch.searchsorted(self.ids.gather(1, order), ids.contiguous()).clamp(max=self.ids.size(1) - 1)
        place = order.gather(1, place)
        return self.logits.gather(1, place), (self.ids.gather(1, place) == ids) & self.possible.gather(1, place)


def _active(
    normed: Tensor, naive_normed: Tensor, centroids: Tensor, num_active: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The best centroids [n, active + SPARE], and which of them are possible and certain."""
    scores = matmul(normed, centroids.double().t())
    tolerance = 2 * (F.linear(naive_normed, centroids).double() - scores).abs().max().item() + ATOL
    looked_at = min(num_active + SPARE, centroids.size(0))
    best = scores.topk(looked_at, -1)
    last = best.values[:, num_active - 1 : num_active]
    if num_active == centroids.size(0):
        everything = torch.ones_like(best.indices, dtype=torch.bool)
        return best.indices, everything, everything
    first_out = best.values[:, num_active : num_active + 1]
    return best.indices, best.values >= last - tolerance, best.values > first_out + tolerance


def _gathered(normed: Tensor, naive_normed: Tensor, lm_head: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Logits of one row's candidates in fp64, and in the dtype of the head."""
    head = lm_head[rows]
    return matmul(head.double(), normed), torch.mv(head, naive_normed)


def _all_logits(normed: Tensor, lm_head: Tensor) -> Tensor:
    step = max(1, CHUNK // lm_head.size(1))
    return torch.cat([matmul(normed, part.double().t()) for part in lm_head.split(step)], -1)
