"""The centroid head in three kernels: score the centroids, rank them, take the logits of the best ones' tokens."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._early import let_others_start, wait_for_others
from ._launch import Launch
from ._rows import num_rows, row_arguments, row_offset
from ._topk import NO_ORDER, exact_sum, finite_or_zero, is_suppressed, no_nan, pack, precedes, suppress_arguments

GROUP = 16  # centroids a program of score_kernel; one that is not among the best groups needs no ranks
FEW_ROWS = 8  # whose scores every program may read; of 64 rows that is 134 MB a call
BLOCK_M = 16  # rows of normed that share a load of the centroids
BLOCK_T = 64  # tokens a program of candidate_kernel: two programs a centroid of Gemma 4, 32 KiB of the head each


def pieces(size: int) -> int:
    """Programs that share the `size` tokens of a centroid."""
    return triton.cdiv(size, BLOCK_T)


def selection_launches(normed: Tensor, centroid_weight: Tensor, num_active: int) -> tuple[list[Launch], Tensor]:
    """Launches that fill `chosen` [rows, num_active]: each row's best centroids, best first."""
    rows, num_centroids = num_rows(normed), centroid_weight.size(0)
    num_groups = triton.cdiv(num_centroids, GROUP)
    scores = normed.new_empty((rows, num_centroids), dtype=torch.float32)
    group_max = normed.new_empty((rows, num_groups), dtype=torch.float32)
    sizes = {"NUM_CENTROIDS": num_centroids, "NUM_GROUPS": num_groups, "GROUP": GROUP}
    score = Launch(
        score_kernel,
        (num_groups, triton.cdiv(rows, BLOCK_M)),
        {
            "normed": normed, **row_arguments("normed", normed), "centroid_weight": centroid_weight,
            "weight_stride": centroid_weight.stride(0), "scores": scores, "group_max": group_max, "num_rows": rows,
        },
        {**sizes, "HIDDEN": normed.size(-1), "BLOCK_M": BLOCK_M, "BLOCK_K": _block_k(normed)},
        num_warps=1,
    )
    launch, chosen = rank_launch(scores, group_max, GROUP, num_active)
    return [score, launch], chosen


def rank_launch(scores: Tensor, group_max: Tensor, group: int, num_active: int) -> tuple[Launch, Tensor]:
    """The launch that fills `chosen` [rows, num_active] from scores [rows, num_centroids] and their groups' largest.

    A group has a multiple of 4 centroids.
    """
    (rows, num_centroids), num_groups = scores.shape, group_max.size(1)
    chosen = scores.new_empty((rows, num_active), dtype=torch.int32)
    constants = {
        "NUM_CENTROIDS": num_centroids, "NUM_GROUPS": num_groups, "GROUP": group,
        "NUM_ACTIVE": num_active, "BLOCK_G": triton.next_power_of_2(num_groups),
        "BLOCK_C": triton.next_power_of_2(num_centroids), "HASTY": rows <= FEW_ROWS,
        "EARLY": False,
    }
    arguments = {"scores": scores, "group_max": group_max, "chosen": chosen}
    return Launch(rank_kernel, (rows, num_groups), arguments, constants), chosen


def candidate_launch(
    normed: Tensor, chosen: Tensor, token_ordering: Tensor, lm_head_weight: Tensor, num_centroids: int,
    centroid_ordered: bool, *, outputs: dict[str, Tensor], depth: int = 0, suppress_ids: Tensor | None = None
) -> Launch:
    """The candidates' logits: all of them (`logits`, `token_ids`), or with `depth` the partial results of the best."""
    rows, num_active = chosen.shape
    size = token_ordering.size(0) // num_centroids
    listed, num_suppressed = suppress_arguments(suppress_ids)
    names = ("logits", "token_ids", "part_values", "part_orders", "part_max", "part_sum")
    args: dict[str, Any] = {
        "normed": normed, **row_arguments("normed", normed), "chosen": chosen, "token_ordering": token_ordering,
        "lm_head_weight": lm_head_weight, "head_stride": lm_head_weight.stride(0), "suppress_ids": listed,
        **{name: outputs.get(name) for name in names},
    }
    constants = {
        "HIDDEN": normed.size(-1), "VOCAB": token_ordering.size(0), "SIZE": size, "NUM_ACTIVE": num_active,
        "PIECES": pieces(size), "ORDERED": centroid_ordered, "DEPTH": depth, "BLOCK_T": BLOCK_T,
        "BLOCK_K": _block_k(normed), "NUM_SUPPRESSED": num_suppressed, "EARLY": False,
    }
    return Launch(candidate_kernel, (rows, num_active * pieces(size)), args, constants)


