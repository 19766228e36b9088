"""Every op at the sizes of all five checkpoints, batch 1 to 64, attention up to 65536 keys, against fp64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from harness import FLOATS, forced
from mtp_kernels.bench.case import Case
from mtp_kernels.bench.inputs import config_of
from mtp_kernels.bench.ops import bench_of
from mtp_kernels.bench.run_ops import OpProblem, as_tuple
from pairwise import pairwise
from real_attention import CONTEXTS, SLIDING, AttentionCase, check_attention

from mtp_kernels.ops import OPS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

DEVICE, IMPLEMENTATION = "cuda", "triton"
MODELS = ("E2B", "E4B", "12B", "26B-A4B", "31B")
BATCHES = (1, 3, 8, 64)
FULL = "full_attention"

AXES = {
    "layer": [(model, layer_type) for model in MODELS for layer_type in (SLIDING, FULL)],  # GQA 2, 4, 8, 16 at 512
    "context": CONTEXTS,
    "batch": BATCHES,
    "page_size": (1, 16, 64, 61),
    "table": ("exact", "wide", "flat"),
    "layout": ("NHD", "HND"),
    "fp8": (False, True),
    "rows": (1, 4),
    "dtype": (torch.bfloat16, torch.float16),
}


def attention_cases() -> list[AttentionCase]:
    """All pairs in 16 bits, and each layer once in fp32, whose products have no tensor cores."""
    cases = []
    for values in pairwise(AXES):
        model, layer_type = values.pop("layer")
        cases.append(AttentionCase(model, layer_type, **values))
    for i, (model, layer_type) in enumerate(AXES["layer"]):
        at = {"context": CONTEXTS[1 + i % 6], "batch": (1, 3)[i % 2], "page_size": (16, 61)[i % 2]}
        cases.append(AttentionCase(model, layer_type, **at, dtype=torch.float32))
    return cases


def op_cases() -> list[tuple[str, str, str]]:
    """(op, model, variant) of every use that a checkpoint makes of every other op."""
    return [
        (op, model, variant)
        for op in OPS
        for model in MODELS
        for variant in (bench_of(op).variants(config_of(model)) if op != "draft_attention" else ())
    ]


@pytest.fixture(autouse=True)
def gives_memory_back() -> Iterator[None]:
    """Other processes run the other tests on the same GPU."""
    with torch.no_grad():
        yield
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@pytest.mark.parametrize("case", attention_cases(), ids=lambda case: case.name)
def test_attention(case: AttentionCase) -> None:
    check_attention(case, DEVICE, IMPLEMENTATION)


@pytest.mark.parametrize(("op", "model", "variant"), op_cases())
def test_op(op: str, model: str, variant: str) -> None:
    """bf16 at every batch size; fp16 and fp32 at one each where the inputs' dtype follows the model's."""
    cases = [("bf16", batch) for batch in BATCHES]
    if bench_of(op).CHECK != "exact":
        cases += [("fp16", 8), ("fp32", 3)]
    wrong = {}
    for dtype, batch in cases:
        case = Case("op", op, model, batch, variant=variant, dtype=dtype, kv_dtype=dtype, warm=True)
        one = OpProblem(case, torch.device(DEVICE), 0)
        (call,) = one.sets
        with forced(IMPLEMENTATION):
            got = as_tuple(getattr(torch.ops.mtp, op)(*call.args, **call.kwargs))
        verdict = one.check(0, got)
        if not verdict.ok:
            wrong[f"{dtype}, batch {batch}"] = verdict
    assert not wrong, wrong


def test_the_cases_cover_what_they_should() -> None:
    """Every value of every axis with every layer of every model."""
    cases = attention_cases()
    for axis in ("context", "batch", "page_size", "table", "layout", "fp8", "rows"):
        met = {(case.model, case.layer_type, getattr(case, axis)) for case in cases}
        assert met >= {(*layer, value) for layer in AXES["layer"] for value in AXES[axis]}
    assert {case.dtype for case in cases} == set(FLOATS)
