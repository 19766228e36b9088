"""A round's private kernels compile for every architecture, at the checkpoints' sizes; they start early on sm_90."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable

import pytest
import torch
from mtp_kernels.triton_ops import _launch
from mtp_kernels.triton_ops._dense_round import split_linear
from mtp_kernels.triton_ops._launch import Launch
from triton_compile import ARCHITECTURES, SHARED_LIMIT, compile_launch

from mtp_kernels import AssistantWeights, KVView
from mtp_kernels.fused import Drafter, draft_chain

PAGE = 16
DENSE = ("pre_dense", "linear_dense")  # projections


def launches(model: str, batch: int, context: int, early: bool) -> list[Launch]:
    """Of two steps of a chain, on the meta device."""
    weights = AssistantWeights.synthetic(model, device="meta")
    kv = {}
    for layer in weights.layers:
        heads, dim = weights.config.kv_shape(layer.layer_type)
        cache = torch.empty(batch * context // PAGE, PAGE, heads, dim, dtype=torch.bfloat16, device="meta")
        table = torch.empty(batch, context // PAGE, dtype=torch.int32, device="meta")
        lengths = torch.empty(batch, dtype=torch.int32, device="meta")
        window = weights.config.sliding_window - 1 if layer.layer_type == "sliding_attention" else -1
        kv[layer.layer_type] = KVView(cache, cache, table, lengths, window_left=window)
    ids = torch.empty(batch, dtype=torch.int64, device="meta")
    state = torch.empty(batch, weights.backbone, dtype=torch.bfloat16, device="meta")
    found: list[Launch] = []
    draft_chain(Drafter(weights, kv, ids, early, found.append), ids, state, 2, None, ids)
    return found


def kinds(found: list[Launch]) -> list[Launch]:
    """Each kind of launch once."""
    return list({_kind(launch): launch for launch in found}.values())


def _kind(launch: Launch) -> tuple[object, ...]:
    given = tuple(name for name, value in launch.args.items() if value is not None)
    return launch.kernel.fn.__name__, tuple(launch.constants.items()), launch.num_warps, given


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("batch", [1, 64])
def test_compiles(arch: int, batch: int) -> None:
    """Starting early is tried where it exists."""
    for launch in kinds(launches("E4B", batch, 1024, early=arch >= 90)):
        name = launch.kernel.fn.__name__
        if not name.endswith("_round") and arch != 90:
            continue
        compiled = compile_launch(launch, arch)
        assert compiled.shared <= SHARED_LIMIT[arch], name
        assert arch != 90 or compiled.spill_stores == 0, name
        assert ("griddepcontrol.wait" in compiled.ptx) == (arch >= 90), name


def test_weights_are_read_before_the_wait() -> None:
    """That is what starting early is for."""
    for launch in kinds(launches("E4B", 1, 1024, early=True)):
        if launch.kernel.fn.__name__ in ("norm_linear_round", "geglu_round", "linear_round", "pre_round"):
            before, _, after = compile_launch(launch, 90).ptx.partition("griddepcontrol.wait")
            assert before.count("st.shared") >= 8, launch.kernel.fn.__name__
            assert "mma.sync" not in before and "mma.sync" in after


class Driver:
    def __init__(self) -> None:
        self.asked: list[tuple[int | None, int, int]] = []

    def cuFuncSetAttribute(self, function: ctypes.c_void_p, attribute: int, value: int) -> int:
        self.asked.append((function.value, attribute, value))
        return 0


class Compiled:
    function = 42


class Kernel:
    """Of JITFunction, what a launch uses."""

    def __init__(self) -> None:
        self.compiled = Compiled()

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Compiled]:
        return lambda **_: self.compiled


def test_kernels_of_a_round_ask_once_for_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that start early: a kernel of an op alone leaves the SMs as its caller has them."""
    driver = Driver()
    monkeypatch.setattr(_launch, "_driver", lambda: driver)
    for early, in_round in ((False, False), (False, True), (True, False), (True, True), (True, True)):
        Launch(Kernel(), (1,), {}, early=early, in_round=in_round).run()
    assert driver.asked == [(42, 9, 100)] * 2
    kernel = Kernel()
    for _ in range(3):
        Launch(kernel, (1,), {}, early=True, in_round=True).run()
    assert driver.asked == [(42, 9, 100)] * 3


@pytest.mark.parametrize("model", ["E4B", "31B"])
@pytest.mark.parametrize("early", [False, True])
def test_all_launches_of_a_round_know_it(model: str, early: bool) -> None:
    for launch in launches(model, 1, 1024, early):
        assert launch.early == early and launch.in_round, launch.kernel.fn.__name__


@pytest.mark.parametrize("model", ["E2B", "E4B"])
def test_launches_of_a_step(model: str) -> None:
    """28 a step for up to 8 requests, 9 more where sums have a kernel of their own; one finishes the round."""
    assert [len(launches(model, batch, 1024, True)) for batch in (1, 8, 9)] == [57, 57, 75]


@pytest.mark.parametrize(("arch", "batch"), [(80, 8), (90, 1), (90, 2), (90, 4), (90, 8), (100, 8), (120, 8)])
def test_dense_compiles(arch: int, batch: int) -> None:
    for launch in kinds(launches("31B", batch, 1024, early=arch >= 90)):
        name = launch.kernel.fn.__name__
        if name not in DENSE and arch != 90:
            continue
        compiled = compile_launch(launch, arch)
        assert compiled.shared <= SHARED_LIMIT[arch], name
        assert arch != 90 or compiled.spill_stores == 0, name
        assert ("griddepcontrol.wait" in compiled.ptx) == (arch >= 90), name
        if name in DENSE:  # one kind of instruction for any number of rows, on any GPU
            assert "mma.sync" in compiled.ptx, name
            assert "wgmma" not in compiled.ptx and "tcgen05" not in compiled.ptx, name


