"""draft_attention: one layer's attention over the target's paged cache, without the q-norm and RoPE it can take in."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ...weights import AssistantConfig
from ...weights._config import SLIDING
from ..case import Call, Case
from ..inputs import Inputs, nbytes

CHECK = "floats"


def variants(config: AssistantConfig) -> tuple[str, ...]:
    return tuple(dict.fromkeys(config.layer_types))


def make(case: Case, config: AssistantConfig, inputs: Inputs) -> Call:
    heads, dim = config.kv_shape(case.variant)
    window = config.sliding_window - 1 if case.variant == SLIDING else -1
    cache = inputs.paged_cache(
        case.batch, case.context, heads, dim, case.page_size, case.layout, case.torch_kv_dtype
    )
    q = inputs.normal(case.batch, case.rows, config.num_qo_heads, dim, std=dim**-0.5)
    kwargs = {"window_left": window, "max_seq_len": case.context}
    if case.torch_kv_dtype.itemsize == 1:
        scale = torch.full((1,), 0.5, device=inputs.device)
        kwargs |= {"k_scale": scale, "v_scale": scale}
    return Call((q, *cache, 1.0), kwargs)


def visible_keys(call: Call) -> int:
    """Keys that a request sees."""
    context, window = call.kwargs["max_seq_len"], call.kwargs["window_left"]
    return context if window < 0 else min(context, window + 1)


def moved(call: Call) -> int:
    q, k_cache, v_cache, *_ = call.args
    key = k_cache[0, 0].numel() * (k_cache.element_size() + v_cache.element_size())
    return nbytes(q, q) + q.size(0) * visible_keys(call) * key  # the result is as large as q


def flops(call: Call) -> int:
    q = call.args[0]
    return 4 * q.numel() * visible_keys(call)


def pytorch(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, seq_lens: Tensor, sm_scale: float, *,
    window_left: int, max_seq_len: int, k_scale: Tensor | None = None, v_scale: Tensor | None = None,
) -> Tensor:
    """Gather through the page table, then PyTorch's own attention. Every request has max_seq_len keys."""
    k, v = _visible(q, k_cache, v_cache, block_table, window_left, max_seq_len, k_scale, v_scale)
    y = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, scale=sm_scale, enable_gqa=True)
    return y.transpose(1, 2)


def naive(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, seq_lens: Tensor, sm_scale: float, *,
    window_left: int, max_seq_len: int, k_scale: Tensor | None = None, v_scale: Tensor | None = None,
) -> Tensor:
    """The yardstick: the formula with scores and probabilities in the dtype of q, as attention kernels keep them."""
    k, v = _visible(q, k_cache, v_cache, block_table, window_left, max_seq_len, k_scale, v_scale)
    x = q.transpose(1, 2).unflatten(1, (k.size(1), -1)).flatten(2, 3)  # [batch, num_kv_heads, group * rows, head_dim]
    y = ((x @ k.transpose(2, 3)) * sm_scale).softmax(-1) @ v
    return y.unflatten(2, (-1, q.size(1))).flatten(1, 2).transpose(1, 2)


def _visible(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, window_left: int, max_seq_len: int,
    k_scale: Tensor | None, v_scale: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """K and V [batch, num_kv_heads, keys, head_dim] through the page table."""
    page_size = k_cache.size(1)
    first = 0 if window_left < 0 else max(0, max_seq_len - window_left - 1)
    key = torch.arange(first, max_seq_len, device=q.device)
    pages = block_table[:, key // page_size].long()  # [batch, keys]
    k, v = (_gathered(cache, pages, key % page_size) for cache in (k_cache, v_cache))
    if k_scale is not None and v_scale is not None:
        k_scale, v_scale = (scale.to(q.dtype).view(-1, 1, 1) for scale in (k_scale, v_scale))  # one, or one a KV head
        k, v = k.to(q.dtype) * k_scale, v.to(q.dtype) * v_scale
    return k, v


def _gathered(cache: Tensor, pages: Tensor, slots: Tensor) -> Tensor:
    """[batch, num_kv_heads, keys, head_dim]; fp8 is indexed as bytes, which every device can."""
    bits = cache.view(torch.uint8) if cache.element_size() == 1 else cache
    return bits[pages, slots].view(cache.dtype).transpose(1, 2)
