"""The levels step (a chain of draft steps, by the step) and round (all of draft()): ours beside what engines run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._cpu_step import cpu_chain
from .._cuda_launch import CudaLaunch
from ..captured import FUSED, OPS, SEGMENTS, STEP, choose_kernels, launch_round, new_workspace
from ..draft import DraftTree, draft_step, num_candidates
from ..kv_view import KVView
from ..weights import AssistantWeights
from ..weights._config import SLIDING
from . import plain
from .case import Candidate, Case, Unsupported
from .checks import Verdict
from .inputs import Inputs, config_of, nbytes, take_pages
from .oracle import check_round, check_steps
from .served import served_by
from .setting import Setting

LIB = torch.library.Library("mtp_bench", "FRAGMENT")
LIB.define("attend(Tensor q, int layer) -> Tensor")
LIB.impl("attend", lambda q, layer: ATTENDS[layer](q), "CompositeExplicitAutograd")
torch.library.register_fake("mtp_bench::attend", lambda q, layer: torch.empty_like(q), lib=LIB)
ATTENDS: dict[int, plain.Attend] = {}  # what the compiled step's attention is at the moment, by layer

NODES = 16  # of a tree
DENSE_KEYS = 8192  # keys of a batch that transformers' copy of the cache may hold


@dataclass(frozen=True)
class StepInputs:
    """One seed a request, and the target's frozen KV."""

    weights: AssistantWeights
    kv: dict[str, KVView]
    seed_ids: Tensor  # [batch]
    state: Tensor  # [batch, backbone]
    positions: Tensor  # [batch]


class StepProblem:
    """Inputs of a case of these levels, and what a right result is. Weights stay the same from call to call, as in
    serving: a small model's stay in the cache."""

    def __init__(self, case: Case, device: torch.device, weights: AssistantWeights) -> None:
        self.case, self.device = case, device
        inputs = Inputs(device, case.torch_dtype)
        config = config_of(case.model)
        kv = {}
        for layer_type in dict.fromkeys(config.layer_types):
            heads, dim = config.kv_shape(layer_type)
            fp8 = case.torch_kv_dtype.itemsize == 1
            k_std = dim**-0.5  # scores of order 1 under normed queries, as a trained target's are
            cache = inputs.paged_cache(
                case.batch, case.context, heads, dim, case.page_size, case.layout, case.torch_kv_dtype,
                1.0 if fp8 else k_std,
            )
            window = config.sliding_window - 1 if layer_type == SLIDING else -1
            scales = [torch.full((1,), s, device=device) if fp8 else None for s in (k_std, 1.0)]
            kv[layer_type] = KVView.paged(*cache, window, *scales, case.context)
        ids = inputs.integers(config.vocab, case.batch)
        state = inputs.normal(case.batch, config.backbone)
        self.inputs = StepInputs(weights, kv, ids, state, torch.full_like(ids, case.context - 1))
        self.sets = [self.inputs]
        steps = 1 if case.level == "step" else case.num_steps
        one = step_bytes(weights, kv, case.batch, 1, case.context)
        many = step_bytes(weights, kv, case.batch, case.topk, case.context)
        self.bytes = one + (steps - 1) * many
        self.flops = case.batch * (step_flops(weights, case.context) * (1 + (steps - 1) * case.topk))

    def check(self, number: int, results: Sequence[Any]) -> Verdict:
        one, case = self.inputs, self.case
        wanted = 2 * case.num_steps if case.level == "step" else len(DraftTree._fields)
        if len(results) != wanted:
            return Verdict(why=f"{len(results)} results instead of {wanted}")
        start = (one.weights, one.kv, one.seed_ids, one.state, one.positions, case.context)
        if case.level == "step":
            return check_steps(*start, results[: case.num_steps], results[case.num_steps :])
        return check_round(*start, DraftTree._make(results), case.num_steps, case.topk, num_nodes(case))


def candidates(case: Case, problem: StepProblem, setting: Setting) -> list[Candidate]:
    """Who runs the case, ours first."""
    kernels = _kernels(problem.inputs, case)
    served = "cpu, whole step" if kernels == STEP else ""
    if kernels in (FUSED, SEGMENTS):
        served = _fused_by(problem.inputs, case, kernels)
    if case.level == "round":
        served = served or served_by(lambda: _bind_round(case, kernels)(problem.inputs)())
        return [Candidate("mtp", _bind_round(case, kernels), _tree, served)]
    served = served or served_by(lambda: _our_chain(problem.inputs, case))
    found = [Candidate("mtp", _bind_ours(case, kernels), _flat, served)]
    found.append(Candidate("pytorch", lambda one: _engine(one, case, plain.step, _gather(case)), _flat))
    if setting.compile_steps:
        torch._dynamo.reset()
        compiled = torch.compile(_opaque_step, fullgraph=True, dynamic=False)
        makers: dict[str, Any] = {"torch.compile": _gather(case)}
        makers |= {name: _peer(make, case) for name, make in setting.attention_makers().items()}
        for name, attends in makers.items():
            bind = _bind_compiled(case, compiled, attends)
            found.append(Candidate(name, bind, _flat, "" if name == "torch.compile" else "torch.compile"))
    if setting.peers.present("transformers"):
        found.append(Candidate("transformers", _bind_transformers(case, setting), _flat, capturable=False))
    return found


