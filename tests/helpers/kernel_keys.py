# SPDX-License-Identifier: Apache-2.0
"""Which kernels Triton would compile for what is launched, without a GPU and without running any of them.

Triton compiles a kernel anew for each key that its binder makes of the arguments: types, divisibility by 16 of numbers
and addresses, the value 1, compile-time values and options. The binder of a CUDA target works on a CPU.
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
    """What ``triton.jit`` makes of a kernel where it is not interpreted."""
    return JITFunction(kernel.fn, **kernel.kwargs)


def key_of(kernel: InterpretedFunction, args: Any, kwargs: dict[str, Any]) -> Key:
    """The kernel's name, and its arguments as Triton tells them apart."""
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
    """Kernels that are launched within are not run: their keys are collected."""
    keys: set[Key] = set()

    def run(self: InterpretedFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        keys.add(key_of(self, args, kwargs))

    with monkeypatch.context() as patch:
        patch.setattr(InterpretedFunction, "run", run)
        yield keys
