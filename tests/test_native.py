"""The CPU library: what it links to, and its private ops against the references, bit for bit, on any contents."""

from __future__ import annotations

import importlib
import re
import shutil
import subprocess
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from harness import assert_same_bits, results, strided
from torch import Tensor

from mtp_kernels import _native

LIBRARY = _native.FOLDER / "libmtp_cpu.so"
BAD = [-(2**63), -(2**40), -(2**31), -2, -1, 0, 1, 2**31 - 1, 2**40, 2**63 - 1]
SCORES = [0.0, -0.0, -1.0, -1.0, -2.5, -torch.inf, torch.nan, torch.inf]
CASES = 200

if why := _native.cpu_library():
    pytest.skip(why, allow_module_level=True)


def both(name: str, *args: Any, **kwargs: Any) -> None:
    """The library's op and the reference agree in every bit, on these tensors and on strided views of them."""
    reference: Callable[..., Any] = getattr(importlib.import_module(f"mtp_kernels.reference.{name}"), name)
    kernel = _native.cpu_op(name)
    got = results(kernel(*args, **kwargs))
    view = results(kernel(*map(_strided, args), **{k: _strided(v) for k, v in kwargs.items()}))
    for one, two, expected in zip(got, view, results(reference(*args, **kwargs))):
        assert_same_bits(one, expected)
        assert_same_bits(two, expected)


def _strided(value: Any) -> Any:
    return strided(value) if isinstance(value, Tensor) else value


def indices(rng: Random, shape: tuple[int, ...], size: int) -> Tensor:
    """Mostly 0 to size - 1, now and then anything; int32 or int64."""
    dtype = rng.choice([torch.int32, torch.int64])
    bad = [b for b in (size, *BAD) if torch.iinfo(dtype).min <= b <= torch.iinfo(dtype).max]
    rate = rng.choice([0.0, 0.1, 0.5])
    return tensor(shape, dtype, lambda: rng.choice(bad) if rng.random() < rate else rng.randrange(max(1, size)))


def scores(rng: Random, shape: tuple[int, ...]) -> Tensor:
    """Values with many ties, infinities and NaN among them."""
    rate = rng.choice([0.0, 0.3, 1.0])
    return tensor(shape, torch.float32, lambda: rng.choice(SCORES) if rng.random() < rate else -9 * rng.random())


def tensor(shape: tuple[int, ...], dtype: torch.dtype, value: Callable[[], float]) -> Tensor:
    return torch.tensor([value() for _ in range(torch.Size(shape).numel())], dtype=dtype).reshape(shape)


@pytest.mark.parametrize("seed", range(CASES))
def test_tree_expand(seed: int) -> None:
    rng = Random(seed)
    batch, rows, k = rng.randint(0, 3), rng.randint(1, 4), rng.randint(1, 4)
    args = scores(rng, (batch, rows, k)), indices(rng, (batch, rows, k), 50), rng.choice([0, 7, 2**40, 2**63 - 2])
    first = rows == 1 and rng.random() < 0.5
    more = {} if first else {"scores": scores(rng, (batch, rows)), "frontier": indices(rng, (batch, rows), 20)}
    both("tree_expand", *args, **more)


@pytest.mark.parametrize("seed", range(CASES))
def test_tree_build(seed: int) -> None:
    rng = Random(seed)
    batch, candidates = rng.randint(0, 3), rng.randint(0, 12)
    values, parent = scores(rng, (batch, candidates)), indices(rng, (batch, candidates), candidates)
    if rng.random() < 0.5:  # a tree as tree_expand makes one: parents come first
        parent = torch.minimum(parent, torch.arange(candidates)) - 1
    root_ids, positions = indices(rng, (batch,), 50), indices(rng, (batch,), 9)
    ids, num_draft_tokens = indices(rng, (batch, candidates), 50), rng.randint(1, candidates + 1)
    both("tree_build", root_ids, values, ids, parent, positions, num_draft_tokens)


@pytest.mark.parametrize("seed", range(CASES))
def test_verify_greedy(seed: int) -> None:
    rng = Random(seed)
    batch, nodes, vocab = rng.randint(0, 3), rng.randint(1, 7), rng.randint(1, 3)
    rows = batch * nodes + rng.choice([0, 0, 3])
    target = indices(rng, (rows,), vocab)
    if rows == batch * nodes and rng.random() < 0.5:
        target = target.view(batch, nodes)
    draft_ids, index = indices(rng, (batch, nodes), vocab), indices(rng, (batch, nodes), rows)
    links = indices(rng, (batch, nodes), nodes), indices(rng, (batch, nodes), nodes)
    both("verify_greedy", draft_ids, index, *links, target, rng.randint(0, 9))


