"""Triton's interpreter with less of what it repeats: the same results in about a third of the time.

Of Triton 3.6 alone, whose interpreter this knows; any other one runs as it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl
from triton.runtime import interpreter

KNOWN = "3.6."


def quicken() -> None:
    """Once a process, before a kernel runs."""
    if triton.__version__.startswith(KNOWN):
        _patch_once_a_grid()
        _keep_types()
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

    def patch_once(function: Callable[..., Any]) -> Any:
        names = function.__globals__.values()
        modules = tuple(any(value is module for value in names) for module in (tl, tl.core))
        if modules in patched:
            return interpreter._LangPatchScope()  # nothing to undo
        patched.add(modules)
        return patch(function)

    def run_grid(self: Any, *args: Any, **kwargs: Any) -> None:
        patched.clear()
        try:
            run(self, *args, **kwargs)
        finally:
            patched.clear()  # it has undone its patches

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
