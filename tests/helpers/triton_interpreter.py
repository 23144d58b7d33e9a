# SPDX-License-Identifier: Apache-2.0
"""Triton's interpreter without work whose results it discards, or already has: most of the time of our kernel tests.

* To interpret a kernel, Triton replaces the functions of ``triton.language`` while the kernel runs. It does so at the
  launch and again, with nothing left to replace, at each call of a function within it.
* It also computes every sum, difference and product of integers in 64 bits, to assert that they are equal. But it
  asserts nothing unless ``options.debug`` is set, and the interpreter has no way to set it.
* For each value that a kernel computes, it creates a type with name and sizes, and tests how to convert and broadcast
  the operands, although kernels have few types.

Kernels' results, and all checks that Triton makes, are unchanged. ``sum_float32_products_in_float64`` changes results:
numpy sums the products of a matrix in an order that depends on its library and number of threads.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


@cache
def _language_in(function: Callable[..., Any]) -> tuple[int, ...]:
    """Return the modules of the language that the function's globals name; these are prepared for it."""
    return tuple({id(value) for value in function.__globals__.values() if value is tl or value is tl.core})


class _Prepared:
    """Replaces the interpreter's ``_patch_lang``: modules that a launch has prepared are not prepared again until it
    ends."""

    def __init__(self, prepare: Callable[[Callable[..., Any]], Any]) -> None:
        self.prepare = prepare
        self.scopes: dict[tuple[int, ...], Any] = {}

    def __call__(self, function: Callable[..., Any]) -> "_Prepared":
        language = _language_in(function)
        if language not in self.scopes:
            self.scopes[language] = self.prepare(function)
        return self

    def restore(self) -> None:
        """Restore the modules; the interpreter calls this at a launch's end."""
        while self.scopes:
            self.scopes.popitem()[1].restore()


def _share_parts_of_types() -> None:
    """Let block types of equal names share their parts, and tensors of equal sizes share ``shape`` and ``numel``.

    Nothing changes these parts after their creation. Other block types, such as Gluon's with a layout, share nothing.
    """
    make_type, make_tensor = tl.block_type.__init__, tl.tensor.__init__
    parts_of_types: dict[tuple[Any, ...], dict[str, Any]] = {}
    parts_of_tensors: dict[tuple[int, ...], dict[str, Any]] = {}

    def init_type(self: Any, element_ty: Any, shape: Any) -> None:
        if type(self) is not tl.block_type or type(element_ty) not in (tl.dtype, tl.pointer_type):
            make_type(self, element_ty, shape)
            return
        sizes = tuple([size.value if isinstance(size, tl.constexpr) else size for size in shape])
        address_space = getattr(element_ty, "address_space", None)
        # Triton refuses sizes that are not of type int, although they may equal an int, and some kinds of sequences.
        key = (element_ty.name, address_space, type(shape), *sizes, *map(type, sizes))
        parts = parts_of_types.get(key)
        if parts is None:
            make_type(self, element_ty, shape)
            self.sizes = sizes
            parts_of_types[key] = dict(vars(self))
        else:
            vars(self).update(parts)

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        sizes = getattr(type, "sizes", None) if type.is_block() else ()
        parts = parts_of_tensors.get(sizes)
        if parts is None:
            make_tensor(self, handle, type)
            if sizes is not None:
                shared = vars(self).keys() - {"handle", "type", "dtype"}
                parts_of_tensors[sizes] = {name: vars(self)[name] for name in shared}
        else:
            vars(self).update(parts)
            self.handle, self.type, self.dtype = handle, type, type.scalar

    tl.block_type.__init__, tl.tensor.__init__ = init_type, init_tensor


def _derive_types_once() -> None:
    """Broadcast only operands of different shapes, and derive the type of a result once for each pair of types."""
    semantic = interpreter.interpreter_semantic
    broadcast, np_dtype_of = semantic.broadcast_impl_value, interpreter._get_np_dtype
    np_dtype_of_scalar = cache(np_dtype_of)

    def broadcast_impl_value(lhs: Any, rhs: Any) -> tuple[Any, Any]:
        # Tensors of equal sizes share their shape.
        return (lhs, rhs) if lhs.shape is rhs.shape else broadcast(lhs, rhs)

    def get_np_dtype(tt_dtype: Any) -> Any:
        scalar = tt_dtype.scalar
        return np_dtype_of_scalar(scalar) if type(scalar) is tl.dtype else np_dtype_of(tt_dtype)

    semantic.broadcast_impl_value = broadcast_impl_value
    semantic.computation_type_impl = cache(semantic.computation_type_impl)
    interpreter._get_np_dtype = get_np_dtype


def sum_float32_products_in_float64() -> None:
    """Let the interpreter sum products of float32 matrices in float64, and round once, whatever library numpy has."""
    create_dot = interpreter.InterpreterBuilder.create_dot

    def dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        if a.data.dtype != np.float32 or d.data.dtype != np.float32:
            return create_dot(self, a, b, d, *options)
        sums = np.matmul(a.data, b.data, dtype=np.float64) + d.data
        return interpreter.TensorHandle(sums.astype(np.float32), d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = dot


def save_what_is_thrown_away() -> None:
    _share_parts_of_types()
    _derive_types_once()
    builder = interpreter.interpreter_builder
    interpreter._patch_lang = _Prepared(interpreter._patch_lang)
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)
