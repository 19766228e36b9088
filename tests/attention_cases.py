"""Problems for the tests of draft_attention: paged caches with poison where nothing may be read, and the formula."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import (
    DEVICES,
    call,
    check_numerics,
    forced,
    implementations,
    random_tensor,
)
from torch import Tensor

OP = "draft_attention"
FP8 = torch.float8_e4m3fn
HEAD_DIM = 64
LAYOUTS = ["NHD", "HND", "pages-2", "2-pages", "K NHD, V HND"]
GARBAGE = [-1, 2**31 - 1, -(2**31), 10**6]

Call = tuple[tuple[Any, ...], dict[str, Any]]


def lay_out(k: Tensor, v: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """K and V [num_pages, page_size, heads, dim] as views of caches that are kept in another order."""
    if layout == "pages-2":
        return torch.stack([k, v], 1).unbind(1)
    if layout == "2-pages":
        return torch.stack([k, v]).unbind()
    hnd = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (k, v)]
    return {"NHD": (k, v), "HND": (hnd[0], hnd[1]), "K NHD, V HND": (k, hnd[1])}[layout]


def problem(
    lengths: list[int],
    *,
    rows: int = 2,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = HEAD_DIM,
    page_size: int = 5,
    window_left: int = -1,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    layout: str = "NHD",
    flat: bool = False,
    spare_pages: int = 2,
    device: str = "cpu",
    seed: int = 0,
    poison: float = torch.nan,
    **options: Any,
) -> Call:
    """A call whose invisible slots hold NaN and whose table is garbage wherever no key is visible."""
    generator = torch.Generator().manual_seed(seed)
    pages = [-(-n // page_size) for n in lengths]
    width = max(pages, default=0) + 1
    num_pages = sum(pages) + spare_pages
    order = torch.randperm(num_pages, generator=generator).tolist()
    table = torch.tensor(GARBAGE, dtype=torch.int64).repeat(len(lengths), width)[:, :width].clone()
    shape = (num_pages, page_size, heads[1], head_dim)
    k, v = (random_tensor(*shape, seed=seed + i).to(kv_dtype or dtype) for i in (1, 2))
    seen = torch.zeros(num_pages, page_size, dtype=torch.bool)
    for b, n in enumerate(lengths):
        first = 0 if window_left < 0 else max(0, n - window_left - 1)
        mine = [order.pop() for _ in range(pages[b])]
        for key in range(first, n):
            table[b, key // page_size] = mine[key // page_size]
            seen[mine[key // page_size], key % page_size] = True
    invisible = ~seen[:, :, None, None].expand(shape)
    k, v = (torch.where(invisible, torch.full_like(t, poison), t) for t in (k, v))
    k, v = lay_out(k.to(device), v.to(device), layout)
    if flat:
        table = torch.cat([table[b, : pages[b]] for b in range(len(lengths))] + [torch.tensor(GARBAGE)])
        options["kv_indptr"] = torch.tensor([0, *pages]).cumsum(0).to(device)
    q = random_tensor(len(lengths), rows, heads[0], head_dim, seed=seed + 3, dtype=dtype, device=device)
    args = (q, k, v, table.int().to(device), torch.tensor(lengths, dtype=torch.int64, device=device), head_dim**-0.5)
    return args, {"window_left": window_left, **options}


def options(batch: int, rows: int, head_dim: int = HEAD_DIM, device: str = "cpu") -> dict[str, Any]:
    """q-norm, RoPE of three quarters of the pairs, and a soft cap small enough to matter."""
    pairs = head_dim * 3 // 8
    return {
        "q_norm_weight": random_tensor(head_dim, seed=11, device=device, scale=0.3) + 1,
        "rope_inv_freq": inv_freq(pairs, head_dim).to(device),
        "positions": torch.arange(batch * rows, device=device).view(batch, rows) * 37 + 5,
        "logits_soft_cap": 0.7,
    }


def inv_freq(pairs: int, head_dim: int = HEAD_DIM) -> Tensor:
    return 1.0 / 10000 ** (torch.arange(pairs, dtype=torch.float64) * 2 / head_dim).float()


def naive(
    dtype: torch.dtype,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    sm_scale: float,
    *,
    kv_indptr: Tensor | None = None,
    max_seq_len: int = -1,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    q_norm_weight: Tensor | None = None,
    q_norm_eps: float = 1e-6,
    rope_inv_freq: Tensor | None = None,
    positions: Tensor | None = None,
) -> Tensor:
    """The formula in `dtype` throughout, request by request."""
    x = q.to(dtype)
    if q_norm_weight is not None:
        x = F.rms_norm(x, (x.size(-1),), q_norm_weight.to(dtype), q_norm_eps)
    if rope_inv_freq is not None and positions is not None:
        x = turn(x, positions, rope_inv_freq)
    page_size, group = k_cache.size(1), q.size(2) // k_cache.size(2)
    output = torch.zeros(q.shape, dtype=dtype, device=q.device)
    for b, n in enumerate(seq_lens.tolist()):
        first = 0 if window_left < 0 else max(0, n - window_left - 1)
        begin = 0 if kv_indptr is None else int(kv_indptr[b])
        table = block_table[b] if kv_indptr is None else block_table[begin:]
        if n == first:
            continue
        keys = torch.arange(first, n, device=q.device)
        pages, slots = table[keys // page_size].long(), keys % page_size
        k, v = (cache[pages, slots].to(dtype) for cache in (k_cache, v_cache))
        k = k if k_scale is None else k * k_scale.to(dtype).view(-1, 1)
        v = v if v_scale is None else v * v_scale.to(dtype).view(-1, 1)
        k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))  # [keys, num_qo_heads, head_dim]
        scores = torch.einsum("rhd,nhd->hrn", x[b], k) * sm_scale
        if logits_soft_cap:
            scores = logits_soft_cap * torch.tanh(scores / logits_soft_cap)
        output[b] = torch.einsum("hrn,nhd->rhd", scores.softmax(-1), v)
    return output


def turn(x: Tensor, positions: Tensor, freqs: Tensor, sine_dtype: torch.dtype | None = None) -> Tensor:
    """RoPE; the angle is the fp32 product (see the reference), its sine fp64 for fp64."""
    half, pairs = x.size(-1) // 2, freqs.numel()
    y = x.clone()
    positions = positions if positions.dim() == 2 else positions.unsqueeze(1)
    angle = (positions.float().unsqueeze(2) * freqs).unsqueeze(2)  # [batch, rows or 1, 1, pairs]
    angle = angle.double() if x.dtype == torch.float64 else angle
    cos, sin = (t.to(sine_dtype or x.dtype).to(x.dtype) for t in (angle.cos(), angle.sin()))
    one, two = x[..., :pairs], x[..., half : half + pairs]
    y[..., :pairs] = one * cos - two * sin
    y[..., half : half + pairs] = two * cos + one * sin
    return y


def check_call(args: tuple[Any, ...], kwargs: dict[str, Any], implementation: str = "reference") -> Tensor:
    """The op's result, once it is as near to fp64 as plain PyTorch of the same dtype."""
    with forced(implementation):
        got = call(OP, *args, **kwargs)
    check_numerics(got, naive(got.dtype, *args, **kwargs), naive(torch.float64, *args, **kwargs), atol=1e-6)
    return got


def move(value: Any, device: str) -> Any:
    if isinstance(value, tuple):
        return tuple(move(v, device) for v in value)
    return value.to(device) if isinstance(value, Tensor) else value


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


everywhere = pytest.mark.parametrize("device", DEVICES)
each_implementation = pytest.mark.parametrize("implementation", implementations(OP))
