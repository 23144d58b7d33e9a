# SPDX-License-Identifier: Apache-2.0
"""Gluon, Triton's language for what Triton itself leaves to its compiler, as kernels for Hopper here import it.

It is young: names differ between releases. Those that do are told apart here, for Triton 3.6 to 3.9; importing this
module raises ImportError or AttributeError where a release lacks what is needed.
"""

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

__all__ = [
    "TensorDescriptor",
    "async_copy",
    "barrier",
    "bulk_load",
    "fence_async_shared",
    "gather_load",
    "gl",
    "gluon",
    "mbarrier",
    "reinterpret",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]