def _block_k(normed: Tensor) -> int:
    """The whole hidden of the centroid drafters at once; less where products are not left to matrix instructions."""
    most = 32 if normed.element_size() == 4 else 256
    return max(16, min(most, triton.next_power_of_2(normed.size(-1))))


@triton.jit(do_not_specialize=["normed_size1", "normed_size2", "num_rows"])
def score_kernel(
    normed, normed_size1, normed_size2, normed_stride0, normed_stride1, normed_stride2, centroid_weight, weight_stride,
    scores, group_max, num_rows, HIDDEN: tl.constexpr, NUM_CENTROIDS: tl.constexpr, NUM_GROUPS: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Programs (a group of centroids, BLOCK_M rows): scores with NaN as -inf, and the largest of the group."""
    group = tl.program_id(0)
    c = group * GROUP + tl.arange(0, GROUP)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    m_mask = m < num_rows
    rows = normed + row_offset(m, normed_size1, normed_size2, normed_stride0, normed_stride1, normed_stride2)
    weights = centroid_weight + c.to(tl.int64) * weight_stride
    acc = tl.zeros([BLOCK_M, GROUP], tl.float32)
    for start in range(0, HIDDEN, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        k_mask = (k < HIDDEN)[None, :]
        x = tl.load(rows[:, None] + k[None, :], mask=m_mask[:, None] & k_mask, other=0.0)
        w = tl.load(weights[:, None] + k[None, :], mask=(c < NUM_CENTROIDS)[:, None] & k_mask, other=0.0)
        acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
    score = tl.where((c < NUM_CENTROIDS)[None, :], no_nan(acc), float("-inf"))
    at = m.to(tl.int64)
    mask = m_mask[:, None] & (c < NUM_CENTROIDS)[None, :]
    tl.store(scores + at[:, None] * NUM_CENTROIDS + c[None, :], score, mask=mask)
    tl.store(group_max + at * NUM_GROUPS + group, tl.max(score, 1), mask=m_mask)


@triton.jit
def rank_kernel(
    scores, group_max, chosen, NUM_CENTROIDS: tl.constexpr, NUM_GROUPS: tl.constexpr, GROUP: tl.constexpr,
    NUM_ACTIVE: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_C: tl.constexpr, HASTY: tl.constexpr,
    EARLY: tl.constexpr
):
    """Programs (a row, a group): the rank of each of the group's centroids, by counting those in front of it.

    A group behind NUM_ACTIVE others, by their best centroids, has none of the chosen: most programs end at once. Four
    counts share an integer, and the four their sum over the threads.
    """
    let_others_start(EARLY)
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    other = tl.arange(0, BLOCK_G)
    rival = tl.arange(0, BLOCK_C)
    scores += row * NUM_CENTROIDS
    group_max += row * NUM_GROUPS
    wait_for_others(EARLY)
    largest = tl.load(group_max + other, mask=other < NUM_GROUPS, other=float("-inf"))
    mine = tl.load(group_max + group)
    is_rival = rival < NUM_CENTROIDS
    if HASTY:  # does not wait to know whether it will be needed
        theirs = tl.load(scores + rival, mask=is_rival, other=float("-inf"))
    if tl.sum(precedes(largest, other, mine, group).to(tl.int32), 0) < NUM_ACTIVE:
        if not HASTY:
            theirs = tl.load(scores + rival, mask=is_rival, other=float("-inf"))
        own = ()  # all of them at once: a load behind each sum would be waited for
        for i in tl.static_range(GROUP):
            c = group * GROUP + i
            own += (tl.load(scores + c, mask=c < NUM_CENTROIDS, other=float("-inf")),)
        for first in tl.static_range(0, GROUP, 4):
            counts = tl.zeros([BLOCK_C], tl.int64)
            for i in tl.static_range(4):
                c = group * GROUP + first + i
                counts += precedes(theirs, rival, own[first + i], c).to(tl.int64) << (16 * i)
            ahead = tl.sum(counts, 0)
            for i in tl.static_range(4):
                c = group * GROUP + first + i
                place = (ahead >> (16 * i)) & 0xFFFF
                tl.store(chosen + row * NUM_ACTIVE + place, c, mask=(place < NUM_ACTIVE) & (c < NUM_CENTROIDS))


@triton.jit(do_not_specialize=["normed_size1", "normed_size2"])
def candidate_kernel(
    normed, normed_size1, normed_size2, normed_stride0, normed_stride1, normed_stride2, chosen, token_ordering,
    lm_head_weight, head_stride, suppress_ids, logits, token_ids, part_values, part_orders, part_max, part_sum,
    HIDDEN: tl.constexpr, VOCAB: tl.constexpr, SIZE: tl.constexpr, NUM_ACTIVE: tl.constexpr, PIECES: tl.constexpr,
    ORDERED: tl.constexpr, DEPTH: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
    NUM_SUPPRESSED: tl.constexpr, EARLY: tl.constexpr
):
    """Programs (a row, a piece of an active centroid): the logits of BLOCK_T tokens, given out or ranked."""
    let_others_start(EARLY)
    row = tl.program_id(0)
    part = tl.program_id(1)
    x_row = normed + row_offset(row, normed_size1, normed_size2, normed_stride0, normed_stride1, normed_stride2)
    within = part % PIECES * BLOCK_T + tl.arange(0, BLOCK_T)  # of the centroid's tokens
    wait_for_others(EARLY)
    centroid = tl.load(chosen + row.to(tl.int64) * NUM_ACTIVE + part // PIECES)
    is_token = within < SIZE
    place = centroid.to(tl.int64) * SIZE + within
    ids = tl.load(token_ordering + place, mask=is_token, other=0).to(tl.int64)
    ids = tl.minimum(tl.maximum(ids, 0), VOCAB - 1)
    head_rows = lm_head_weight + (place if ORDERED else ids) * head_stride
    acc = tl.zeros([1, BLOCK_T], tl.float32)
    for start in range(0, HIDDEN, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        w = tl.load(head_rows[:, None] + k[None, :], mask=is_token[:, None] & (k < HIDDEN)[None, :], other=0.0)
        x = tl.load(x_row + k, mask=k < HIDDEN, other=0.0)[None, :]
        acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
    values = tl.sum(acc, 0)  # [BLOCK_T], of the one row
    if NUM_SUPPRESSED > 0:
        values = tl.where(is_suppressed(ids, suppress_ids, NUM_SUPPRESSED), float("-inf"), values)

    if DEPTH == 0:
        result = row.to(tl.int64) * (NUM_ACTIVE * SIZE) + part // PIECES * SIZE + within
        tl.store(logits + result, values, mask=is_token)
        tl.store(token_ids + result, ids, mask=is_token)
    else:
        values = tl.where(is_token, no_nan(values), float("-inf"))
        orders = tl.where(is_token, pack(ids, place), NO_ORDER - BLOCK_T + tl.arange(0, BLOCK_T).to(tl.int64))
        at = row.to(tl.int64) * (NUM_ACTIVE * PIECES) + part
        top = tl.max(values, 0)
        if DEPTH == 1:
            tl.store(part_values + at, top)
            tl.store(part_orders + at, tl.min(tl.where(values == top, orders, NO_ORDER), 0))
        else:
            before = precedes(values[:, None], orders[:, None], values[None, :], orders[None, :])
            rank = tl.sum(before.to(tl.int32), 0)  # [BLOCK_T], of distinct candidates: each place once
            tl.store(part_values + at * DEPTH + rank, values, mask=rank < DEPTH)
            tl.store(part_orders + at * DEPTH + rank, orders, mask=rank < DEPTH)
        tl.store(part_max + at, top)
        tl.store(part_sum + at, exact_sum(tl.exp(values - finite_or_zero(top)), 0))
