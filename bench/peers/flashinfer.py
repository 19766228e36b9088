"""FlashInfer's decode attention on tensor cores, imported as an installed package."""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from ..case import Unsupported
from ._attention import Attend, expanded, host_lengths, is_fp8, query_dtype, scratch

WORKSPACE = 1 << 30  # bytes, for the partial results of split keys
HEAD_DIMS = (64, 128, 256, 512)


@cache
def load() -> ModuleType:
    """Import it; Unsupported says what it lacks."""
    link_libcuda()
    try:
        import flashinfer
    except Exception as error:  # its import runs much code, and needs many packages
        raise Unsupported(f"flashinfer: import failed: {type(error).__name__}: {error}") from error
    return flashinfer


def attention(
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
    """MakeAttention: a planned BatchDecodeWithPagedKVCacheWrapper; its kernels are compiled where none are cached."""
    dtype = query_dtype(k_cache, q_dtype)
    (num_pages, page_size, num_kv_heads, head_dim), device = k_cache.shape, k_cache.device
    if not k_cache.is_cuda:
        raise Unsupported("FlashInfer needs a GPU")
    if dtype not in (torch.bfloat16, torch.float16):
        raise Unsupported(f"FlashInfer runs bf16 and fp16, not {dtype}")
    if head_dim not in HEAD_DIMS:
        raise Unsupported(f"FlashInfer's head_dim is one of {HEAD_DIMS}, not {head_dim}")
    if k_cache.stride() != v_cache.stride() or k_cache.stride(3) != 1:
        raise Unsupported("FlashInfer wants K and V with the same strides, and a contiguous last dimension")
    flashinfer = load()

    layout = "NHD" if k_cache.stride(1) >= k_cache.stride(2) else "HND"
    caches = tuple(t if layout == "NHD" else t.transpose(1, 2) for t in (k_cache, v_cache))
    tables, lengths = expanded(block_table, seq_lens, rows)
    indptr, indices, last_page_len = page_lists(tables, lengths, page_size, num_pages)
    fp8 = is_fp8(k_cache)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        scratch("flashinfer", WORKSPACE, device=device, dtype=torch.uint8),
        layout,
        use_cuda_graph=True,
        use_tensor_cores=True,
        paged_kv_indptr_buffer=indptr.clone(),
        paged_kv_indices_buffer=indices.clone(),
        paged_kv_last_page_len_buffer=last_page_len.clone(),
        backend="fa2" if fp8 else "auto",  # "auto" is fa2 too for bf16, and none mixes dtypes on every GPU
    )
    wrapper.plan(
        indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size,
        window_left=window_left, sm_scale=sm_scale, q_data_type=dtype, kv_data_type=k_cache.dtype,
    )  # fmt: skip
    scales = {"k_scale": k_scale, "v_scale": v_scale} if fp8 else {}

    def attend(q: Tensor) -> Tensor:
        return wrapper.run(q.flatten(0, 1), caches, **scales).view(q.shape)

    return attend


def page_lists(tables: Tensor, lengths: Tensor, page_size: int, num_pages: int) -> tuple[Tensor, Tensor, Tensor]:
    """kv_indptr [n + 1], kv_indices and last_page_len [n] of a block table, int32 on its device.

    Entries in front of a window may be garbage; FlashInfer skips those pages, but may compute their addresses.
    """
    host_lengths(lengths)
    pages = (lengths + page_size - 1) // page_size
    indptr = torch.cat([pages.new_zeros(1), pages.cumsum(0)]).int()
    used = torch.arange(tables.size(1), device=tables.device) < pages.unsqueeze(1)
    return indptr, tables[used].clamp(0, num_pages - 1), (lengths - (pages - 1) * page_size).int()


def link_libcuda() -> None:
    """FlashInfer links its kernels with -lcuda, and a machine without the CUDA toolkit has only libcuda.so.1.

    Puts a folder with that link in front of LIBRARY_PATH, where none there has one.
    """
    folders = [f for f in os.environ.get("LIBRARY_PATH", "").split(os.pathsep) if f]
    if any((Path(f) / "libcuda.so").exists() for f in folders):
        return
    library = find_libcuda()
    if library is None:
        return
    folder = tempfile.mkdtemp(prefix="mtp-libcuda-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (Path(folder) / "libcuda.so").symlink_to(library)
    os.environ["LIBRARY_PATH"] = os.pathsep.join([folder, *folders])


def find_libcuda() -> Path | None:
    """The driver's libcuda.so.1, as the loader knows it or in the usual folders."""
    try:
        listing = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True, check=False).stdout
    except OSError:
        listing = ""
    known = [line.split("=>")[1].strip() for line in listing.splitlines() if line.strip().startswith("libcuda.so.1 ")]
    folders = os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    folders += ["/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/local/nvidia/lib64", "/usr/local/cuda/compat"]
    folders += ["/usr/lib/aarch64-linux-gnu", "/usr/lib/wsl/lib"]
    places = [*map(Path, known), *(Path(f) / "libcuda.so.1" for f in folders if f)]
    return next((place for place in places if place.exists()), None)
