"""The op level: every op, ours beside the peers that run the same inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..ops import OPS
from ..ops._registry import choose
from .case import Call, Candidate, Case
from .checks import HeadOracle, Verdict, check_exact, check_floats
from .inputs import Inputs, config_of, take_pages
from .ops import bench_of
from .setting import Setting

MOST_SETS = {"cuda": 64, "cpu": 4}
MOST_BYTES = 1 << 36  # of all sets together
REQUESTS_AT_ONCE = 8  # that attention is checked for in fp64


class OpProblem:
    """The sets of inputs of a case, and what a right result is."""

    def __init__(self, case: Case, device: torch.device, cache_bytes: int) -> None:
        self.case, self.device = case, device
        self.bench: ModuleType = bench_of(case.name)
        config = config_of(case.model)
        inputs = Inputs(device, case.torch_dtype)
        first: Call = self.bench.make(case, config, inputs)
        self.bytes, self.flops = int(self.bench.moved(first)), int(self.bench.flops(first))
        more = 0 if case.warm else _sets(self.bytes, cache_bytes, device) - 1
        self.sets = [first, *(self.bench.make(case, config, inputs.next_set(i)) for i in range(1, more + 1))]
        self._truths: dict[int, Any] = {}  # by set: what every candidate's results are compared with

    def check(self, number: int, results: Sequence[Tensor | None]) -> Verdict:
        """What the results of set `number` deviate from fp64."""
        call = self.sets[number]
        why = self._wrong_shape(call, results)
        if why:
            return Verdict(why=why)
        if number not in self._truths:
            self._truths[number] = self._truth(call)
        truth = self._truths[number]
        if self.bench.CHECK == "floats":
            return check_floats(results, *truth)
        if self.bench.CHECK == "exact":
            return check_exact(results, truth)
        flat = [None if r is None else r.flatten(0, 1) for r in results]
        if self.bench.CHECK == "candidates":
            return truth.check_candidates(flat[0], flat[1])
        logprobs, ids, total = flat
        return truth.check(ids, logprobs, total)

    def _truth(self, call: Call) -> Any:
        """The results in fp64, beside plain PyTorch's for floats; of a head, its candidates."""
        if self.bench.CHECK == "floats":
            return self._floats(call)
        if self.bench.CHECK == "exact":
            return as_tuple(OPS[self.case.name].reference(*_in_fp64(call.args), **_kwargs64(call)))
        return self._head(call)

    def _wrong_shape(self, call: Call, results: Sequence[Tensor | None]) -> str:
        """Why the results are not as many, or not as large, as the op's."""
        op = OPS[self.case.name]
        specs = op.outputs(*call.args, **call.kwargs)
        shapes = [specs[0]] if isinstance(specs[1], torch.dtype) else [shape for shape, _ in specs]
        if len(results) != len(shapes):
            return f"{len(results)} results instead of {len(shapes)}"
        for name, one, shape in zip(op.out_names, results, shapes):
            if one is not None and one.shape != torch.Size(shape):
                return f"{name.removeprefix('out_')} has shape {list(one.shape)} instead of {list(shape)}"
        return ""

    def _floats(self, call: Call) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """The results in fp64, and those of plain PyTorch in the dtype of the inputs."""
        reference = OPS[self.case.name].reference
        if self.case.name != "draft_attention":
            if self.case.name == "pre_project":
                return as_tuple(_exact_pre_project(reference, *call.args)), as_tuple(self.bench.pytorch(*call.args))
            exact = as_tuple(reference(*_in_fp64(call.args), **_kwargs64(call)))
            return exact, as_tuple(self.bench.pytorch(*call.args, **call.kwargs))
        exact_parts, naive_parts = [], []
        for start in range(0, call.args[0].size(0), REQUESTS_AT_ONCE):
            part = _some_requests(call, slice(start, start + REQUESTS_AT_ONCE))
            exact_parts.append(reference(*_in_fp64(part.args), **_kwargs64(part)))
            naive_parts.append(self.bench.naive(*part.args, **part.kwargs))
        return (torch.cat(exact_parts),), (torch.cat(naive_parts),)

    def _head(self, call: Call) -> HeadOracle:
        if self.case.name == "lm_head_topk":
            normed, head, *_ = call.args
            naive_head, scale = None, call.kwargs.get("weight_scale")
            if scale is not None:
                head = head.float() * scale.unsqueeze(-1)
                naive_head = head.to(normed.dtype)
            rows = normed.flatten(0, 1)
            return HeadOracle(rows.double(), rows, head, naive_lm_head=naive_head)
        normed, centroids, ordering, head, active, *_ = call.args
        normed = normed.flatten(0, 1)
        return HeadOracle(normed.double(), normed, head, centroids, ordering, active)


