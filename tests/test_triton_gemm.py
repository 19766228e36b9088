"""The Triton GEMMs compile for every architecture at the checkpoints' sizes; what they leave to the reference."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from mtp_kernels.triton_ops import linear_norm_add, norm_geglu, norm_linear, post_project, pre_project
from torch import Tensor
from triton_compile import ARCHITECTURES, SHARED_LIMIT, Compiled, compile_launch

from mtp_kernels.ops import OPS
from mtp_kernels.weights import PRESETS

CHECKPOINTS = ["E2B", "E4B", "12B", "26B-A4B", "31B"]


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def plans(name: str, rows: int, dtype: torch.dtype) -> Iterator[Any]:
    """All launches of a draft step with the weights of a checkpoint, attention and heads excepted."""
    config = PRESETS[name]
    x, norm = meta(rows, 1, config.hidden, dtype=dtype), meta(config.hidden, dtype=dtype)
    scale = meta(1, dtype=dtype)
    for attention in config.attention:
        heads = config.num_qo_heads * attention.head_dim
        yield from norm_linear.plan(x, norm, 1e-6, meta(heads, config.hidden, dtype=dtype))[0]
        out = meta(config.hidden, heads, dtype=dtype)
        yield from linear_norm_add.plan(meta(rows, 1, heads, dtype=dtype), out, norm, 1e-6, x)[0]
    gate_up = meta(2 * config.intermediate, config.hidden, dtype=dtype)
    yield from norm_geglu.plan(x, norm, 1e-6, gate_up)[0]
    down, inner = meta(config.hidden, config.intermediate, dtype=dtype), meta(rows, 1, config.intermediate, dtype=dtype)
    yield from linear_norm_add.plan(inner, down, norm, 1e-6, x, scale=scale)[0]
    yield from linear_norm_add.plan(x, None, norm, 1e-6, x, scale=scale)[0]
    yield from post_project.plan(x, norm, 1e-6, meta(config.backbone, config.hidden, dtype=dtype))[0]
    ids, state = meta(rows, 1, dtype=torch.int64), meta(rows, 1, config.backbone, dtype=dtype)
    embed = meta(config.vocab, config.backbone, dtype=dtype)
    weight = meta(config.hidden, 2 * config.backbone, dtype=dtype)
    yield from pre_project.plan(ids, embed, 50.5, state, weight, row_index=ids)[0]
    yield from pre_project.plan(ids, embed, 50.5, None, weight)[0]


def distinct(launches: Iterator[Any]) -> list[Any]:
    """One launch for each compilation: what does not change the code is left out of the comparison."""
    found = {}
    for launch in launches:
        types = {k: v.dtype if isinstance(v, Tensor) else type(v) for k, v in launch.args.items()}
        constants = dict(launch.constants)
        constants["N"] %= launch.constants["BLOCK_N"]  # says which loads have a mask, and is a stride of the result
        if is_wide(launch):  # K, too, is only a bound and a stride
            constants.update(K=constants["K"] % constants["BLOCK_K"], SPLITS=None, BLOCKS=None)
        key = (launch.kernel.__name__, str(types), str(constants), launch.num_warps, launch.num_stages)
        found.setdefault(key, launch)
    return list(found.values())


def check_launch(launch: Any, arch: int, dtype: torch.dtype = torch.bfloat16) -> Compiled:
    compiled = compile_launch(launch, arch)
    what = f"{launch.kernel.__name__} {launch.constants}"
    assert compiled.shared <= SHARED_LIMIT[arch], f"{what}: {compiled.shared} bytes of shared memory"
    assert arch != 90 or dtype != torch.bfloat16 or compiled.spill_stores == 0, f"{what}: registers spill"
    if not is_wide(launch):
        assert "wgmma" not in compiled.ptx, f"{what}: an instruction whose sums could follow the number of rows"
    assert "griddepcontrol" not in compiled.ptx, f"{what}: starts early, unasked"
    return compiled


def is_wide(launch: Any) -> bool:
    return launch.kernel.__name__.startswith("wide_")


def check_compiles(arch: int, dtype: torch.dtype, names: list[str], rows: int) -> None:
    """All launches but the wide ones in bf16, which have a test of their own."""
    launches = (launch for name in names for launch in plans(name, rows, dtype))
    for launch in distinct(launch for launch in launches if not is_wide(launch) or dtype != torch.bfloat16):
        check_launch(launch, arch, dtype)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_one_row_compiles(arch: int) -> None:
    check_compiles(arch, torch.bfloat16, CHECKPOINTS if arch == 90 else ["E4B", "31B"], 1)


@pytest.mark.parametrize(("arch", "rows"), [(90, 17), (90, 64), (120, 64)])
def test_many_rows_compile(arch: int, rows: int) -> None:
    check_compiles(arch, torch.bfloat16, ["E4B", "31B"], rows)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_wide_products_take_the_same_instruction_for_any_number_of_rows(arch: int) -> None:
    kinds: dict[str, set[str]] = {}
    rows_of_tiles = set()
    for rows in (1, 17, 64) if arch == 90 else (1, 64):
        names = ("31B", "12B") if arch in (90, 100) else ("31B",)
        launches = (launch for name in names for launch in plans(name, rows, torch.bfloat16))
        for launch in distinct(filter(is_wide, launches)):
            compiled = check_launch(launch, arch)
            same = {k: v for k, v in launch.constants.items() if k != "ROWS"}
            found = re.findall(r"\b(wgmma\.mma_async|tcgen05\.mma(?=\.)|mma\.sync)", compiled.ptx)
            kinds.setdefault(f"{launch.kernel.__name__} {same}", set()).update(found)
            rows_of_tiles.add(launch.constants["ROWS"])
            # All sums inside a tile are of pairs: no order that its layout, and so its number of rows, could change.
            assert set(reduced_sizes(compiled.ttgir)) <= {2}
    assert rows_of_tiles >= {16, 64}
    assert all(len(found) == 1 for found in kinds.values()), kinds
    fast = {90: "wgmma.mma_async", 100: "tcgen05.mma"}.get(arch, "mma.sync")
    assert {fast} in kinds.values()


def reduced_sizes(ttgir: str) -> list[int]:
    """The length of what each tt.reduce adds."""
    found = re.findall(r'"tt\.reduce"\([^\n]*axis = (\d+).*?\}\)[^\n]* : \(tensor<([\dx]+)xf32', ttgir, re.S)
    assert len(found) == ttgir.count('"tt.reduce"(')
    return [int(shape.split("x")[int(axis)]) for axis, shape in found]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes_compile(dtype: torch.dtype) -> None:
    check_compiles(120, dtype, ["E4B", "31B"], 64)  # the least shared memory


def test_what_they_leave_to_the_reference() -> None:
    x, norm = torch.empty(1, 1, 1, 1, 8), torch.empty(8)
    for op, weight in (("norm_linear", 4), ("norm_geglu", 4), ("post_project", 4)):
        serves = OPS[op].kernels[0].serves
        assert serves(x, norm, 1e-6, torch.empty(weight, 8)) == "x has 4 leading dimensions, more than 3"
        assert serves(x[0, ..., :0], norm[:0], 1e-6, torch.empty(weight, 0)) == "x has no columns"
        assert serves(x[0], norm, 1e-6, torch.empty(weight, 8)) == ""
    serves = OPS["linear_norm_add"].kernels[0].serves
    assert serves(x, None, norm, 1e-6, x) == "x has 4 leading dimensions, more than 3"
    wide = torch.empty(1, 32769)
    assert serves(wide, None, wide[0], 1e-6, wide) == "a row of 32769 columns, more than 32768, in one block"
    assert serves(x[0], None, norm, 1e-6, x[0]) == ""
    serves = OPS["pre_project"].kernels[0].serves
    ids = torch.zeros(1, 1, dtype=torch.int64)
    assert serves(ids, torch.empty(9, 0), 1.0, None, torch.empty(4, 0)) == "embed_weight has no columns"
    assert serves(ids, torch.empty(9, 8), 1.0, None, torch.empty(4, 16)) == ""
