"""What tune_attention.py tries: the layers' sizes, their shapes, and each configuration with its ways to run there."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from mtp_kernels.bench.inputs import Inputs
from mtp_kernels.triton_ops import draft_attention as attention

PAGE, SMS = 16, 132
PRESENT = attention.config
SPREAD = attention.spread
RUNS = (1, 2, 3, 4, 5, 6, 8, 11, 16, 32)  # parts a program


@dataclass(frozen=True)
class Shape:
    batch: int
    context: int


@dataclass(frozen=True)
class Family:
    """Sizes of a layer, and what is tried: (block_n, slabs, num_warps, stages, those of folds and runs where they are
    others) and (chunk_weight, max_chunks, fold)."""

    name: str
    head_dim: int
    heads: tuple[int, int]  # query, KV
    window: int  # 0: none
    rows: int
    shapes: tuple[Shape, ...]
    tries: tuple[tuple[tuple[int, ...], tuple[float, int, int]], ...]

    def present(self) -> Any:
        dtype = torch.bfloat16
        return PRESENT(self.head_dim, self.rows, *self.heads, dtype, dtype, 90)

    def configs(self) -> list[Any]:
        present = self.present()
        found = [present]
        for (block_n, slabs, warps, stages, *more), (weight, chunks, fold) in self.tries:
            c = replace(
                present, block_n=block_n, slabs=slabs, v_slabs=min(slabs, present.v_slabs), num_warps=warps,
                stages=stages, fold_stages=more[0] if more else stages, run_stages=more[0] if more else stages,
                chunk_weight=weight, max_chunks=chunks, fold=fold,
            )
            if c not in found:
                found.append(c)
        return found


def cross(*pairs: tuple[list[tuple[int, ...]], list[tuple[float, int, int]]]) -> tuple[Any, ...]:
    return tuple((tile, rule) for tiles, rules in pairs for tile in tiles for rule in rules)


A, B, C, E = (16, 4, 4, 5), (32, 4, 4, 3), (32, 8, 8, 3), (16, 4, 4, 7, 5)
FULL_ONE_HEAD = cross(([B], [(0.5, 128, 4), (0.5, 256, 8), (0.5, 256, 4), (1.0, 128, 4)]))
FULL_TWO_HEADS = cross(([B], [(0.5, 128, 4), (1.0, 128, 4), (1.0, 128, 8)]))
FULL_12B = cross(([E], [(1.0, 128, 4), (0.5, 128, 8), (2.0, 128, 4)]), ([A, B, C], [(1.0, 128, 4)]))
FULL_31B = cross(([E], [(2.0, 64, 4), (4.0, 64, 4), (1.0, 64, 4)]), ([B], [(2.0, 64, 4), (2.0, 64, 8)]))
SLIDING_31B = cross(([(32, 1, 4, 5)], [(2.0, 8, 4), (2.0, 16, 4), (2.0, 16, 8)]), ([(32, 1, 4, 3)], [(2.0, 8, 4)]))
SLIDING_26B = cross(([(32, 1, 4, 5, 3)], [(2.0, 16, 4), (2.0, 16, 2)]), ([(32, 1, 4, 3)], [(2.0, 16, 4)]))
SLIDING_E4B = cross(([(32, 1, 4, 3)], [(1.0, 128, 8)]), ([(32, 1, 4, 5)], [(1.0, 128, 4)]))
SMALL, MIDDLE, LONG = Shape(8, 1024), Shape(8, 8192), Shape(8, 65536)
ONE, MANY = Shape(1, 65536), Shape(64, 4096)
FAMILIES = (
    Family("E4B_full", 512, (4, 2), 0, 1, (SMALL, MIDDLE, ONE, MANY), FULL_TWO_HEADS),
    Family("E2B_full", 512, (4, 1), 0, 1, (SMALL, MIDDLE, LONG, ONE, MANY), FULL_ONE_HEAD),
    Family("12B_full", 512, (16, 1), 0, 1, (SMALL, MIDDLE, LONG, ONE, MANY), FULL_12B),
    Family("31B_full", 512, (32, 4), 0, 1, (SMALL, MIDDLE, ONE, MANY), FULL_31B),
    Family("31B_sliding", 256, (32, 16), 1024, 1, (MIDDLE, MANY), SLIDING_31B),
    Family("26B_sliding", 256, (16, 8), 1024, 1, (MIDDLE, MANY), SLIDING_26B),
    Family("26B_full", 512, (16, 2), 0, 1, (SMALL, MIDDLE, ONE, MANY), FULL_TWO_HEADS),
    Family("E4B_sliding", 256, (4, 2), 512, 1, (MIDDLE, MANY), SLIDING_E4B),
)


@dataclass
class Arguments:
    """The arguments of plan(), as a round gives them."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    visible: int
    bytes: int


