"""Cases of the benchmark with every size tiny, and what its tests serve them with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from mtp_kernels.bench import run_steps
from mtp_kernels.bench.case import Case, Result
from mtp_kernels.bench.inputs import config_of
from mtp_kernels.bench.ops import bench_of
from mtp_kernels.bench.peers import Peers
from mtp_kernels.bench.runner import run_case
from mtp_kernels.bench.setting import Setting

from mtp_kernels.ops import OPS
from mtp_kernels.ops._registry import Kernel

CPU = torch.device("cpu")
BANDWIDTH = 1e9
SETTING = Setting(CPU, cache_bytes=1 << 12, peers=Peers(()), compile_ops=False, compile_steps=False, samples=2)
GENERATE = Case("generate", "generate", "pair", dtype="fp32", kv_dtype="fp32", mode="eager")


def op_case(op: str, **sizes: Any) -> Case:
    """A case of the op with every size tiny, of the model that has the op."""
    model = "tiny" if bench_of(op).variants(config_of("tiny")) else "tiny-dense"
    sizes = {"model": model, "context": 21, "dtype": "fp32", "kv_dtype": "fp32", "mode": "eager", **sizes}
    return Case("op", op, **{"variant": bench_of(op).variants(config_of(sizes["model"]))[0], **sizes})


def step_case(level: str, topk: int = 1, **sizes: Any) -> Case:
    name = "step" if level == "step" else "chain" if topk == 1 else "tree"
    sizes = {"model": "tiny", "context": 21, "dtype": "fp32", "kv_dtype": "fp32", "mode": "eager", **sizes}
    return Case(level, name, rows=topk, topk=topk, num_steps=3, **sizes)


def ours(case: Case, setting: Setting = SETTING) -> Result:
    (result,) = (r for r in run_case(case, setting, BANDWIDTH) if r.candidate == "mtp")
    return result


@pytest.fixture(name="serve")
def one_kernel(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Gives an op one kernel, which makes its results from the right ones."""
    monkeypatch.delenv("MTP_FORCE_IMPL", raising=False)
    monkeypatch.setattr(run_steps, "choose_kernels", lambda *args: ("ops", "the ops are what is tested"))

    def fill(op: str, change: Callable[..., Any]) -> None:
        reference = OPS[op].reference

        def kernel(*args: Any, **kwargs: Any) -> Any:
            return change(reference(*args, **kwargs))

        monkeypatch.setattr(OPS[op], "kernels", (Kernel("triton", ("cpu",), lambda: kernel),))
        monkeypatch.setattr(OPS[op], "loaded", {})

    return fill


@dataclass(frozen=True)
class OnePeer(Peers):
    """A peer with an attention kernel or an op of the test's."""

    make: Any = None
    function: Any = None

    def attention_variants(self, name: str) -> dict[str, Any]:
        return {name: self.make} if self.make and name == "vllm" else {}

    def op(self, name: str, op: str) -> Any:
        return (lambda call: lambda: self.function(*call.args, **call.kwargs), tuple) if self.function else None
