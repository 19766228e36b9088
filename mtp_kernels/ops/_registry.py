"""How an op comes to be: schema, checks, fake, `.out` overload, reference, and the chooser between kernels.

An op's file calls `register` once with its schema and four plain functions of the same arguments:

- `check` raises ArgumentError on a wrong argument (sizes, dtypes, devices: host work only),
- `outputs` gives the (shape, dtype) of every result; the fake kernel and the `.out` overload follow from it,
- `reference` computes the results in plain PyTorch,
- `contents` (with MTP_DEBUG=1) checks what the tensors hold.

The reference sits under CompositeExplicitAutograd, so it serves every device; CPU and CUDA get the chooser, which picks
the first kernel of the op's table that serves the arguments.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .. import _native, _triton
from ._checks import ImplementationError, check_device, check_dtype, check_shape, fail, show_shape
from ._contents import debug_enabled
from ._overlap import overlaps

LIB = torch.library.Library("mtp", "FRAGMENT")
MOST_SEEN = 4096  # kinds of calls remembered an op
IMPLEMENTATIONS = ("reference", "cpu", "triton", "cuda")

Spec = tuple[Sequence[int], torch.dtype]


@dataclass(frozen=True)
class Kernel:
    """One way to serve an op faster than its reference.

    `load` returns the callable (it may import a kernel package; it is called once, at the first use) or raises
    ImportError saying why it cannot be had here. `serves` takes the op's arguments and says why it does not serve
    them, or "" when it does: a pure function of device, shape and dtype.
    """

    implementation: str
    devices: tuple[str, ...]
    load: Callable[[], Callable[..., Any]]
    serves: Callable[..., str] = lambda *args, **kwargs: ""


@dataclass
class Op:
    """A registered op and everything known about it."""

    name: str
    schema: str
    check: Callable[..., None]
    outputs: Callable[..., Spec | tuple[Spec, ...]]
    reference: Callable[..., Any]
    contents: Callable[..., None] | None
    supports: Callable[..., str] | None
    kernels: tuple[Kernel, ...]
    out_names: tuple[str, ...]
    loaded: dict[Kernel, Callable[..., Any] | str] = field(default_factory=dict)
    seen: dict[Any, Callable[..., Any]] = field(default_factory=dict)  # what serves arguments that passed the checks
    seen_of: tuple[Kernel, ...] | None = None  # the table that `seen` was found with

    def kernel(self, kernel: Kernel) -> Callable[..., Any] | str:
        """The kernel's callable, or the reason why it cannot be had here (found out once)."""
        if kernel not in self.loaded:
            try:
                self.loaded[kernel] = kernel.load()
            except ImportError as error:
                self.loaded[kernel] = str(error)
        return self.loaded[kernel]


OPS: dict[str, Op] = {}


def register(
    schema: str,
    *,
    check: Callable[..., None],
    outputs: Callable[..., Spec | tuple[Spec, ...]],
    reference: Callable[..., Any],
    contents: Callable[..., None] | None = None,
    supports: Callable[..., str] | None = None,
    kernels: tuple[Kernel, ...] = (),
) -> Op:
    """Define `torch.ops.mtp.<name>` and its `.out` overload from one schema string."""
    name = schema[: schema.index("(")].strip()
    out_names = _out_names(schema)
    op = Op(name, schema, check, outputs, reference, contents, supports, kernels, out_names)

    LIB.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    LIB.impl(name, lambda *args, **kwargs: _run_reference(op, args, kwargs), "CompositeExplicitAutograd")
    for key in ("CPU", "CUDA"):
        LIB.impl(name, lambda *args, **kwargs: _choose_and_run(op, args, kwargs), key)
    torch.library.register_fake(f"mtp::{name}", lambda *args, **kwargs: _fake(op, args, kwargs), lib=LIB)

    LIB.define(_out_schema(schema, out_names), tags=(torch.Tag.pt2_compliant_tag,))
    LIB.impl(f"{name}.out", lambda *args, **kwargs: _run_out(op, args, kwargs), "CompositeExplicitAutograd")
    torch.library.register_fake(f"mtp::{name}.out", lambda *args, **kwargs: _fake_out(op, args, kwargs), lib=LIB)

    OPS[name] = op
    return op