def make_inputs(family: Family, shape: Shape, device: str, dtype: torch.dtype = torch.bfloat16) -> Arguments:
    (qo, kv), dim, batch = family.heads, family.head_dim, shape.batch
    visible = min(shape.context, family.window) if family.window else shape.context
    pairs = dim // 2 if family.window else dim // 8
    theta = 1e4 if family.window else 1e6
    kwargs: dict[str, Any] = {"window_left": family.window - 1 if family.window else -1}
    if device == "meta":
        pages = batch * -(-shape.context // PAGE)
        q = torch.empty(batch, family.rows, qo, dim, dtype=dtype, device=device)
        k, v = (torch.empty(pages, PAGE, kv, dim, dtype=dtype, device=device) for _ in range(2))
        table = torch.empty(batch, pages // batch, dtype=torch.int32, device=device)
        lengths = torch.empty(batch, dtype=torch.int32, device=device)
        norm = torch.empty(dim, dtype=dtype, device=device)
    else:
        made = Inputs(device, dtype)
        q = made.normal(batch, family.rows, qo, dim)
        # Small keys: at a deviation of 1 attention is nearly a choice of one.
        std = 1.5 * dim**-0.5
        k, v, table, lengths = made.paged_cache(batch, shape.context, kv, dim, PAGE, "NHD", dtype, k_std=std)
        norm = made.norm(dim)
    freq = theta ** (-torch.arange(pairs, device=device, dtype=torch.float32) * 2 / dim)
    positions = torch.full((batch,), shape.context - 1, dtype=torch.int64, device=device)
    kwargs |= {"q_norm_weight": norm, "rope_inv_freq": freq, "positions": positions, "capability": 90}
    size = 2 * q.numel() * q.element_size() + batch * visible * kv * dim * 2 * k.element_size()
    return Arguments((q, k, v, table, lengths, 1.0), kwargs, visible, size)


def plan(inputs: Arguments, c: Any, spread: tuple[int, int], early: bool = True) -> tuple[list[Any], torch.Tensor]:
    """The launches of a round: as fused.py has them, of so many chunks a part and parts a program."""
    attention.config, attention.spread = lambda *_: c, lambda *_: spread
    try:
        launches, output = attention.plan(*inputs.args, **inputs.kwargs)
    finally:
        attention.config, attention.spread = PRESENT, SPREAD
    return [one.with_early(early) for one in launches], output


@dataclass
class Try:
    """A configuration on a shape, in one of its ways."""

    c: Any
    spread: tuple[int, int]  # chunks a part, parts a program
    way: str
    keys: int  # a part
    parts: int
    programs: int  # with keys or, where the host's bound is above the chunks that there are, without
    about: dict[str, Any] = field(default_factory=dict)
    launches: list[Any] = field(default_factory=list)
    output: Any = None
    graphs: list[Any] = field(default_factory=list)
    samples: list[list[float]] = field(default_factory=lambda: [[], []])
    nodes: int = 20

    @property
    def times(self) -> list[float]:
        return [statistics.median(s) if s else math.inf for s in self.samples]

    def label(self) -> str:
        c = self.c
        tile = f"n{c.block_n} s{c.slabs} w{c.num_warps} st{c.stages}"
        return f"{tile:<15} cw{c.chunk_weight:g} mc{c.max_chunks} f{c.fold} {self.way:<3}"

    def same(self) -> tuple[Any, ...]:
        """Equal in tries that run the same launches on this shape, all of whose requests are as long."""
        c = self.c
        tile = (c.block_n, c.slabs, c.num_warps, c.stages, c.fold_stages, c.run_stages)
        return (*tile, c.fold, self.spread, self.keys, self.programs)

    def as_json(self) -> dict[str, Any]:
        names = ("block_n", "slabs", "num_warps", "stages", "chunk_weight", "max_chunks", "fold")
        return {**{n: getattr(self.c, n) for n in names}, "way": self.way, "keys": self.keys, "parts": self.parts,
                "programs": self.programs, "attend_us": self.times[0], "both_us": self.times[1], **self.about}


def tries_of(family: Family, shape: Shape, inputs: Arguments) -> list[Try]:
    found: list[Try] = []
    present = family.present()
    blocks = shape.batch * family.heads[1] * -(-family.rows // present.block_rows)
    for c in family.configs():
        chunks = attention.count_chunks(inputs.visible, c)
        keys = attention.most_keys_a_chunk(inputs.visible, c)
        folds = -(-chunks // c.fold)
        queries = min(family.rows, c.block_rows) * (family.heads[0] // family.heads[1])
        present_way = SPREAD(blocks, chunks, keys, queries, SMS, c) if c == present else None
        for each, parts in ((1, chunks), (c.fold, folds)):
            for run in RUNS:
                programs = blocks * -(-parts // run)
                now = (each, run) == present_way
                some = 100 <= programs <= (12 if run == 1 else 4.1) * SMS and run <= parts
                if now or (some and (parts > 1 or each > 1)):
                    way = "now" if now else f"{'c' if each == 1 else 'f'}{run}"
                    span = keys * each
                    found.append(Try(c, (each, run), way, span, -(-inputs.visible // span), programs))
    return found
