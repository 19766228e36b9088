"""Synthetic records of the benchmark: a full sweep on a GPU with all peers, a quick run on a CPU."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from mtp_kernels.bench.case import Case, Result
from mtp_kernels.bench.record import PeerStatus, Record, Run

POINTS = ((1, 1024), (1, 8192), (1, 65536), (8, 8192), (64, 4096))
MODELS = ("E2B", "E4B", "12B", "26B-A4B", "31B")
SMALL_OPS = {"pre_project": "", "norm_linear": "q", "norm_geglu": "", "linear_norm_add": "down", "post_project": ""}
TREE_OPS = ("tree_expand", "tree_build", "verify_greedy", "commit")
# Overhead of a kernel in us and slowdown of the bytes, for each candidate; and kernels for an op.
COSTS = {
    "mtp": (2.4, 1.5, 9),
    "pytorch": (2.3, 1.4, 9),
    "torch.compile": (2.1, 1.1, 4),
    "flashinfer": (4.5, 1.05, 2),
    "vllm": (5.2, 1.9, 2),
    "sglang": (4.7, 1.6, 2),
    "transformers": (90.0, 2.0, None),
}
ATTENTION = ("mtp", "pytorch", "torch.compile", "flashinfer", "vllm", "sglang")
PLAIN = ("mtp", "pytorch", "torch.compile")
ENGINES = (*PLAIN, "flashinfer", "vllm", "transformers")


def run(**changes: object) -> Run:
    full = Run(
        command="mtp-kernels bench --sweep --out sweep.jsonl --plot plots",
        commit="0123456789abcdef0123456789abcdef01234567",
        date="2026-01-02T03:04:05Z",
        device="cuda",
        device_name="NVIDIA H200",
        machine={"driver": "580.1", "clocks": {"sm_mhz": 1980, "memory_mhz": 3201}, "versions": {"torch": "2.11.0"}},
        copy_bandwidth=4.23e12,
        read_bandwidth=4.38e12,
        flops_per_second=7.2e14,
        node_us=0.61,
        peers=(
            PeerStatus("flashinfer", "0.6.18"),
            PeerStatus("vllm", "0.33.0"),
            PeerStatus("sglang", why_absent="not installed [no wheel given]"),
        ),
    )
    return replace(full, **changes)  # type: ignore[arg-type]


def result(case: Case, candidate: str = "mtp", us: float | None = 10.0, **changes: object) -> Result:
    spread = {} if us is None else {"p10": us * 0.99, "p90": us * 1.02}
    made = Result(
        case=case,
        candidate=candidate,
        implementation="reference" if candidate == "mtp" else "",
        us=us,
        samples=30,
        **spread,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def full_record(models: Sequence[str] = MODELS) -> Record:
    """These models at five points, every level; FlashInfer lacks some sizes, one vLLM result is wrong."""
    record, noise = Record(run()), random.Random(0)
    for model in models:
        number = MODELS.index(model)
        weights = (12e6, 22e6, 300e6, 800e6, 900e6)[number]
        keys = (2, 4, 3, 8, 16)[number] * 1024
        for batch, context in POINTS:
            for variant, visible in (("sliding", min(context, 512)), ("full", context)):
                case = Case("op", "draft_attention", model, batch, context, variant=variant)
                kv = batch * visible * keys
                _measure(record, case, ATTENTION, kv, 4 * kv, 1, noise)
            step = weights + batch * (context + 1536) * keys
            _measure(record, Case("step", "step", model, batch, context), ENGINES, step, 2 * batch * weights, 11, noise)
            for name, topk in (("chain", 1), ("tree", 4)):
                case = Case("round", name, model, batch, context, rows=topk, topk=topk)
                _measure(record, case, ENGINES, 4 * step, 8 * batch * topk * weights, 45, noise)
        for batch in (1, 64):
            for name, variant in SMALL_OPS.items():
                case = Case("op", name, model, batch, variant=variant)
                _measure(record, case, PLAIN, weights / 10, 2 * batch * weights / 10, 1, noise)
            for name in TREE_OPS:
                _measure(record, Case("op", name, model, batch, rows=4, topk=4), PLAIN, 4000 * batch, 0, 1, noise)
    rounds = {"tokens_a_round": 2.71, "acceptance": 0.43}
    for candidate in ("mtp", "transformers"):
        case = Case("generate", "generate", "pair", dtype="fp32", kv_dtype="fp32", mode="eager")
        record.results.append(result(case, candidate, 5210.0, extra=rounds))
    return record


def quick_record() -> Record:
    """Two models at one point on a CPU in fp32: no peers but PyTorch, no graphs."""
    machine = {"cpu": "Some CPU with 2 cores", "versions": {"torch": "2.13.0"}}
    cpu = run(
        device="cpu",
        device_name="cpu",
        machine=machine,
        copy_bandwidth=1.4e10,
        read_bandwidth=1.1e10,
        flops_per_second=2.1e11,
        node_us=None,
        peers=(),
        command="mtp-kernels bench --quick",
    )
    record, noise = Record(cpu), random.Random(1)
    for model, weights in (("E4B", 44e6), ("pair", 2e6)):
        common = {"dtype": "fp32", "kv_dtype": "fp32", "mode": "eager"}
        for variant in ("sliding", "full"):
            case = Case("op", "draft_attention", model, variant=variant, **common)  # type: ignore[arg-type]
            _measure(record, case, PLAIN, 4e6, 16e6, 1, noise)
        case = Case("op", "norm_linear", model, variant="q", **common)  # type: ignore[arg-type]
        _measure(record, case, PLAIN, weights / 10, weights / 20, 1, noise)
        case = Case("step", "step", model, **common)  # type: ignore[arg-type]
        _measure(record, case, PLAIN, weights, weights / 2, 11, noise)
    return record


def _measure(
    record: Record, case: Case, names: tuple[str, ...], size: float, flops: float, ops: int, noise: random.Random
) -> None:
    floor = size / record.run.copy_bandwidth * 1e6
    for name in names:
        overhead, slowdown, kernels = COSTS[name]
        nodes = kernels * ops if kernels is not None and case.mode == "graph" else None
        us = ((kernels or 40) * ops * overhead + slowdown * floor) * noise.uniform(0.96, 1.04)
        made = result(case, name, us, bytes=int(size), flops=int(flops), floor_us=floor, nodes=nodes)
        if name == "flashinfer" and case.model == "E2B":
            made = replace(made, status="unsupported", why="num_kv_heads 1 [group size 4]", us=None, p10=None, p90=None)
        if name == "vllm" and (case.level, case.model, case.batch) == ("op", "12B", 64):
            made = replace(
                made, status="wrong", us=None, p10=None, p90=None, error=0.5, allowed=0.01, why="output differs"
            )
        record.results.append(made)