def cpp_kernel(name: str, serves: Callable[..., str] | None = None) -> Kernel:
    """The C++ kernel `mtp_cpu::<name>` of the CPU library; its schema is the public op's."""
    return Kernel("cpu", ("cpu",), lambda: _native.cpu_op(name), serves or (lambda *args, **kwargs: ""))


def cuda_kernel(name: str, module: str) -> Kernel:
    """The CUDA library's kernel of an op, launched by mtp_kernels/<module>.py, where `refuses` says what it serves."""

    def load() -> Callable[..., Any]:
        if why := _native.cuda_library():
            raise ImportError(why)
        _triton.triton_op(name)  # launches of its own follow
        return getattr(importlib.import_module(f"..{module}", __package__), name)

    def refuses(*args: Any, **kwargs: Any) -> str:
        return importlib.import_module(f"..{module}", __package__).refuses(*args, **kwargs)

    return Kernel("cuda", ("cuda",), load, refuses)


def triton_kernel(name: str, serves: Callable[..., str] | None = None) -> Kernel:
    """The Triton kernel of an op, in triton_ops/<name>.py, with the public op's arguments.

    It runs on CUDA; in Triton's interpreter on the CPU instead, bf16 excepted, which that computes wrongly.
    """

    def decide(*args: Any, **kwargs: Any) -> str:
        tensors = [v for v in (*args, *kwargs.values()) if isinstance(v, Tensor)]
        if _triton.interpreting() and any(t.dtype == torch.bfloat16 for t in tensors):
            return "Triton's interpreter computes bf16 wrongly"
        return serves(*args, **kwargs) if serves else ""

    devices = ("cuda", "cpu") if _triton.interpreting() else ("cuda",)
    return Kernel("triton", devices, lambda: _triton.triton_op(name), decide)


def choose(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, Callable[..., Any]]:
    """The implementation that serves these arguments, by name and callable.

    MTP_FORCE_IMPL names one that must serve them: where it cannot, ImplementationError says why.
    """
    forced = os.environ.get("MTP_FORCE_IMPL")
    if forced == "reference":
        return "reference", op.reference
    if forced and forced not in IMPLEMENTATIONS:
        raise ImplementationError(f"{op.name}: MTP_FORCE_IMPL={forced}: expected one of {', '.join(IMPLEMENTATIONS)}")
    device = _device(args, kwargs).type
    why = f"this op has no {forced} kernel"
    for kernel in op.kernels:
        if forced and kernel.implementation != forced:
            continue
        if device not in kernel.devices:
            why = f"the {kernel.implementation} kernel does not run on {device}"
            continue
        function = op.kernel(kernel)
        why = function if isinstance(function, str) else kernel.serves(*args, **kwargs)
        if not why:
            return kernel.implementation, function  # type: ignore[return-value]
    if forced:
        raise ImplementationError(f"{op.name}: MTP_FORCE_IMPL={forced}: {why}")
    return "reference", op.reference


