"""Launches that start early, with weights fetched ahead, give the bits of launches that wait for their turn."""

from __future__ import annotations

import pytest
import torch
from harness import assert_same_bits
from torch import Tensor

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0), reason="needs a GPU of sm_90 or later"
)

LAYERS = 6
HIDDEN, INTERMEDIATE, BACKBONE = 1024, 8192, 2816


class Chain:
    """A step's projections one behind the other; each reads what the one in front of it has just written."""

    def __init__(self, rows: int, dtype: torch.dtype) -> None:
        def matrix(out: int, inner: int) -> Tensor:
            return torch.randn(out, inner, device="cuda").mul_(inner**-0.5).to(dtype)

        self.ids = torch.randint(100, (rows, 1), device="cuda")
        self.state = torch.randn(rows, 1, BACKBONE, device="cuda").to(dtype)
        self.embed, self.pre, self.post = matrix(100, BACKBONE), matrix(HIDDEN, 2 * BACKBONE), matrix(BACKBONE, HIDDEN)
        self.norm = torch.randn(HIDDEN, device="cuda").mul_(0.1).add_(1).to(dtype)
        self.gate_up = [matrix(2 * INTERMEDIATE, HIDDEN) for _ in range(LAYERS)]
        self.down = [matrix(HIDDEN, INTERMEDIATE) for _ in range(LAYERS)]

    def run(self, early: bool) -> tuple[Tensor, ...]:
        from mtp_kernels.triton_ops.linear_norm_add import norm_add_launch, partial_launch
        from mtp_kernels.triton_ops.norm_linear import norm_linear_launch
        from mtp_kernels.triton_ops.pre_project import add_splits_launch, gather_launch

        norm, eps, rows = self.norm, 1e-6, self.ids.size(0)
        gather = gather_launch(self.ids, self.embed, 53.0, self.state, self.pre, early=early)
        x = self.state.new_empty(rows, 1, HIDDEN)
        launches = [gather, add_splits_launch(gather.args["partials"], x, early=early, ahead=self.gate_up[0])]
        for gate_up, down, after in zip(self.gate_up, self.down, (*self.gate_up[1:], self.post)):
            inner, added = x.new_empty(rows, 1, INTERMEDIATE), torch.empty_like(x)
            launches.append(norm_linear_launch(x, norm, eps, gate_up, inner, gated=True, early=early, ahead=down))
            launches.append(partial_launch(inner, down, early=early, ahead=after))
            partials = launches[-1].args["partials"]
            launches.append(norm_add_launch(partials, norm, eps, x, added, split=True, early=early, ahead=after))
            x = added
        normed, state = torch.empty_like(x), x.new_empty(rows, 1, BACKBONE)
        launches.append(norm_linear_launch(x, norm, eps, self.post, state, normed=normed, early=early))
        for launch in launches:
            assert launch.early == early
            launch.run()
        return x, normed, state


@pytest.mark.parametrize("rows", [1, 20, 64, 150])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_early_equals_in_turn(rows: int, dtype: torch.dtype) -> None:
    chain = Chain(rows, dtype)
    for _ in range(10):
        for early, in_turn in zip(chain.run(True), chain.run(False)):
            assert_same_bits(early, in_turn)


def test_captured_early_launches_follow_their_inputs() -> None:
    chain = Chain(3, torch.bfloat16)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        chain.run(True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain.run(True)
    for seed in range(50):
        torch.manual_seed(seed)
        chain.ids.random_(100)
        chain.state.normal_()
        graph.replay()
        for one, other in zip(captured, chain.run(False)):
            assert_same_bits(one, other)
