# SPDX-License-Identifier: Apache-2.0
"""Gluon for the Hopper kernels, and the types that these kernels share.

Gluon is Triton's language for code that controls layouts, shared memory and asynchronous copies itself. Its names
differ between releases; this module bridges Triton 3.6 to 3.9. Importing it raises ImportError or AttributeError if a
release lacks a name that the kernels need.
"""

from functools import lru_cache
from typing import Any, TypeVar, dataclass_transform

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
from triton.language import core

from vllm_sparse_kernels.rows import TILE_FIELDS

barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
bulk_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
gather_load = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
reinterpret = getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret
bulk_descriptor = tma.tensor_descriptor
NEEDED_TOO = (gl.tuple, gl.NVMMADistributedLayout, gluon.constexpr_function)
"""Names that modules of kernels read as they are imported."""

T = TypeVar("T")


@dataclass_transform()
def aggregate(cls: type[T]) -> type[T]:
    """Turn a class with annotated fields into a type of jitted code, like ``gluon.aggregate`` of Triton 3.8 and later.

    Triton 3.6 and 3.7 have the decorator under a private name only, and do not write the constructor that takes the
    fields in order; this function adds both.
    """
    if hasattr(gluon, "aggregate"):
        public: type[T] = gluon.aggregate(cls)
        return public
    if "__init__" not in vars(cls):
        cls.__init__ = _constructor(tuple(cls.__annotations__))  # type: ignore[method-assign]
    private: type[T] = core._aggregate(cls)
    return private


def _constructor(fields: tuple[str, ...]) -> Any:
    """Return ``__init__`` of an aggregate: it assigns the fields and wraps Python values as constants."""

    def init(self: Any, *values: Any) -> None:
        for name, value in zip(fields, values, strict=True):
            setattr(self, name, value if isinstance(value, core.base_value) else gl.constexpr(value))

    init.__triton_builtin__ = True  # type: ignore[attr-defined]  # else Triton refuses to hash it
    return init


@aggregate
class TilePointer:
    """A tile of ``Rows.tiles``, whose fields are loaded when they are read."""

    fields: gl.tensor  # [TILE_FIELDS] int32 by pointer

    @gluon.jit
    def row(self):
        """Load the number of the row."""
        return gl.load(self.fields)

    @gluon.jit
    def token(self):
        """Load the index of the first query in q."""
        return gl.load(self.fields + 1)

    @gluon.jit
    def length(self):
        """Load the number of queries."""
        return gl.load(self.fields + 2)

    @gluon.jit
    def position(self):
        """Load the position of the first query in its sequence."""
        return gl.load(self.fields + 3)


@gluon.jit
def tile_of(tiles, i_tile):
    """Return a tile of ``Rows.tiles``."""
    return TilePointer(tiles + i_tile * TILE_FIELDS)


@aggregate
class Counter:
    """Counts the uses of a ring of NUM slots. Producer and consumers each count for themselves."""

    count: gl.tensor  # int32
    NUM: gl.constexpr

    @gluon.jit
    def slot(self):
        """Return the index of the current slot."""
        return self.count % self.NUM

    @gluon.jit
    def parity(self):
        """Return the phase of a barrier that completes once per round: 0 in the first, then 1, 0, 1, and so on."""
        return self.count // self.NUM & 1

    @gluon.jit
    def plus(self, num):
        """Return the counter after ``num`` more uses."""
        return Counter(self.count + num, self.NUM)


@gluon.jit
def new_counter(NUM: gl.constexpr):
    """Return a counter of zero uses."""
    return Counter(gl.to_tensor(0), NUM)


@aggregate
class Channel:
    """A ring of buffers in shared memory that a producer fills and consumers empty.

    ``full`` and ``empty`` hold a barrier for each slot. ``full`` completes when a slot's data has arrived; ``empty``
    completes when all consumers have released the slot. Producers wait for the previous round, so their parity differs.
    """

    buffers: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.jit
    def buffer(self, counter):
        """Return the slot's memory."""
        return self.buffers.index(counter.slot())

    @gluon.jit
    def full_barrier(self, counter):
        """Return the barrier that the slot's producer completes."""
        return self.full.index(counter.slot())

    @gluon.jit
    def acquire_empty(self, counter):
        """Wait, as the producer, until the slot may be written."""
        mbarrier.wait(self.empty.index(counter.slot()), counter.parity() ^ 1)

    @gluon.jit
    def acquire_full(self, counter, pred=True):
        """Wait, as a consumer, until the slot's data has arrived."""
        mbarrier.wait(self.full.index(counter.slot()), counter.parity(), pred=pred)

    @gluon.jit
    def mark_full(self, counter):
        """As the producer, signal data that no asynchronous copy signals by itself."""
        mbarrier.arrive(self.full.index(counter.slot()), count=1)

    @gluon.jit
    def release(self, counter):
        """Hand the slot back, as a consumer.

        One thread arrives for all warps of the group, which must have synchronised since they read the slot. Triton
        does so between a wait for a product and this arrival; tests check this in the machine code.
        """
        mbarrier.arrive(self.empty.index(counter.slot()), count=1)


def bulk_steps(vectors: torch.Tensor) -> TensorDescriptor:
    """Describe vectors for bulk copies of 128 at a time."""
    rows = vectors.flatten(0, 1)
    return TensorDescriptor.from_tensor(rows, [128, rows.shape[1]], _layout_of_steps(rows.shape[1]))


@lru_cache(maxsize=16)
def _layout_of_steps(num_channels: int) -> Any:
    return gl.NVMMASharedLayout.get_default_for([128, num_channels], gl.float8e4nv)


@gluon.jit
def larger_pairs(b_a, b_b):
    """Compute the elementwise maximum in half precision, two elements per instruction."""
    return gl.inline_asm_elementwise("max.f16x2 $0, $1, $2;", "=r,r,r", [b_a, b_b], gl.float16, is_pure=True, pack=2)


@gluon.jit
def new_barriers(NUM: gl.constexpr, COUNT: gl.constexpr):
    """Allocate barriers in shared memory."""
    bars = gl.allocate_shared_memory(gl.int64, [NUM, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUM):
        mbarrier.init(bars.index(i), count=COUNT)
    return bars


__all__ = [
    "Channel", "Counter", "TensorDescriptor", "TilePointer", "aggregate", "async_copy", "barrier", "bulk_descriptor",
    "bulk_load", "bulk_steps", "fence_async_shared", "gather_load", "gl", "gluon", "larger_pairs", "mbarrier",
    "new_barriers", "new_counter", "reinterpret", "tile_of", "warpgroup_mma", "warpgroup_mma_wait",
]  # fmt: skip
