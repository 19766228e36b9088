"""What is measured: a case, the inputs of one call, a candidate that runs it, and the result as the record holds it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..weights import PRESETS

LEVELS = ("op", "step", "round", "generate")
MODELS = (*PRESETS, "pair")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp8": torch.float8_e4m3fn}


class Unsupported(Exception):
    """Why a candidate does not run a case: listed in the record, without a time."""


@dataclass(frozen=True)
class Case:
    """One row of the table: what is computed, at which sizes. Candidates run the same case on the same inputs."""

    level: str  # of LEVELS
    name: str  # the op; or "step", "chain", "tree", "generate"
    model: str  # of MODELS
    batch: int = 1
    context: int = 1024  # committed keys a request
    rows: int = 1  # queries a request: 1 in a chain, topk in a tree's frontier
    variant: str = ""  # attention: the layer type; a projection: which of the layer's
    dtype: str = "bf16"
    kv_dtype: str = "bf16"
    page_size: int = 16
    layout: str = "NHD"
    mode: str = "graph"  # "graph": replays of a CUDA graph; "eager": calls from Python
    warm: bool = False  # of an op: the same inputs in every call, instead of sets that together exceed the cache
    num_steps: int = 4  # of a round
    topk: int = 1

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def torch_kv_dtype(self) -> torch.dtype:
        return DTYPES[self.kv_dtype]


@dataclass(frozen=True)
class Call:
    """One set of inputs of the public op."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Candidate:
    """One way to run a case.

    `bind` takes the inputs of one call (a Call for an op, else what the level's problem holds), prepares what a user
    prepares ahead of time (plans, workspaces, tables), and returns the function that is timed. `results` turns what
    that returns into the public op's results, outside the timing; None stands for a result that the candidate lacks.
    """

    name: str  # "mtp", "pytorch", "torch.compile", "flashinfer", "vllm", "sglang", "transformers"
    bind: Callable[[Any], Callable[[], Any]]
    results: Callable[[Any], tuple[Tensor | None, ...]] = lambda raw: raw if isinstance(raw, tuple) else (raw,)
    implementation: str = ""  # of ours: "reference", "cpu", "triton" or "cuda"
    capturable: bool = True  # into a CUDA graph


@dataclass(frozen=True)
class Result:
    """One candidate on one case, as the record holds it: times in microseconds of one call (of one step, of one round;
    of one token for generate)."""

    case: Case
    candidate: str
    implementation: str = ""
    status: str = "ok"  # "ok", "wrong" (its result), "error" (it raised), "unsupported"
    why: str = ""
    us: float | None = None  # median
    p10: float | None = None
    p90: float | None = None
    samples: int = 0
    bytes: int = 0  # that must move, by the bytes model
    flops: int = 0
    floor_us: float | None = None  # bytes over the copy bandwidth measured in the same run
    error: float | None = None  # the largest deviation from fp64
    allowed: float | None = None
    nodes: int | None = None  # kernels in the captured graph of one call
    rotation_bytes: int = 0  # of all sets of inputs together
    extra: dict[str, float] = field(default_factory=dict)  # of generate: tokens a round and the like

    def as_json(self) -> dict[str, Any]:
        data = asdict(self)
        return {"kind": "result", **data.pop("case"), **data}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Result:
        data = {k: v for k, v in data.items() if k != "kind"}
        case = Case(**{k: data.pop(k) for k in Case.__dataclass_fields__})
        return cls(case=case, **data)
