# SPDX-License-Identifier: Apache-2.0
"""The kernels that Triton would compile for a launch, without a GPU and without running them.

Triton compiles a kernel again for each key that its binder computes from the arguments: types, divisibility of numbers
and addresses by 16, the value 1, compile-time values and options. The binder of a CUDA target works on a CPU.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction, create_function_from_signature

HOPPER = GPUTarget("cuda", 90, 32)
Key = tuple[str, str]

_binders: dict[Any, Any] = {}


def compiled_form(kernel: InterpretedFunction) -> JITFunction:
    """Return the kernel as ``triton.jit`` makes it without the interpreter."""
    return JITFunction(kernel.fn, **kernel.kwargs)


def key_of(kernel: InterpretedFunction, args: Any, kwargs: dict[str, Any]) -> Key:
    """Return the kernel's name and the properties of its arguments that Triton distinguishes."""
    if kernel.fn not in _binders:
        compiled = compiled_form(kernel)
        _binders[kernel.fn] = (
            create_function_from_signature(compiled.signature, compiled.params, make_backend(HOPPER)),
            [p.name for p in compiled.params],
        )
    binder, names = _binders[kernel.fn]
    _, specialization, options = binder(*args, **kwargs)
    told_apart = {name: str(value) for name, value in zip(names, specialization, strict=True)}
    return kernel.fn.__name__, str(sorted(told_apart.items()) + sorted((k, str(v)) for k, v in options.items()))


@contextmanager
def recorded_keys(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[Key]]:
    """Collect the keys of kernels instead of launching them."""
    keys: set[Key] = set()

    def run(self: InterpretedFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        keys.add(key_of(self, args, kwargs))

    with monkeypatch.context() as patch:
        patch.setattr(InterpretedFunction, "run", run)
        yield keys
