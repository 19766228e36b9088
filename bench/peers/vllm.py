"""vLLM's Triton attention, `unified_attention`, which it runs for Gemma 4's assistants (written for vLLM 0.33)."""

from __future__ import annotations

import enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..case import Unsupported
from ._attention import Attend, check_triton, expanded, is_fp8, query_dtype, scratch
from ._wheel import load_modules

FOLDER = "vllm/v1/attention/ops"
MODULES = (f"{FOLDER}/triton_attention_helpers.py", f"{FOLDER}/triton_unified_attention.py")
SEGMENTS = 16  # vLLM's NUM_PAR_SOFTMAX_SEGMENTS
MIN_LAUNCH_GRID = 128  # its MIN_LAUNCH_GRID_SIZE_2D: more blocks than this need no split of the keys


def load(root: Path) -> ModuleType:
    """The attention module from its files under `root`."""
    import triton
    import triton.language as tl

    class KVQuantMode(enum.IntEnum):  # only passed through to the kernel, as these numbers
        NONE = 0
        FP8_PER_TENSOR = 1
        INT8_PER_TOKEN_HEAD = 2
        FP8_PER_TOKEN_HEAD = 3
        INT4_PER_TOKEN_HEAD = 4

    platform = SimpleNamespace(
        fp8_dtype=lambda: torch.float8_e4m3fn,
        is_device_capability_family=lambda family: (
            torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == family // 10
        ),
    )
    stubs: dict[str, dict[str, Any]] = {
        "vllm.envs": {"VLLM_BATCH_INVARIANT": False},
        "vllm.logger": {"init_logger": lambda name: SimpleNamespace(debug_once=lambda *a: None)},
        "vllm.platforms": {"current_platform": platform},
        "vllm.triton_utils": {"triton": triton, "tl": tl},
        "vllm.v1.kv_cache_interface": {"KVQuantMode": KVQuantMode},
    }
    return load_modules(root, MODULES, stubs)[-1]


def attention(
    module: ModuleType,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    num_qo_heads: int,
    rows: int,
    window_left: int,
    sm_scale: float,
    max_seq_len: int,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    q_dtype: torch.dtype | None = None,
) -> Attend:
    """MakeAttention, given vLLM's module."""
    check_triton(k_cache, query_dtype(k_cache, q_dtype))
    num_kv_heads, head_dim = k_cache.shape[2:]
    if k_cache.stride(-1) != 1 or v_cache.stride(-1) != 1:
        raise Unsupported("it wants caches whose last dimension is contiguous")
    device = k_cache.device
    tables, lengths = expanded(block_table, seq_lens, rows)
    num_queries = lengths.numel()
    # What vLLM's Triton backend allocates once for all layers; a padded head_dim is a power of 2.
    padded = 1 << (head_dim - 1).bit_length()
    out = scratch("vllm-out", num_queries, num_qo_heads, SEGMENTS, padded, device=device)
    top = scratch("vllm-max", num_queries, num_qo_heads, SEGMENTS, device=device)
    total = scratch("vllm-sum", num_queries, num_qo_heads, SEGMENTS, device=device)
    starts = torch.arange(num_queries + 1, dtype=torch.int32, device=device)
    scales = [torch.full((1,), s, dtype=torch.float32, device=device) for s in (1.0, k_scale, v_scale)]
    window = (window_left, 0) if window_left >= 0 else (-1, -1)
    modes = module.KVQuantMode
    mode = modes.FP8_PER_TENSOR if is_fp8(k_cache) else modes.NONE

    def attend(q: Tensor) -> Tensor:
        queries = q.flatten(0, 1)  # [batch * rows, num_qo_heads, head_dim]
        result = torch.empty_like(queries)
        module.unified_attention(
            queries, k_cache, v_cache, result, starts, 1, lengths, max_seq_len, sm_scale, True, window, tables, 0.0,
            *scales, seq_threshold_3D=MIN_LAUNCH_GRID // num_kv_heads, num_par_softmax_segments=SEGMENTS,
            softmax_segm_output=out, softmax_segm_max=top, softmax_segm_expsum=total, kv_quant_mode=mode,
        )  # fmt: skip
        return result.view(q.shape)

    return attend
