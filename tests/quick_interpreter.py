"""Triton's interpreter with less of what it repeats: the same results in about a third of the time.

Of Triton 3.6 alone, whose interpreter this knows; any other one runs as it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

KNOWN = "3.6."


def quicken() -> None:
    """Once a process, before a kernel runs."""
    if triton.__version__.startswith(KNOWN):
        _patch_once_a_grid()
        _keep_types()
        _look_at_types_once()
        interpreter._patch_attr = _patch_attribute
        # The interpreter repeats every sum and product of integers in int64, for an assertion that it then leaves out.
        options = interpreter.interpreter_builder.options
        assert not options.debug
        interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)


def _patch_once_a_grid() -> None:
    """Each call of a device function puts the interpreted functions into triton.language again: only the first does.

    What it patches depends on which of the language's modules the device function sees, so it is the first for these.
    """
    patch, run = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched: set[tuple[bool, ...]] = set()  # in the grid that runs
    seen: set[int] = set()  # the globals of functions that were called in it

    def patch_once(function: Callable[..., Any]) -> Any:
        if id(function.__globals__) in seen:
            return interpreter._LangPatchScope()  # nothing to undo
        seen.add(id(function.__globals__))
        names = function.__globals__.values()
        modules = tuple(any(value is module for value in names) for module in (tl, tl.core))
        if modules in patched:
            return interpreter._LangPatchScope()
        patched.add(modules)
        return patch(function)

    def run_grid(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            run(self, *args, **kwargs)
        finally:
            patched.clear()  # it has undone its patches
            seen.clear()

    interpreter._patch_lang = patch_once
    interpreter.GridExecutor.__call__ = run_grid


def _keep_types() -> None:
    """Each value makes its type, its shape and their names again; here it has those of an equal one, which stay so."""
    make_block, make_tensor, numpy_type = tl.block_type.__init__, tl.tensor.__init__, interpreter._get_np_dtype
    blocks: dict[Any, dict[str, Any]] = {}
    numpy_types: dict[str, Any] = {}

    def block(self: Any, element_ty: Any, shape: Any) -> None:
        if type(element_ty) is not tl.dtype:
            return make_block(self, element_ty, shape)
        key = element_ty.name, *(n.value if isinstance(n, tl.constexpr) else n for n in shape)
        if key not in blocks:
            make_block(self, element_ty, shape)
            blocks[key] = self.__dict__
        self.__dict__ = blocks[key]

    def tensor(self: Any, handle: Any, type: Any) -> None:
        if "of_tensors" not in type.__dict__:
            make_tensor(self, handle, type)
            type.of_tensors = {name: value for name, value in self.__dict__.items() if name != "handle"}
        self.__dict__.update(type.of_tensors, handle=handle)

    def to_numpy(tt_dtype: Any) -> Any:
        element = tt_dtype.element_ty if isinstance(tt_dtype, tl.block_type) else tt_dtype
        if type(element) is not tl.dtype:
            return numpy_type(element)
        if element.name not in numpy_types:
            numpy_types[element.name] = numpy_type(element)
        return numpy_types[element.name]

    tl.block_type.__init__ = block
    tl.tensor.__init__ = tensor
    interpreter._get_np_dtype = to_numpy


def _look_at_types_once() -> None:
    """Two operands of one type, or of one shape, are what a binary operation needs; all others go the long way."""
    with_element, as_needed = tl.block_type.with_element_ty, TritonSemantic.binary_op_type_checking_impl
    broadcast, unwrap = TritonSemantic.broadcast_impl_value, tl.core._unwrap_if_constexpr
    numbers: dict[Any, Any] = {}

    def unwrap_if_constexpr(x: Any) -> Any:
        return x if type(x) is tl.tensor else x.value if type(x) is tl.constexpr else unwrap(x)

    def with_element_ty(self: Any, scalar_ty: Any) -> Any:
        if type(scalar_ty) is not tl.dtype:
            return with_element(self, scalar_ty)
        made = self.__dict__.setdefault("of_elements", {})
        if scalar_ty.name not in made:
            made[scalar_ty.name] = with_element(self, scalar_ty)
        return made[scalar_ty.name]

    def broadcast_impl_value(self: Any, lhs: Any, rhs: Any) -> Any:
        if not (lhs.type.is_block() and rhs.type.is_block()):
            return broadcast(self, lhs, rhs) if lhs.type.is_block() or rhs.type.is_block() else (lhs, rhs)
        left, right = lhs.type.shape.values, rhs.type.shape.values
        if left == right:
            return lhs, rhs
        if len(left) != len(right) or any(m != n and m != 1 and n != 1 for m, n in zip(left, right)):
            return broadcast(self, lhs, rhs)
        shape = [n if m == 1 else m for m, n in zip(left, right)]
        return stretched(self, lhs, left, shape), stretched(self, rhs, right, shape)

    def stretched(self: Any, value: Any, shape: list[int], to: list[int]) -> Any:
        if shape == to:
            return value
        return self.tensor(self.builder.create_broadcast(value.handle, to), tl.block_type(value.type.scalar, to))

    def binary_op_type_checking_impl(self: Any, lhs: Any, rhs: Any, *args: Any, **kwargs: Any) -> Any:
        if type(lhs) is not tl.tensor or type(rhs) is not tl.tensor:
            return with_number(self, lhs, rhs, *args, **kwargs)
        one, other = lhs.type.scalar, rhs.type.scalar
        if type(one) is type(other) is tl.dtype and one.name == other.name and one.name not in ("fp16", "bf16"):
            return self.broadcast_impl_value(lhs, rhs)
        if args and args[0] and one.is_ptr() and type(other) is tl.dtype and other.is_int():  # an address moved on
            return self.broadcast_impl_value(lhs, rhs)
        return as_needed(self, lhs, rhs, *args, **kwargs)

    def with_number(self: Any, lhs: Any, rhs: Any, *args: Any, **kwargs: Any) -> Any:
        """Of a tensor and a number that leaves its type as it is, the number as a tensor is that of an equal call."""
        tensor, number, first = (lhs, rhs, True) if type(lhs) is tl.tensor else (rhs, lhs, False)
        if type(tensor) is not tl.tensor or not (type(number) is int or (type(number) is float and number != 0.0)):
            return as_needed(self, lhs, rhs, *args, **kwargs)
        scalar, shape = tensor.type.scalar, tuple(tensor.type.shape.values) if tensor.type.is_block() else ()
        key = scalar.name, number, type(number), first, shape, args, *kwargs.items()
        if key in numbers:
            return (tensor, numbers[key]) if first else (numbers[key], tensor)
        pair = as_needed(self, lhs, rhs, *args, **kwargs)
        made = pair[first]
        if pair[not first] is tensor and made.handle.data.nbytes <= 4096 and len(numbers) < 10000:
            made.handle.data.setflags(write=False)
            numbers[key] = made
        return pair

    tl.core._unwrap_if_constexpr = unwrap_if_constexpr
    tl.block_type.with_element_ty = with_element_ty
    TritonSemantic.broadcast_impl_value = broadcast_impl_value
    TritonSemantic.binary_op_type_checking_impl = binary_op_type_checking_impl


def _patch_attribute(obj: Any, name: str, member: Callable[..., Any], builder: Any, scope: Any) -> None:
    """As the interpreter has it, without a copy of the arguments."""
    semantic = TritonSemantic(builder)

    def new_member(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = semantic
        return member(*args, **kwargs)

    scope.set_attr(obj, name, new_member)