@pytest.mark.parametrize("model", ["12B", "26B-A4B"])
def test_other_dense_sizes_compile(model: str) -> None:
    for launch in kinds(launches(model, 1, 1024, early=True)):
        if launch.kernel.fn.__name__ in DENSE:
            compiled = compile_launch(launch, 90)
            assert compiled.shared <= SHARED_LIMIT[90] and compiled.spill_stores == 0, launch.constants


def test_dense_weights_are_read_before_the_wait() -> None:
    """A tile of 64 KB, 16 bytes a thread and load, or the first rows asked for; nothing is written, or multiplied."""
    asked = set()
    for launch in kinds(launches("31B", 1, 1024, True)):
        name = launch.kernel.fn.__name__
        if name not in (*DENSE, "stream_kernel"):
            continue
        before, _, after = compile_launch(launch, 90).ptx.partition("griddepcontrol.wait")
        asked |= {name} if "cp.async.bulk.prefetch.L2.global" in before else set()
        assert "bulk.prefetch" not in after, name
        assert "st.global" not in before and "mma.sync" not in before, name
        if name in DENSE:
            assert len(re.findall(r"ld\.global\S*\.v4", before)) >= 32, name
    assert asked == {"stream_kernel", "linear_dense"}


@pytest.mark.parametrize(("inner", "asks"), [(16384, True), (16320, False), (16256, False)])
def test_rows_of_a_tile_are_asked_for_in_pieces_and_no_further(inner: int, asks: bool) -> None:
    """Eight splits of 2048 columns; the last of 1984; of 2032, of which no eighth is a multiple of 16 bytes."""
    x = torch.empty(1, inner, dtype=torch.bfloat16, device="meta")
    launch, _ = split_linear(x, torch.empty(1024, inner, dtype=x.dtype, device="meta"), hold=False, early=True)
    assert (launch.constants["ROOM"] > 0) == asks
    assert ("bulk.prefetch" in compile_launch(launch, 90).ptx) == asks


def test_keys_are_asked_for_before_the_wait() -> None:
    """Of a chunk of several tiles: into shared memory, in front of the loop in which its queries are waited for."""
    late = [x for x in kinds(launches("31B", 1, 1024, True)) if x.constants.get("LATE")]
    assert {x.constants["HEAD_DIM"] for x in late} == {256, 512}
    for launch in late:
        code = compile_launch(launch, 90).ttgir
        assert code.index("async_copy_global_to_local") < code.index("scf.for") < code.rindex("griddepcontrol.wait")


@pytest.mark.parametrize("model", ["26B-A4B", "31B"])
def test_rows_of_a_dense_tile_lie_in_different_banks(model: str) -> None:
    """Else eight rows that a matrix instruction's load reads would lie in the same ones."""
    for launch in kinds(launches(model, 1, 1024, True)):
        if launch.kernel.fn.__name__ in DENSE:
            found = re.findall(r"local_alloc.*tensor<\d+x\d+x256xbf16.*-> !ttg.memdesc<.*, #(\w+), #smem", (
                code := compile_launch(launch, 90).ttgir
            ))
            for name in found:
                order = re.search(rf"^#{name} = .*maxPhase = (\d+), order = \[(.*)\]", code, re.MULTILINE)
                assert order and order.groups() == ("8", "2, 1, 0"), launch.kernel.fn.__name__
            assert found or not launch.constants["HOLD"]


@pytest.mark.parametrize(("model", "hold"), [("12B", True), ("26B-A4B", True), ("31B", False)])
def test_programs_of_few_queries_hold_their_weights(model: str, hold: bool) -> None:
    """Three of each layer, beside post_projection; o_proj never. What is not held is in shared memory before the wait,
    in a quarter of the room."""
    found = [x for x in launches(model, 1, 1024, True) if x.kernel.fn.__name__ == "linear_dense"][:17]
    assert [x.constants["HOLD"] for x in found] == [hold, False, hold, hold] * 4 + [True]
    for launch in kinds(found):
        compiled = compile_launch(launch, 90)
        before, _, after = compiled.ptx.partition("griddepcontrol.wait")
        assert ("ldmatrix" in before) == (not launch.constants["HOLD"]) and "ldmatrix" in after
        assert (compiled.shared > 32768) == launch.constants["HOLD"]


def test_tiles_of_dense_weights_follow_their_sizes_alone() -> None:
    """The same programs for any number of rows, but for how many of them are the batch's."""

    def shapes(batch: int) -> list[tuple[object, ...]]:
        found = [one for one in launches("31B", batch, 1024, True) if one.kernel.fn.__name__ in DENSE]
        return [(one.grid, {k: v for k, v in one.constants.items() if k != "BLOCK_M"}) for one in found]

    assert shapes(1) == shapes(2) == shapes(3) == shapes(8)


@pytest.mark.parametrize("model", ["12B", "26B-A4B", "31B"])
def test_launches_of_a_dense_step(model: str) -> None:
    """36 a step; one finishes the round."""
    assert [len(launches(model, batch, 1024, True)) for batch in (1, 8)] == [73, 73]