def candidates(case: Case, problem: OpProblem, setting: Setting) -> list[Candidate]:
    """Who runs the case, ours first."""
    found = [ours(case, problem)]
    pytorch = problem.bench.pytorch
    if pytorch is not None:
        found.append(Candidate("pytorch", _binder(pytorch), as_tuple))
        if setting.compile_ops and case.name != "draft_attention":  # it has no better way to follow a page table
            found.append(Candidate("torch.compile", _binder(_compiled(pytorch)), as_tuple))
    if case.name == "draft_attention":
        for name, make in setting.attention_makers().items():
            found.append(Candidate(name, _attention_binder(make), as_tuple))
    functions = setting.peers.op("sglang", case.name)
    if functions is not None:
        found.append(Candidate("sglang", *functions))
    return found


def ours(case: Case, problem: OpProblem) -> Candidate:
    op = getattr(torch.ops.mtp, case.name)
    call = problem.sets[0]
    served = choose(OPS[case.name], call.args, call.kwargs)[0]
    return Candidate("mtp", _binder(op.default), as_tuple, served)


def as_tuple(results: Any) -> tuple[Tensor, ...]:
    return (results,) if isinstance(results, Tensor) else tuple(results)


def _sets(size: int, cache_bytes: int, device: torch.device) -> int:
    """Sets that together are twice as large as the cache, as far as that takes no unreasonable number."""
    if size >= 2 * cache_bytes:
        return 1
    wanted = -(-2 * cache_bytes // max(size, 1))
    return max(1, min(wanted, MOST_SETS[device.type], MOST_BYTES // max(size, 1)))


def _binder(function: Callable[..., Any]) -> Callable[[Call], Callable[[], Any]]:
    return lambda call: lambda: function(*call.args, **call.kwargs)


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, dynamic=False)


def _attention_binder(make: Callable[..., Callable[[Tensor], Tensor]]) -> Callable[[Call], Callable[[], Any]]:
    def bind(call: Call) -> Callable[[], Any]:
        q, k_cache, v_cache, block_table, seq_lens, sm_scale = call.args
        kwargs = dict(call.kwargs)
        scales = {n: float(kwargs.pop(n)) for n in ("k_scale", "v_scale") if n in kwargs}
        attend = make(
            k_cache, v_cache, block_table, seq_lens, num_qo_heads=q.size(2), rows=q.size(1), sm_scale=sm_scale,
            **kwargs, **scales,
        )
        return lambda: attend(q)

    return bind


def _some_requests(call: Call, part: slice) -> Call:
    """The call for some of its requests, with caches that hold their pages alone."""
    q, k_cache, v_cache, block_table, seq_lens, sm_scale = call.args
    pages = block_table[part].long().flatten()
    table = torch.arange(pages.numel(), device=pages.device).view(-1, block_table.size(1))
    caches = [take_pages(cache, pages) for cache in (k_cache, v_cache)]
    return Call((q[part], *caches, table, seq_lens[part], sm_scale), call.kwargs)


def _exact_pre_project(
    reference: Callable[..., Tensor], ids: Tensor, embed_weight: Tensor, scale: float, state: Tensor, weight: Tensor
) -> Tensor:
    """In fp64 but for the embedding's product, which is rounded by definition; the whole table is never widened."""
    from ..reference.pre_project import embed

    rows, _ = embed(ids, embed_weight, scale, 0)
    local = torch.arange(ids.numel(), device=ids.device).view(ids.shape)
    return reference(local, rows.double().flatten(0, 1), 1.0, state.double(), weight.double())


def _in_fp64(values: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for v in values)


def _kwargs64(call: Call) -> dict[str, Any]:
    return dict(zip(call.kwargs, _in_fp64(list(call.kwargs.values()))))


