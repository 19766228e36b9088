"""Which cases a run measures: the standard table, the quick one, or what the axes on the command line span."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace

from ..ops import OPS
from .case import Case
from .inputs import config_of
from .ops import bench_of

REAL = ("E2B", "E4B", "12B", "26B-A4B", "31B")
POINTS = ((1, 1024), (1, 8192), (1, 65536), (8, 8192), (64, 4096))  # (batch, context) of the standard table
OP_MODELS, OP_BATCHES = ("E4B", "31B"), (1, 64)
TREE = 4  # topk of a tree, and rows of its frontier


def standard(device: str, dtype: str) -> list[Case]:
    """Steps and attention of all five sizes, every other op at E4B and 31B, rounds, and a generation."""
    cases = [Case("step", "step", model, batch, context) for model in REAL for batch, context in POINTS]
    for model, (batch, context) in itertools.product(REAL, POINTS):
        for variant, rows in itertools.product(bench_of("draft_attention").variants(config_of(model)), (1, TREE)):
            cases.append(Case("op", "draft_attention", model, batch, context, rows, variant))
    for op, model, batch in itertools.product(OPS, OP_MODELS, OP_BATCHES):
        if op != "draft_attention":
            cases += [Case("op", op, model, batch, variant=v) for v in bench_of(op).variants(config_of(model))]
    for model, (batch, context) in itertools.product(OP_MODELS, (POINTS[0], POINTS[3])):
        cases += rounds(Case("round", "chain", model, batch, context))
    return _all(cases, device, dtype)


def quick(device: str, dtype: str) -> list[Case]:
    """About a minute: every op once, a few steps, a round as chain and as tree, a generation.

    On a CPU the dense head is a tiny one: Gemma 4's of 262144 x 1024 takes longer to make than all else.
    """
    model, dense = ("E2B", "tiny-dense") if device == "cpu" else ("E4B", "31B")
    points = ((1, 256), (1, 1024)) if device == "cpu" else ((1, 1024), (8, 1024), (1, 8192))
    cases = [Case("step", "step", model, batch, context) for batch, context in points]
    for op in OPS:
        size = model if bench_of(op).variants(config_of(model)) else dense
        cases += [Case("op", op, size, variant=v) for v in bench_of(op).variants(config_of(size))]
    cases += rounds(Case("round", "chain", model))
    return _all(cases, device, dtype)


def _all(cases: Sequence[Case], device: str, dtype: str) -> list[Case]:
    """Each once: without a GPU, what is captured and what is eager are the same."""
    placed = [replace(_on(case, device), dtype=dtype, kv_dtype=dtype) for case in cases]
    return list(dict.fromkeys(placed)) + generations()


def rounds(chain: Case) -> list[Case]:
    """Chain and tree of a size, each captured and eager."""
    tree = replace(chain, name="tree", rows=TREE, topk=TREE)
    return [replace(case, mode=mode) for case in (chain, tree) for mode in ("graph", "eager")]


def generations() -> list[Case]:
    """In fp32, in which a near tie does not make the text of two right decoders differ."""
    case = Case("generate", "generate", "pair", dtype="fp32", kv_dtype="fp32", mode="eager")
    return [replace(case, topk=topk) for topk in (1, TREE)]


def product(levels: Iterable[str], ops: Sequence[str], axes: dict[str, Sequence[object]], device: str) -> list[Case]:
    """Every combination of the axes, which are fields of Case by name."""
    cases = []
    for values in itertools.product(*axes.values()):
        sizes = dict(zip(axes, values))
        for level in levels:
            cases += _of_level(level, ops, sizes)
    return list(dict.fromkeys(_on(case, device) for case in cases))


def _of_level(level: str, ops: Sequence[str], sizes: dict[str, object]) -> list[Case]:
    if level == "op":
        base = [Case("op", op, **sizes) for op in ops]  # type: ignore[arg-type]
        return [replace(c, variant=v) for c in base for v in bench_of(c.name).variants(config_of(c.model))]
    if level == "step":
        return [replace(Case("step", "step", **sizes), rows=1)]  # type: ignore[arg-type]
    if level == "round":
        topk = int(sizes["rows"])  # type: ignore[call-overload]
        name = "chain" if topk == 1 else "tree"
        return [replace(Case("round", name, **sizes), topk=topk)]  # type: ignore[arg-type]
    return generations()


def _on(case: Case, device: str) -> Case:
    """Only a GPU has graphs."""
    return replace(case, mode="eager") if device == "cpu" else case
