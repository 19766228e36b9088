"""What every op's tests share: devices, implementations, opcheck, `.out`, strides, poison, error messages, numerics."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from mtp_kernels.ops import OPS, ArgumentError
from mtp_kernels.ops._registry import choose

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
FLOATS = [torch.float32, torch.float16, torch.bfloat16]


def implementations(op: str) -> list[str]:
    """The implementations of `op` that can be had on some device of this machine, the reference first."""
    return list(dict.fromkeys(i for device in DEVICES for i in available(op, device)))


def available(op: str, device: str) -> list[str]:
    """The implementations of `op` that can be had on `device`, the reference first.

    Tests parametrised over `implementation` and `device` run for these pairs only (conftest.py drops the others). Not
    CUDA's: it serves few shapes, none of theirs, and has tests of its own (gpu/test_attend.py, gpu/test_small.py).
    """
    kernels = [k for k in OPS[op].kernels if k.implementation != "cuda"]
    return ["reference", *(k.implementation for k in kernels if device in k.devices and callable(OPS[op].kernel(k)))]


@contextmanager
def forced(implementation: str | None) -> Iterator[None]:
    """MTP_FORCE_IMPL for the time of the block."""
    with environment("MTP_FORCE_IMPL", implementation):
        yield


@contextmanager
def debug() -> Iterator[None]:
    """MTP_DEBUG=1 for the time of the block."""
    with environment("MTP_DEBUG", "1"):
        yield


@contextmanager
def environment(name: str, value: str | None) -> Iterator[None]:
    before = os.environ.get(name)
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before


def served_by(op: str, *args: Any, **kwargs: Any) -> str:
    return choose(OPS[op], args, kwargs)[0]


def call(op: str, *args: Any, **kwargs: Any) -> Any:
    return getattr(torch.ops.mtp, op)(*args, **kwargs)


def results(value: Any) -> tuple[Tensor, ...]:
    return (value,) if isinstance(value, Tensor) else tuple(value)


def opcheck(op: str, *args: Any, **kwargs: Any) -> None:
    """torch.library.opcheck of the op and of its `.out` overload on these arguments."""
    overloads = getattr(torch.ops.mtp, op)
    utils = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if any(isinstance(v, Tensor) and v.is_floating_point() and v.itemsize == 1 for v in (*args, *kwargs.values())):
        utils.remove("test_schema")  # compares inputs by arithmetic that fp8 lacks; check_mutates_nothing compares bits
    torch.library.opcheck(overloads.default, args, kwargs, test_utils=utils)
    outs = {n: poisoned(r) for n, r in zip(OPS[op].out_names, results(call(op, *args, **kwargs)))}
    torch.library.opcheck(overloads.out, args, {**kwargs, **outs}, test_utils=utils)


def poisoned(like: Tensor) -> Tensor:
    """A tensor like `like`, holding what no result would: NaN, -77 or True."""
    value: Any = torch.nan if like.is_floating_point() else (True if like.dtype == torch.bool else -77)
    return torch.full_like(like, value)


def check_out_overload(op: str, *args: Any, **kwargs: Any) -> None:
    """`.out` into strided slices of poisoned buffers: same bits as the op, nothing written beside the slices."""
    expected = results(call(op, *args, **kwargs))
    outs: dict[str, Tensor] = {}
    buffers: list[tuple[Tensor, Tensor]] = []
    for name, value in zip(OPS[op].out_names, expected):
        shape = [n + 2 for n in value.shape]
        buffer = poisoned(value.new_empty(shape))
        outs[name] = buffer[tuple(slice(1, n - 1) for n in shape)]
        buffers.append((buffer, outs[name]))
    assert getattr(torch.ops.mtp, op).out(*args, **kwargs, **outs) is None
    for (buffer, view), value in zip(buffers, expected):
        assert_same_bits(view, value)
        view.copy_(poisoned(view))
        assert_same_bits(buffer, poisoned(buffer))


def check_out_errors(op: str, *args: Any, **kwargs: Any) -> None:
    """`.out` refuses an output of the wrong shape, the wrong dtype, and one that lies over an input."""
    names = OPS[op].out_names
    good = {n: poisoned(r) for n, r in zip(names, results(call(op, *args, **kwargs)))}
    out = getattr(torch.ops.mtp, op).out
    first = good[names[0]]
    with pytest.raises(ArgumentError, match=f"^{op}: {names[0]}: expected "):
        out(*args, **kwargs, **{**good, names[0]: first.new_empty((*first.shape, 2))})
    wrong = torch.int32 if first.dtype != torch.int32 else torch.int64
    with pytest.raises(ArgumentError, match=f"^{op}: {names[0]}: expected "):
        out(*args, **kwargs, **{**good, names[0]: first.to(wrong)})
    for value in (*args, *kwargs.values()):
        if not isinstance(value, Tensor) or value.numel() == 0 or first.numel() == 0:
            continue
        storage = value.untyped_storage()
        if storage.nbytes() < first.numel() * first.element_size() or value.dtype != first.dtype:
            continue
        alias = value.as_strided(first.shape, torch.empty(first.shape, device="meta").stride(), 0)
        with pytest.raises(ArgumentError, match=f"^{op}: {names[0]}: expected storage of its own"):
            out(*args, **kwargs, **{**good, names[0]: alias})


def check_mutates_nothing(op: str, *args: Any, **kwargs: Any) -> None:
    """Inputs keep their bits, results share no memory with them or each other, and a second call gives the same."""
    tensors = [v for v in (*args, *kwargs.values()) if isinstance(v, Tensor)]
    before = [t.clone() for t in tensors]
    first = results(call(op, *args, **kwargs))
    for tensor, copy in zip(tensors, before):
        assert_same_bits(tensor, copy)
    owners = [t.untyped_storage().data_ptr() for t in (*tensors, *first) if t.numel()]
    fresh = [t.untyped_storage().data_ptr() for t in first if t.numel()]
    assert all(owners.count(p) == 1 for p in fresh), f"{op} returns storage that is not fresh"
    for one, two in zip(first, results(call(op, *args, **kwargs))):
        assert_same_bits(one, two)


def strided(tensor: Tensor) -> Tensor:
    """The same values inside a larger poisoned buffer: every stride but the last is unusual."""
    if tensor.dim() < 2:
        buffer = poisoned(tensor.new_empty(tensor.numel() + 6))
        view = buffer[3 : 3 + tensor.numel()].view(tensor.shape)
    else:
        buffer = poisoned(tensor.new_empty([n + 2 for n in tensor.shape]))
        view = buffer[tuple(slice(1, n + 1) for n in tensor.shape)]
    view.copy_(tensor)
    return view


def restrided(tensor: Tensor, priority: Sequence[int], gap: int) -> Tensor:
    """The same values with the leading dimensions in memory in the order of `priority`, `gap` poison entries between.

    The last dimension stays contiguous; `priority` may be longer than there are dimensions.
    """
    leading = tensor.dim() - 1
    order = [*sorted(range(leading), key=lambda i: priority[i]), leading]
    buffer = poisoned(tensor.new_empty([tensor.size(i) + gap for i in order]))
    view = buffer[tuple(slice(gap, None) for _ in order)].permute([order.index(i) for i in range(leading + 1)])
    return view.copy_(tensor)


def check_strides(op: str, *args: Any, **kwargs: Any) -> None:
    """Non-contiguous inputs (last dimension contiguous) give the same bits as contiguous ones.

    From the reference: almost the same, since PyTorch's own products depend on the alignment of what they read.
    """
    expected = results(call(op, *args, **kwargs))
    reference = served_by(op, *args, **kwargs) == "reference"
    got = call(
        op,
        *(strided(a) if isinstance(a, Tensor) else a for a in args),
        **{k: strided(v) if isinstance(v, Tensor) else v for k, v in kwargs.items()},
    )
    for one, two in zip(results(got), expected):
        if reference:
            torch.testing.assert_close(one, two, equal_nan=True)
        else:
            assert_same_bits(one, two)


def check_fake(op: str, *args: Any, **kwargs: Any) -> None:
    """The fake kernel gives the shapes, dtypes and device type of the real one."""
    real = results(call(op, *args, **kwargs))
    meta = results(call(op, *map(_meta, args), **{k: _meta(v) for k, v in kwargs.items()}))
    for one, two in zip(meta, real):
        assert (one.shape, one.dtype, one.stride()) == (two.shape, two.dtype, two.stride())


def _meta(value: Any) -> Any:
    """A tensor on the meta device with the same strides, gaps included."""
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def check_error(op: str, message: str, *args: Any, **kwargs: Any) -> None:
    """The call raises ArgumentError with exactly this message, for real tensors and for fakes."""
    with pytest.raises(ArgumentError) as real:
        call(op, *args, **kwargs)
    assert str(real.value) == message
    with pytest.raises(ArgumentError) as fake:
        call(op, *map(_meta, args), **{k: _meta(v) for k, v in kwargs.items()})
    assert str(fake.value).replace("meta", "cpu") == message


def check_debug_error(op: str, message: str, *args: Any, **kwargs: Any) -> None:
    """With MTP_DEBUG=1 the call raises exactly this message; without, it does not raise."""
    call(op, *args, **kwargs)
    with debug(), pytest.raises(ArgumentError) as error:
        call(op, *args, **kwargs)
    assert str(error.value) == message


def check_everything(op: str, *args: Any, **kwargs: Any) -> None:
    """The checks that hold for any op on any good arguments."""
    check_mutates_nothing(op, *args, **kwargs)
    check_strides(op, *args, **kwargs)
    check_out_overload(op, *args, **kwargs)
    check_out_errors(op, *args, **kwargs)
    check_fake(op, *args, **kwargs)
    opcheck(op, *args, **kwargs)
    with debug():
        call(op, *args, **kwargs)


def check_compiled(op: str, *args: Any, **kwargs: Any) -> None:
    """torch.compile(fullgraph=True) of the op gives the bits of the eager call, with fixed and with free sizes."""
    overload = getattr(torch.ops.mtp, op).default
    expected = results(overload(*args, **kwargs))
    for dynamic in (False, True):
        torch._dynamo.reset()
        # This backend needs no C++ compiler; tracing and the fakes are what an op can get wrong.
        compiler = torch.compile(fullgraph=True, backend="aot_eager", dynamic=dynamic)
        function = compiler(lambda *a, **k: overload(*a, **k))
        for one, two in zip(results(function(*args, **kwargs)), expected):
            assert_same_bits(one, two)


def check_device_errors(op: str, *args: Any, **kwargs: Any) -> None:
    """Every tensor argument but the first, moved away from the device of the first, is refused by name."""
    names = [a.name for a in getattr(torch.ops.mtp, op).default._schema.arguments]
    given = {**dict(zip(names, args)), **kwargs}
    first, *others = (name for name, value in given.items() if isinstance(value, Tensor))
    device = given[first].device
    for name in others:
        with pytest.raises(ArgumentError) as error:
            call(op, **{**given, name: given[name].to("meta")})
        assert str(error.value) == f"{op}: {name}: expected {device}, got meta ({first} is on {device})"


def check_numerics(got: Tensor, naive: Tensor, exact: Tensor, atol: float) -> None:
    """err(got, fp64) <= 2 * err(same-dtype PyTorch, fp64) + atol, where err is the largest absolute difference.

    `naive` is the formula in plain PyTorch in the dtype of `got`; `exact` the same in fp64. `atol` is for results up to
    1 and grows with the largest one: two orders of fp32 sums differ by a few units in its last place, and among few
    elements the naive error may be smaller than one by luck.
    """
    assert got.shape == exact.shape and exact.dtype == torch.float64
    assert torch.isfinite(exact).all() and torch.isfinite(got).all()
    if got.numel() == 0:
        return
    error = (got.double() - exact).abs().max().item()
    largest = max(1.0, exact.abs().max().item())
    allowed = 2 * (naive.double() - exact).abs().max().item() + atol * largest
    assert error <= allowed, f"error {error:.3e} against {allowed:.3e}"


def assert_same_bits(a: Tensor, b: Tensor) -> None:
    """Equal in shape, dtype and every bit (NaN equals NaN)."""
    assert (a.shape, a.dtype) == (b.shape, b.dtype)
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def to64(value: Any) -> Any:
    """Floating tensors in fp64, everything else as it is: arguments for a reference used as the oracle."""
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def random_tensor(*shape: int, seed: int, dtype: torch.dtype = torch.float32, device: str = "cpu", scale: float = 1.0
                  ) -> Tensor:
    """Normal random values; the same for a seed on every device."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).to(dtype=dtype, device=device)
