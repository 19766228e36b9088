"""The CUDA library, as far as no GPU is needed: what it links to, what its kernels use, what is planned for them."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from mtp_kernels.triton_ops._launch import Launch

from mtp_kernels import AssistantWeights, KVView, _native, _segment, fused
from mtp_kernels._cuda_launch import CudaLaunch
from mtp_kernels.captured import choose_kernels

LIBRARY = _native.FOLDER / "libmtp_cuda.so"
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
built = pytest.mark.skipif(not LIBRARY.exists(), reason=f"no CUDA library: {_native.why_not_built('cuda')}")


def output(*command: str | Path) -> str:
    assert shutil.which(command[0]) or Path(command[0]).exists(), f"{command[0]} is missing"
    return subprocess.run([str(c) for c in command], check=True, capture_output=True, text=True).stdout


@built
def test_only_the_stable_c_abi_is_used() -> None:
    lines = output("nm", "-D", "--undefined-only", LIBRARY).splitlines()
    undefined = [line.split()[-1].split("@")[0] for line in lines]
    assert not [s for s in undefined if re.match(r"_ZNK?(2at|3c10|5torch|6caffe2)|_ZT[VI]N(2at|3c10|5torch)", s)]
    assert "aoti_torch_get_current_cuda_stream" in undefined
    assert not [s for s in undefined if s.startswith(("Py", "cuda"))]  # the CUDA runtime is inside


@built
def test_nothing_but_the_ops_is_visible() -> None:
    defined = output("nm", "-D", "--defined-only", LIBRARY)
    assert not re.search("3mtp", defined)


@built
def test_no_path_of_the_building_machine_is_in_the_library() -> None:
    text = LIBRARY.read_bytes()
    assert str(Path(torch.__file__).parent).encode() not in text
    assert str(Path(__file__).resolve().parents[1]).encode() not in text


@built
def test_no_kernel_spills() -> None:
    """Stack and local memory are where registers would go."""
    usage = output(CUOBJDUMP, "--dump-resource-usage", LIBRARY)
    found: dict[str, int] = {}
    for block in usage.split("Fatbin elf code:")[1:]:
        arch = re.search(r"arch = (\w+)", block)
        assert arch is not None
        kernels = re.findall(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", block)
        found[arch.group(1)] = found.get(arch.group(1), 0) + len(kernels)
        assert all(int(registers) <= 255 and stack == local == "0" for registers, stack, local in kernels), block
    # Six segments, the candidates, and attention of four shapes, in folds or not, two of them in two folds too; and
    # Hopper's of a tree's frontier, a unit's columns in one block or two, in folds or not.
    assert found == {**dict.fromkeys(("sm_80", "sm_90", "sm_100", "sm_120"), 18), "sm_90a": 4}


def test_why_it_is_not_there() -> None:
    if torch.version.cuda is None and LIBRARY.exists():
        assert _native.cuda_library() == "this torch was built without CUDA"
    elif not LIBRARY.exists():
        assert _native.cuda_library().startswith("the CUDA library is missing")


def meta_views(weights: AssistantWeights, batch: int, context: int) -> dict[str, KVView]:
    found = {}
    for layer in weights.layers:
        heads, dim = weights.config.kv_shape(layer.layer_type)
        cache = torch.empty(batch * context // 16, 16, heads, dim, dtype=weights.dtype, device="meta")
        table = torch.empty(batch, context // 16, dtype=torch.int32, device="meta")
        window = 511 if layer.layer_type == "sliding_attention" else -1
        found[layer.layer_type] = KVView(cache, cache, table, table[:, 0], window_left=window)
    return found


def launches(model: str, batch: int, context: int) -> list[Any]:
    """Of two steps of a chain on segments, on the meta device."""
    weights = AssistantWeights.synthetic(model, device="meta")
    kv = meta_views(weights, batch, context)
    ids = torch.empty(batch, dtype=torch.int64, device="meta")
    state = torch.empty(batch, weights.backbone, dtype=weights.dtype, device="meta")
    found: list[Any] = []
    workspace = _segment.new_workspace(weights, batch)
    fused.draft_chain(fused.Drafter(weights, kv, ids, True, found.append, workspace), ids, state, 2, None, ids)
    return found


@pytest.mark.parametrize("model", ["E2B", "E4B"])
@pytest.mark.parametrize("batch,settles", [(1, 0), (8, 0), (64, 1)])
def test_launches_of_a_round(model: str, batch: int, settles: int) -> None:
    """A step is projection and queries, an attention and a segment a layer, and the candidates; a round ends once."""
    made = launches(model, batch, 1024)
    names = [x.op if isinstance(x, CudaLaunch) else x.kernel.fn.__name__ for x in made]
    step = ["pre_round", *["settle_round"] * settles, "norm_linear_round", *["attend", "segment"] * 4, "candidates"]
    assert names == [*step, *step, "finish_round"]


@pytest.mark.parametrize("batch,each", [(1, 1), (64, 8)])
def test_a_segment_knows_the_chunks_of_its_attention(batch: int, each: int) -> None:
    made = launches("E4B", batch, 4096)
    for attention, segment in pairwise(made):
        if not isinstance(segment, CudaLaunch) or segment.op != "segment":
            continue
        assert isinstance(attention, Launch)
        args, heads = segment.args, attention.args["k_ptr"].size(2)
        assert args["partial"] is attention.args["partial_ptr"] and args["stats"] is attention.args["stats_ptr"]
        assert args["capacity"] == 4096 and args["num_kv_heads"] == heads
        assert args["chunks_a_part"] == attention.constants["CHUNKS"] == (each if args["bound"] == 4096 else
                                                                          min(each, args["fold"]))
        assert args["chunk_multiple"] == attention.constants["BLOCK_N"]
    last = made[-3]
    assert last.args["centroids"] is not None and last.args["normed"] is not None and last.args["x_out"] is None


def test_one_part_needs_no_merge() -> None:
    """Of a table so narrow that a part holds all keys, attention leaves its result."""
    segment = next(x for x in launches("E4B", 1, 16) if isinstance(x, CudaLaunch))
    assert segment.args["partial"] is None and segment.args["attended"].shape == (1, 1, 4, 256)


def test_what_is_refused_before_the_device_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights on the meta device stand for those of a GPU."""
    weights = AssistantWeights.synthetic("E4B", device="meta")
    kv = meta_views(weights, 2, 64)
    monkeypatch.setattr(AssistantWeights, "device", property(lambda self: torch.device("cuda")))
    monkeypatch.setattr(_segment, "_refuses_device", lambda device, rows: "")
    assert _segment.refuses(weights, kv, 64) == ""
    assert _segment.refuses(weights, kv, 65) == "65 rows are more than 64"
    assert _segment.refuses(AssistantWeights.synthetic("31B", device="meta"), kv, 1) == "hidden 1024 is not 256"
    half = AssistantWeights.synthetic("E4B", dtype=torch.float16, device="meta")
    assert _segment.refuses(half, kv, 1) == "post_projection of torch.float16"
    wide_norm = replace(weights, norm=weights.norm.float())
    assert _segment.refuses(wide_norm, kv, 1) == "a norm of torch.float32"
    layer = replace(weights.layers[1], layer_scalar=weights.layers[1].layer_scalar.float())
    wide_scalar = replace(weights, layers=(weights.layers[0], layer, *weights.layers[2:]))
    assert _segment.refuses(wide_scalar, kv, 1) == "a norm or scalar of torch.float32"
    odd = weights.layers[0].down.new_empty(256, 2049)[:, 1:]
    layer = replace(weights.layers[0], down=odd)
    assert _segment.refuses(replace(weights, layers=(layer, *weights.layers[1:])), kv, 1).startswith("down, whose rows")
    flat = {name: replace(view, kv_indptr=view.seq_lens) for name, view in kv.items()}
    assert _segment.refuses(weights, flat, 1) == "a flat page table"
    assert _segment.refuses(weights, {}, 1) == "no view for sliding_attention"


def test_candidates_want_whole_rows_of_the_head() -> None:
    """Of a head cut out of a wider matrix, whose rows cannot be read 16 bytes at a time, Triton's kernels take care."""
    weights = AssistantWeights.synthetic("E4B", device="meta")
    wide = weights.lm_head.new_empty(weights.vocab, 257)[:, 1:]
    assert _segment.ranks(weights) and not _segment.ranks(replace(weights, lm_head=wide))


def test_reasons() -> None:
    weights = AssistantWeights.synthetic("tiny")
    assert _segment.refuses(weights, {}, 1) == "no CUDA kernels on cpu"
    assert choose_kernels(weights, {}, 1)[0] != "segments"
    assert _segment.ranks(AssistantWeights.synthetic("E4B", device="meta"))
    assert not _segment.ranks(AssistantWeights.synthetic("31B", device="meta"))
