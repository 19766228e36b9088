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
        if self.ok != other.ok:
            return other if self.ok else self
        if self.why or other.why:
            return self if self.why else other
        return self if self.error * other.allowed > other.error * self.allowed else other


def check_floats(
    got: Sequence[Tensor | None], exact: Sequence[Tensor], naive: Sequence[Tensor], atol: float = ATOL
) -> Verdict:
    """Every result against fp64; None is a result that the candidate does not give."""
    verdict = Verdict()
    if len(got) != len(exact):
        return Verdict(why=f"{len(got)} results instead of {len(exact)}")
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


def check_exact(got: Sequence[Tensor | None], exact: Sequence[Tensor], names: Sequence[str] = ()) -> Verdict:
    """Integers and masks equal the reference's; floats are within ATOL, relative beyond 1."""
    verdict = Verdict()
    if len(got) != len(exact):
        return Verdict(why=f"{len(got)} results instead of {len(exact)}")
    for place, (one, true) in enumerate(zip(got, exact)):
        name = names[place] if names else f"result {place}"
        if one is None:
            continue
        if one.shape != true.shape:
            return Verdict(why=f"{name} has shape {list(one.shape)} instead of {list(true.shape)}")
        if true.is_floating_point():
            same = one.double() == true.double()  # infinities too
            scale = true.double().abs().clamp(min=1.0)
            gap = torch.where(same, 0.0, (one.double() - true.double()).abs() / scale)
            if not torch.isfinite(gap).all():
                return Verdict(why=f"{name} is not finite where it should be, or finite where it should not")
            if gap.numel():
                verdict = verdict.worse(Verdict(gap.max().item(), ATOL))
        elif (differing := int((one.double() != true.double()).sum())) > 0:
            return Verdict(why=f"{name}: {differing} of {true.numel()} differ")
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
        naive_lm_head: Tensor | None = None,  # of a dense head whose dtype is not the candidate's
    ) -> None:
        if centroids is None or token_ordering is None:
            self.ids = None
            self.logits = _all_logits(normed, lm_head)  # [n, vocab]
            naive = F.linear(naive_normed, lm_head if naive_lm_head is None else naive_lm_head)
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
        # Like that of floats it grows with the largest result: plain PyTorch may add fp32 products in a better order.
        largest = max(1.0, self.logits.abs().max().item())
        self.allowed = 2 * (naive.double() - self.logits).abs().max().item() + ATOL * largest
        low, high = (self.logits.masked_fill(~m, -torch.inf).logsumexp(-1) for m in (self.certain, self.possible))
        least = self.logits.masked_fill(~self.possible, torch.inf).amin(-1)  # of a row in which nothing is certain
        low = torch.maximum(low, least)
        self.logsumexp, self.band = (low + high) / 2, (high - low) / 2  # each [n]

    def check(
        self,
        ids: Tensor,  # [n, k], best first
        logprobs: Tensor | None = None,  # [n, k]
        logsumexp: Tensor | None = None,  # [n]
        sums: Tensor | None = None,  # [n, k], where logprobs are differences of these
    ) -> Verdict:
        """The ranked tokens of each row, with the numbers that the candidate gives for them."""
        place, why = self._find(ids)
        if why:
            return Verdict(why=why)
        picked = self.logits.gather(1, place)
        best = self.logits.masked_fill(~self.certain, -torch.inf).topk(ids.size(1), -1).values
        verdict = Verdict((best - picked).clamp(min=0).max().item(), self.allowed)
        wide = self.allowed + self.band
        if logprobs is not None:
            rounding = torch.zeros_like(picked) if sums is None else ATOL * sums.double().abs()
            true = picked - self.logsumexp.unsqueeze(-1)
            verdict = verdict.worse(_near("logprob", logprobs, true, wide.unsqueeze(-1) + rounding))
        if logsumexp is not None:
            verdict = verdict.worse(_near("logsumexp", logsumexp, self.logsumexp, wide))
        return verdict

    def check_candidates(self, logits: Tensor, ids: Tensor) -> Verdict:
        """All candidates [n, m] with their logits: every certain token is there, no impossible one, values are near."""
        place, why = self._find(ids)
        if why:
            return Verdict(why=why)
        if not torch.equal(self.certain.gather(1, place).sum(1), self.certain.sum(1)):
            return Verdict(why="a row lacks a token of one of its best centroids")
        return _near("logit", logits, self.logits.gather(1, place), torch.full_like(self.logits[:, :1], self.allowed))

    def _find(self, ids: Tensor) -> tuple[Tensor, str]:
        """Where the ids [n, k] are among the columns of `logits`, and why they are not a choice of k candidates."""
        ids = ids.long()
        if self.ids is None:
            place = ids.clamp(0, self.logits.size(1) - 1)
            known = place == ids
        else:
            order = self.ids.argsort(-1)
            place = torch.searchsorted(self.ids.gather(1, order), ids.contiguous()).clamp(max=self.ids.size(1) - 1)
            place = order.gather(1, place)
            known = (self.ids.gather(1, place) == ids) & self.possible.gather(1, place)
        if not known.all():
            return place, f"token {int(ids[~known][0])} is no candidate of its row"
        if (ids.sort(-1).values.diff(dim=-1) == 0).any():
            return place, "a row has the same token twice"
        return place, ""


def _near(what: str, got: Tensor, true: Tensor, allowed: Tensor) -> Verdict:
    """The element that is worst beside what is allowed for it."""
    gap = (got.double() - true).abs()
    if not torch.isfinite(gap).all():
        return Verdict(why=f"a {what} is not finite")
    allowed = allowed.expand_as(gap)
    worst = (gap / allowed).argmax()
    return Verdict(gap.flatten()[worst].item(), allowed.flatten()[worst].item())


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
