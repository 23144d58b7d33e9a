# SPDX-License-Identifier: Apache-2.0
"""Gluon, Triton's language for what Triton itself leaves to its compiler, as kernels for Hopper here import it.

It is young: names differ between releases. Those that do are told apart here, for Triton 3.6 to 3.9, beside pieces that
kernels of several methods share; importing this module raises ImportError or AttributeError where a release lacks what
is needed.
"""

from functools import lru_cache
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
bulk_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
gather_load = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
reinterpret = getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret


def bulk_steps(vectors: torch.Tensor) -> TensorDescriptor:
    """For bulk copies of steps of 128 vectors of e4m3 [heads, n, channels].

    Args:
        vectors: [heads, n, channels] e4m3.
    """
    rows = vectors.flatten(0, 1)
    return TensorDescriptor.from_tensor(rows, [128, rows.shape[1]], _layout_of_steps(rows.shape[1]))


@lru_cache(maxsize=16)
def _layout_of_steps(num_channels: int) -> Any:
    return gl.NVMMASharedLayout.get_default_for([128, num_channels], gl.float8e4nv)


@gluon.jit
def larger_pairs(b_a, b_b):
    """Maximum in half precision, two elements in one instruction."""
    return gl.inline_asm_elementwise("max.f16x2 $0, $1, $2;", "=r,r,r", [b_a, b_b], gl.float16, is_pure=True, pack=2)


@gluon.jit
def new_barriers(NUM: gl.constexpr, COUNT: gl.constexpr):
    """NUM barriers in shared memory, each of which COUNT arrivals complete."""
    bars = gl.allocate_shared_memory(gl.int64, [NUM, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUM):
        mbarrier.init(bars.index(i), count=COUNT)
    return bars


__all__ = [
    "TensorDescriptor", "async_copy", "barrier", "bulk_load", "bulk_steps", "fence_async_shared", "gather_load",
    "gl", "gluon", "larger_pairs", "mbarrier", "new_barriers", "reinterpret", "warpgroup_mma",
    "warpgroup_mma_wait",
]  # fmt: skip