@pytest.mark.parametrize("seed", range(CASES))
def test_commit(seed: int) -> None:
    rng = Random(seed)
    batch, width, rows = rng.randint(0, 3), rng.randint(1, 5), rng.randint(1, 9)
    hidden = torch.arange(rows * 3.0).view(rows, 3).to(rng.choice([torch.bfloat16, torch.float16, torch.float32]))
    stops = {} if rng.random() < 0.3 else {"stop_ids": indices(rng, (rng.randint(0, 3),), 5) - 1}
    path = indices(rng, (batch, width), rows), indices(rng, (batch,), width), indices(rng, (batch, width), 5) - 1
    both("commit", *path, hidden, **stops)


def test_a_large_batch_is_split_over_threads() -> None:
    """Each request's results are those it has alone, whatever thread takes it."""
    generator = torch.Generator().manual_seed(1)
    batch, candidates, nodes = 500, 84, 32
    values = -torch.rand(batch, candidates, generator=generator)
    parent = torch.minimum(torch.randint(-1, candidates, (batch, candidates), generator=generator),
                           torch.arange(candidates) - 1)
    ids = torch.randint(0, 1000, (batch, candidates), generator=generator)
    root, positions = ids[:, 0], torch.arange(batch)
    kernel = _native.cpu_op("tree_build")
    together = kernel(root, values, ids, parent, positions, nodes)
    for b in (0, 1, 250, 499):
        one = slice(b, b + 1)
        alone = kernel(root[one], values[one], ids[one], parent[one], positions[one], nodes)
        for name, (whole, part) in enumerate(zip(together, alone)):
            shift = b * nodes if name == 5 else 0  # retrieve_index counts rows of the whole batch
            assert_same_bits(whole[one] - shift if shift else whole[one], part)


def test_large_strides_are_64_bit() -> None:
    """A row of target_hidden beyond 2^31 elements is found (virtual memory; only one page of it is touched)."""
    stride = 2**31 // 3 + 5
    storage = torch.empty(3 * stride + 4, dtype=torch.bfloat16)
    hidden = storage.as_strided((4, 4), (stride, 1))
    hidden[3] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    got = _native.cpu_op("commit")(torch.tensor([[3]]), torch.tensor([0]), torch.tensor([[7]]), hidden)
    assert got[4].tolist() == [[1.0, 2.0, 3.0, 4.0]]


def test_wrong_dtypes_and_ranks_raise() -> None:
    """Python checks arguments first; called directly the library still refuses what it would misread."""
    logprobs, ids = torch.zeros(1, 1, 2), torch.zeros(1, 1, 2, dtype=torch.int64)
    kernel = _native.cpu_op("tree_expand")
    for wrong in ((logprobs.double(), ids), (logprobs, ids.short()), (logprobs[0], ids), (logprobs, ids[0])):
        with pytest.raises(RuntimeError, match="expected"):
            kernel(*wrong, 0)


def tool_output(*command: str) -> str:
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    return subprocess.run([*command, str(LIBRARY)], capture_output=True, text=True, check=True).stdout


def test_only_the_stable_c_abi_is_used() -> None:
    undefined = [line.split()[-1].split("@")[0] for line in tool_output("nm", "-D", "--undefined-only").splitlines()]
    assert not [s for s in undefined if re.match(r"_ZNK?(2at|3c10|5torch|6caffe2)|_ZT[VI]N(2at|3c10|5torch)", s)]
    assert "torch_library_impl" in undefined
    assert not [s for s in undefined if s.startswith("Py")]


def test_nothing_but_the_ops_is_visible() -> None:
    """Hidden visibility: symbols of ours cannot meet symbols of another library."""
    defined = [line.split()[-1] for line in tool_output("nm", "-D", "--defined-only").splitlines()]
    assert not [s for s in defined if "3mtp" in s]


def test_no_path_of_the_building_machine_is_in_the_library() -> None:
    dynamic = tool_output("readelf", "-d")
    assert "RPATH" not in dynamic and "RUNPATH" not in dynamic
    holds = LIBRARY.read_bytes()
    assert not [path for path in (b"site-packages", b"/csrc/cpu", b"/csrc/include") if path in holds]


def test_the_library_loads_once_and_names_what_it_lacks() -> None:
    assert _native.cpu_library() == ""
    with pytest.raises(ImportError, match=r"^the CPU library has no merge_topk$"):
        _native.cpu_op("merge_topk")