def _bind_ours(case: Case, kernels: str) -> Callable[[StepInputs], Callable[[], Any]]:
    """What CapturedDraft runs: in a graph the private kernels or the ops, on a CPU the library's whole steps."""

    def bind(one: StepInputs) -> Callable[[], Any]:
        workspace = new_workspace(kernels, one.weights, case.batch)
        if kernels in (FUSED, SEGMENTS):
            return lambda: _our_fused_chain(one, case, workspace)
        if kernels == STEP:
            whole = cpu_chain(one.weights, one.kv)
            return lambda: whole(one.seed_ids, one.state, one.positions, case.num_steps)[1:]
        return lambda: _our_chain(one, case)

    return bind


def _fused_by(one: StepInputs, case: Case, kernels: str) -> str:
    """What the launches of a chain are of, as "cuda and triton, segments"."""
    from ..fused import Drafter, draft_chain

    found: list[Any] = []
    workspace = new_workspace(kernels, one.weights, case.batch)
    drafter = Drafter(one.weights, one.kv, one.positions, emit=found.append, workspace=workspace)
    draft_chain(drafter, one.seed_ids, one.state, 1, None, None)
    names = {"cuda" if isinstance(launch, CudaLaunch) else "triton" for launch in found}
    return f"{' and '.join(sorted(names))}, {kernels}"


def _our_chain(one: StepInputs, case: Case) -> tuple[list[Tensor], list[Tensor]]:
    ids, state = one.seed_ids.unsqueeze(1), one.state.unsqueeze(1)
    all_ids, states = [], []
    for _ in range(case.num_steps):
        step = draft_step(one.weights, one.kv, ids, state, one.positions)
        ids, state = step.token_ids[:, :, 0], step.state
        all_ids.append(ids[:, 0])
        states.append(state[:, 0])
    return all_ids, states


def _kernels(one: StepInputs, case: Case) -> str:
    """What CapturedDraft would run; on a GPU without a graph, the ops."""
    captured = case.mode == "graph" or one.weights.device.type == "cpu"
    return choose_kernels(one.weights, one.kv, case.topk, None, case.batch)[0] if captured else OPS


def _our_fused_chain(one: StepInputs, case: Case, workspace: Tensor | None) -> tuple[list[Tensor], list[Tensor]]:
    """The kernels that CapturedDraft captures."""
    from ..fused import Drafter, draft_chain, overlaps

    drafter = Drafter(one.weights, one.kv, one.positions, overlaps(one.seed_ids.device), workspace=workspace)
    chain = draft_chain(drafter, one.seed_ids, one.state, case.num_steps, None, None)
    return list(chain.cand_ids.unbind(1)), chain.states


def _bind_round(case: Case, kernels: str) -> Callable[[StepInputs], Callable[[], Any]]:
    """In a graph what CapturedDraft captures, else draft()."""
    nodes = None if case.topk == 1 else num_nodes(case)

    def bind(one: StepInputs) -> Callable[[], Any]:
        workspace = new_workspace(kernels, one.weights, case.batch * case.topk)
        return lambda: _our_round(one, case, kernels, nodes, workspace)

    return bind


def _our_round(
    one: StepInputs, case: Case, kernels: str, nodes: int | None, workspace: Tensor | None = None
) -> Callable[[], DraftTree]:
    roots = None if case.topk == 1 else one.positions
    start = (one.weights, one.kv, one.seed_ids, one.state, one.positions)
    return launch_round(kernels, *start, case.num_steps, case.topk, nodes, roots, None, workspace)


def _tree(made: Callable[[], DraftTree]) -> tuple[Tensor | None, ...]:
    return tuple(made())


def num_nodes(case: Case) -> int:
    """Of the drafted tree, its root included; a chain keeps every candidate."""
    every = num_candidates(case.num_steps, case.topk) + 1
    return every if case.topk == 1 else min(NODES, every)


Attends = Callable[[StepInputs], list[plain.Attend]]  # one a layer


def _engine(one: StepInputs, case: Case, step: Callable[..., Any], attends: Attends) -> Callable[[], Any]:
    """A chain of steps that an engine would run: PyTorch around an attention kernel."""
    kernels = attends(one)
    rotation = plain.rotations(one.weights, one.positions)

    def run() -> tuple[list[Tensor], list[Tensor]]:
        ids, state = one.seed_ids.unsqueeze(1), one.state.unsqueeze(1)
        all_ids, states = [], []
        for _ in range(case.num_steps):
            ids, state, _ = step(one.weights, kernels, rotation, ids, state)
            all_ids.append(ids[:, 0])
            states.append(state[:, 0])
        return all_ids, states

    return run


