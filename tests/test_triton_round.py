"""A round's private kernels compile for every architecture, at the sizes of E2B and E4B; they start early on sm_90."""

from __future__ import annotations

import pytest
import torch
from mtp_kernels.triton_ops._launch import Launch
from triton_compile import ARCHITECTURES, SHARED_LIMIT, compile_launch

from mtp_kernels import AssistantWeights, KVView
from mtp_kernels.fused import Drafter, draft_chain

PAGE = 16


def launches(model: str, batch: int, context: int, early: bool) -> list[Launch]:
    """Of two steps of a chain, on the meta device."""
    weights = AssistantWeights.synthetic(model, device="meta")
    kv = {}
    for layer in weights.layers:
        heads, dim = weights.config.kv_shape(layer.layer_type)
        cache = torch.empty(batch * context // PAGE, PAGE, heads, dim, dtype=torch.bfloat16, device="meta")
        table = torch.empty(batch, context // PAGE, dtype=torch.int32, device="meta")
        lengths = torch.empty(batch, dtype=torch.int32, device="meta")
        window = 511 if layer.layer_type == "sliding_attention" else -1
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


@pytest.mark.parametrize("model", ["E2B", "E4B"])
def test_launches_of_a_step(model: str) -> None:
    """28 a step for up to 8 requests, 9 more where sums have a kernel of their own; one finishes the round."""
    assert [len(launches(model, batch, 1024, True)) for batch in (1, 8, 9)] == [57, 57, 75]