def _choose_and_run(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Checks and choice look at sizes, strides, dtypes, devices and scalars alone: once for each of these is enough."""
    if op.seen_of is not op.kernels or len(op.seen) >= MOST_SEEN:
        op.seen, op.seen_of = {}, op.kernels
    key = (os.environ.get("MTP_FORCE_IMPL"), *map(_outside, args), *kwargs, *map(_outside, kwargs.values()))
    function = op.seen.get(key)
    if function is None:
        op.check(*args, **kwargs)
        function = choose(op, args, kwargs)[1]
        op.seen[key] = function
    if op.contents is not None and debug_enabled(_first_tensor(args, kwargs)):
        op.contents(*args, **kwargs)
    return _run(function, args, kwargs)


def _outside(value: Any) -> Any:
    """What checks and choosers may look at."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    return value


def _run_reference(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    op.check(*args, **kwargs)
    return _run(op.reference, args, kwargs)


def _run(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call an implementation with autocast off: it would lower the products inside, and the dtypes that come out."""
    with torch._C._DisableAutocast():
        return _contiguous(function(*args, **kwargs))


def _contiguous(results: Any) -> Any:
    """The strides that the fake promises: PyTorch's elementwise functions pass on those of a permuted input."""
    return results.contiguous() if isinstance(results, Tensor) else tuple(r.contiguous() for r in results)


def _fake(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    op.check(*args, **kwargs)
    device = _device(args, kwargs)
    made = tuple(torch.empty(tuple(s), dtype=d, device=device) for s, d in _specs(op, args, kwargs))
    return made[0] if len(made) == 1 else made


def _run_out(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    outs, inputs = _check_out(op, args, kwargs)
    taken = _named_tensors(op, args, inputs)
    for name, out in outs.items():
        for other, tensor in taken:
            if overlaps(out, tensor):
                fail(op.name, name, "storage of its own", f"memory of {other}")
        taken.append((name, out))
    results = getattr(torch.ops.mtp, op.name).default(*args, **inputs)
    for out, result in zip(outs.values(), (results,) if isinstance(results, Tensor) else results):
        out.copy_(result)


def _fake_out(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    _check_out(op, args, kwargs)


def _check_out(
    op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The outputs by name, once they have the shape, dtype and device of the results; and the other keywords."""
    outs = {name: kwargs[name] for name in op.out_names}
    inputs = {k: v for k, v in kwargs.items() if k not in outs}
    op.check(*args, **inputs)
    device = _device(args, inputs)
    for (name, out), (shape, dtype) in zip(outs.items(), _specs(op, args, inputs)):
        check_shape(op.name, name, out, tuple(shape))
        check_dtype(op.name, name, out, (dtype,))
        check_device(op.name, device, "the input", **{name: out})
        if any(n > 1 and stride == 0 for n, stride in zip(out.shape, out.stride())):
            fail(op.name, name, "an element of its own for each result", f"strides {show_shape(out.stride())}")
    return outs, inputs


def _specs(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Spec, ...]:
    specs = op.outputs(*args, **kwargs)
    return (specs,) if isinstance(specs[1], torch.dtype) else specs


def _first_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            return value
    raise AssertionError("every op takes a tensor")


def _device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    return _first_tensor(args, kwargs).device


def _named_tensors(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Tensor]]:
    """The input tensors with the names that the schema gives them."""
    names = [a.name for a in getattr(torch.ops.mtp, op.name).default._schema.arguments]
    bound = {**dict(zip(names, args)), **kwargs}
    return [(name, value) for name, value in bound.items() if isinstance(value, Tensor)]


def _out_names(schema: str) -> tuple[str, ...]:
    returns = schema[schema.rindex("->") + 2 :].strip()
    if not returns.startswith("("):
        return ("output",)
    return tuple(f"out_{name}" for name in re.findall(r"Tensor (\w+)", returns))


def _out_schema(schema: str, out_names: tuple[str, ...]) -> str:
    """`f(Tensor x) -> Tensor` becomes `f.out(Tensor x, *, Tensor(a!) output) -> ()`."""
    name, rest = schema.split("(", 1)
    arguments = rest[: rest.rindex("->")].rstrip()[:-1]
    star = "" if re.search(r"(^|,)\s*\*\s*,", arguments) else ", *"
    outs = ", ".join(f"Tensor({chr(97 + i)}!) {n}" for i, n in enumerate(out_names))
    return f"{name.strip()}.out({arguments}{star}, {outs}) -> ()"
