"""Segments of a draft step: what lies between two attentions, in one CUDA launch (csrc/cuda/segment.cu).

A segment merges the chunks of draft_attention, projects them, runs the feed-forward, and then the next layer's query
projection, or the projections of the head. Its blocks hand each other their results through a workspace.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from . import _native
from ._cuda_launch import CudaLaunch
from .kv_view import KVView
from .triton_ops._launch import Launch, capability, count_sms
from .weights import AssistantWeights, LayerWeights

PART_TOKENS = 32  # of `candidates`
HEADER = 16  # words of the workspace before the mail
REGISTERS = 80  # of a thread of an attention beside a segment
HIDDEN = 256
MOST_ROWS = 64
LEAST_HEAD_DIM = 128
LEAST_SMS = 64  # then there are blocks enough for every row's norm
BUILT_FOR = (8, 9, 10, 12)  # major compute capabilities
SPLIT_DEPTH = 1024  # depth of the products that the warps of a block share is a multiple of this
SHARED_LIMIT = {80: 163, 87: 163, 90: 227, 100: 227, 103: 227}  # KB a block, by capability * 10; 99 elsewhere


def refuses(weights: AssistantWeights, kv: Mapping[str, KVView], rows: int) -> str:
    """Why segments do not serve rounds of up to `rows` rows, or ""."""
    if weights.device.type != "cuda":
        return f"no CUDA kernels on {weights.device.type}"
    if weights.hidden != HIDDEN:
        return f"hidden {weights.hidden} is not {HIDDEN}"
    if rows > MOST_ROWS:
        return f"{rows} rows are more than {MOST_ROWS}"
    for name, matrix in (("post_projection", weights.post_projection), ("centroids", weights.centroids)):
        if matrix is not None and (why := _refuses_matrix(name, matrix)):
            return why
    for layer in weights.layers:
        if why := _refuses_layer(layer, kv):
            return why
    if weights.norm.dtype != torch.bfloat16:
        return f"a norm of {weights.norm.dtype}"
    return _refuses_device(weights.device, rows)


def _refuses_layer(layer: LayerWeights, kv: Mapping[str, KVView]) -> str:
    for name in ("q_proj", "o_proj", "gate_up", "down"):
        if why := _refuses_matrix(name, getattr(layer, name)):
            return why
    if any(p.size(1) % SPLIT_DEPTH for p in (layer.o_proj, layer.down)):
        return f"a projection whose depth is no multiple of {SPLIT_DEPTH}"
    vectors = (
        layer.input_norm, layer.post_attention_norm, layer.pre_feedforward_norm, layer.post_feedforward_norm,
        layer.layer_scalar,
    )
    for vector in vectors:
        if vector.dtype != torch.bfloat16:
            return f"a norm or scalar of {vector.dtype}"
    if layer.layer_type not in kv:
        return f"no view for {layer.layer_type}"
    view = kv[layer.layer_type]
    if view.kv_indptr is not None:
        return "a flat page table"
    sizes = (layer.num_qo_heads, layer.head_dim, layer.num_qo_heads // view.num_kv_heads)
    if layer.head_dim < LEAST_HEAD_DIM or any(n & (n - 1) for n in sizes):
        return f"heads of another number or size than powers of two, {LEAST_HEAD_DIM} elements at least"
    return ""


def _refuses_matrix(name: str, matrix: Tensor) -> str:
    if matrix.dtype != torch.bfloat16:
        return f"{name} of {matrix.dtype}"
    if matrix.size(0) % 8 or matrix.stride(1) != 1 or matrix.stride(0) % 8 or matrix.data_ptr() % 16:
        return f"{name}, whose rows are no multiple of 8, or not 16 bytes apart"
    return ""


def _refuses_device(device: torch.device, rows: int) -> str:
    found, sms = capability(device), count_sms(device)
    if found // 10 not in BUILT_FOR:
        return f"compute capability {found / 10}"
    if sms < LEAST_SMS:
        return f"{sms} SMs are fewer than {LEAST_SMS}"
    if why := _native.cuda_library():
        return why
    needed = _native.cuda_op("segment_bytes")(rows) / 1024
    if needed > SHARED_LIMIT.get(found, 99):
        return f"{needed:.0f} KB of shared memory a block are more than compute capability {found / 10} has"
    return ""


def new_workspace(weights: AssistantWeights, rows: int) -> Tensor:
    """Where the segments of one runner leave their results for each other; zeros, and nobody else's memory.

    Rounds that share it must not overlap in time: they would wait for each other's words.
    """
    most = max(layer.o_proj.size(1) // 2 + layer.down.size(1) // 2 for layer in weights.layers)
    words = HEADER + rows * (most + 3 * weights.hidden)
    return torch.zeros(words, dtype=torch.int64, device=weights.device)


def segment(
    attention: Sequence[Launch | CudaLaunch], attended: Tensor, kv: KVView, layer: LayerWeights, eps: float,
    residual: Tensor, next_norm: Tensor, next_weight: Tensor, output: Tensor, workspace: Tensor, *,
    x_out: Tensor | None = None, normed: Tensor | None = None, centroids: Tensor | None = None,
    scores: Tensor | None = None, group_max: Tensor | None = None, early: bool = False
) -> tuple[Sequence[Launch | CudaLaunch], CudaLaunch]:
    """The launches of `attention` (draft_attention.plan) that are still needed, and what takes the place of the others.

    residual [rows, hidden] is x before the attention. output [rows, columns] gets rmsnorm(x) * next_norm @
    next_weight.T of the x behind the layer, which goes to `x_out`, and normed to `normed`; with `centroids` their
    scores [rows, count], and the largest of each 8, go where the head's kernels read them.
    """
    chunks: dict[str, Any] = {
        "partial": None, "stats": None, "v_scale": None, "capacity": 0, "bound": 0, "chunk_weight": 0.0,
        "max_chunks": 1, "chunk_multiple": 1, "fold": 1, "chunks_a_part": 1, "num_kv_heads": 1,
    }
    if len(attention) == 2:
        *attention, last = attention
        assert isinstance(last, Launch)
        given, scale = last.args, last.args["v_scale_ptr"]
        chunks = {
            "partial": given["partial_ptr"], "stats": given["stats_ptr"],
            "v_scale": None if scale is None else scale.reshape(-1),
            "capacity": given["table_size"] * given["page_size"], "bound": given["bound"],
            "chunk_weight": given["chunk_weight"], "max_chunks": given["max_chunks"],
            "chunk_multiple": last.constants["MULTIPLE"], "fold": last.constants["FOLD"],
            "chunks_a_part": last.constants["CHUNKS"], "num_kv_heads": given["num_qo_heads"] // given["group"],
        }
    launch = CudaLaunch("segment", {
        "attended": attended, **chunks, "seq_lens": kv.seq_lens, "residual": residual, "o_proj": layer.o_proj,
        "post_attention_norm": layer.post_attention_norm, "eps": float(eps),
        "pre_feedforward_norm": layer.pre_feedforward_norm, "gate_up": layer.gate_up, "down": layer.down,
        "post_feedforward_norm": layer.post_feedforward_norm, "layer_scalar": layer.layer_scalar,
        "next_norm": next_norm, "next_weight": next_weight, "output": output, "x_out": x_out, "normed": normed,
        "centroids": centroids, "scores": scores, "group_max": group_max, "workspace": workspace, "early": early,
    })
    return attention, launch


def beside(launch: Launch | CudaLaunch) -> Launch | CudaLaunch:
    """An attention whose programs leave a segment's block room on an SM that has three of them.

    A segment starts when there is room for all its blocks. Where the programs take 91 registers they must lie two to an
    SM, and after a step's first kernels they do not: a step of E4B, batch 8 and 8192 keys, took 2.5 us more on an H200.
    """
    if isinstance(launch, Launch) and launch.early and launch.constants.get("ONE_TILE"):
        return replace(launch, registers=REGISTERS)
    return launch


def ranks(weights: AssistantWeights) -> bool:
    """Whether `candidates` serves the head: that of E2B and E4B."""
    if weights.centroids is None:
        return False
    sizes = (weights.hidden, weights.centroids.size(0), weights.num_active)
    fits = sizes == (256, 2048, 32) and weights.vocab % (2048 * PART_TOKENS) == 0
    return fits and not _refuses_matrix("lm_head", weights.lm_head)


def candidates(
    weights: AssistantWeights, scores: Tensor, normed: Tensor, parts: dict[str, Tensor], *, early: bool = False
) -> CudaLaunch:
    """The best of each 32 candidate tokens, and the sum of their exponentials, into `parts` (new_parts, depth 1)."""
    return CudaLaunch("candidates", {
        "scores": scores, "normed": normed, "token_ordering": weights.token_ordering, "lm_head": weights.lm_head,
        "centroid_ordered": weights.centroid_ordered, **parts, "early": early,
    })