def _opaque_step(
    weights: AssistantWeights, kernels: Sequence[plain.Attend], rotation: Any, ids: Tensor, state: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """plain.step with its attention hidden from the compiler, so that one compilation serves every peer's."""
    opaque = [_layer_attend(layer) for layer in range(len(weights.layers))]
    return plain.step(weights, opaque, rotation, ids, state)


def _layer_attend(layer: int) -> plain.Attend:
    return lambda q: torch.ops.mtp_bench.attend(q.contiguous(), layer)


def _bind_compiled(case: Case, compiled: Callable[..., Any], attends: Attends) -> Callable[[StepInputs], Any]:
    def step(weights: Any, kernels: Sequence[plain.Attend], rotation: Any, ids: Tensor, state: Tensor) -> Any:
        ATTENDS.update(enumerate(kernels))
        return compiled(weights, (), rotation, ids, state)

    return lambda one: _engine(one, case, step, attends)


def _gather(case: Case) -> Attends:
    return lambda one: _by_type(one, lambda view: plain.attention(view, case.context))


def _peer(make: Callable[..., plain.Attend], case: Case) -> Attends:
    def attention(view: KVView, heads: int) -> plain.Attend:
        call = plain.view_call(view, case.context)
        *cache, sm_scale = call.args
        kwargs = {n: float(v) if isinstance(v, Tensor) else v for n, v in call.kwargs.items()}
        return make(*cache, num_qo_heads=heads, rows=1, sm_scale=sm_scale, **kwargs)

    return lambda one: _by_type(one, lambda view: attention(view, one.weights.layers[0].num_qo_heads))


def _by_type(one: StepInputs, make: Callable[[KVView], plain.Attend]) -> list[plain.Attend]:
    """One attention a layer; layers of a type share theirs, since they read the same cache."""
    made = {layer_type: make(view) for layer_type, view in one.kv.items()}
    return [made[layer.layer_type] for layer in one.weights.layers]


def _bind_transformers(case: Case, setting: Setting) -> Callable[[StepInputs], Callable[[], Any]]:
    def bind(one: StepInputs) -> Callable[[], Any]:
        if case.batch * case.context > DENSE_KEYS:
            raise Unsupported(f"left out above {DENSE_KEYS} keys: it takes a dense copy of the cache")
        if case.kv_dtype != case.dtype:
            raise Unsupported("its caches have the dtype of the model")
        step = setting.peers.transformers_step(one.weights)
        dense = {name: _dense(view, case.context) for name, view in one.kv.items()}

        def run() -> tuple[list[Tensor], list[Tensor]]:
            ids, state = one.seed_ids, one.state
            all_ids, states = [], []
            for _ in range(case.num_steps):
                ids, state = step(ids, state, one.positions, dense)
                all_ids.append(ids)
                states.append(state)
            return all_ids, states

        return run

    return bind


def _dense(view: KVView, context: int) -> tuple[Tensor, Tensor]:
    """[batch, num_kv_heads, visible, head_dim] copies, as transformers keeps a cache."""
    first = 0 if view.window_left < 0 else max(0, context - view.window_left - 1)

    def copied(cache: Tensor) -> Tensor:
        pages = take_pages(cache, view.block_table.long())  # [batch, pages, slots, heads, dim]
        return pages.flatten(1, 2)[:, first:context].transpose(1, 2).contiguous()

    return copied(view.k_cache), copied(view.v_cache)


def _flat(raw: tuple[Sequence[Tensor], Sequence[Tensor]]) -> tuple[Tensor, ...]:
    return (*raw[0], *raw[1])


def step_bytes(weights: AssistantWeights, kv: dict[str, KVView], batch: int, rows: int, context: int) -> int:
    """Weights once, the head rows that are needed, and each layer's visible keys once a request."""
    config = weights.config
    skipped = ("embed_weight", "lm_head", "token_ordering")
    own = sum(nbytes(tensor) for name, tensor in weights.tensors() if name not in skipped)
    head_rows = min(batch * rows * config.num_candidates, config.vocab)
    own += head_rows * weights.hidden * weights.lm_head.element_size()
    keys = 0
    for layer in weights.layers:
        view = kv[layer.layer_type]
        visible = context if view.window_left < 0 else min(context, view.window_left + 1)
        keys += 2 * visible * view.num_kv_heads * view.head_dim * view.k_cache.element_size()
    state = 3 * rows * weights.backbone * weights.pre_projection.element_size()  # embedding row, state in and out
    return own + batch * (keys + state)


def step_flops(weights: AssistantWeights, context: int) -> int:
    """Of one row."""
    config = weights.config
    skipped = ("embed_weight", "lm_head")
    matrices = sum(t.numel() for name, t in weights.tensors() if t.dim() == 2 and name not in skipped)
    keys = 0
    for layer in weights.layers:
        visible = min(context, config.sliding_window) if layer.layer_type == SLIDING else context
        keys += 2 * visible * layer.num_qo_heads * layer.head_dim
    return 2 * (matrices + config.num_candidates * weights.hidden + keys)
