# SPDX-License-Identifier: Apache-2.0
"""Arrays of vectors that lie one after the other, in Triton kernels.

Functions differ in what they add first, offsets or pointers, because either takes fewer registers somewhere.
"""

import triton
import triton.language as tl


@triton.jit
def load_vector(array, i, WIDTH: tl.constexpr):
    """Load vector ``i`` of an array [.., WIDTH]."""
    return tl.load(array + i * WIDTH + tl.arange(0, WIDTH))


@triton.jit
def store_vector(array, i, b_x):
    """Store a vector at place ``i`` of an array of vectors of its size."""
    tl.store(array + i * b_x.shape[0] + tl.arange(0, b_x.shape[0]), b_x)


@triton.jit
def vector_pointers(array, o_x, WIDTH: tl.constexpr):
    """Return pointers [len(o_x), WIDTH] to the elements of vectors ``o_x`` of an array [.., WIDTH]."""
    return array + o_x[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]


@triton.jit
def load_vectors(array, o_x, mask, WIDTH: tl.constexpr):
    """Load vectors ``o_x`` of an array [.., WIDTH], zeros where ``mask`` is false: [len(o_x), WIDTH]."""
    # Offsets first: SharePrefill's lists take 80 registers, and 88 with ``vector_pointers``.
    offsets = o_x[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    return tl.load(array + offsets, mask=mask[:, None], other=0.0)


@triton.jit
def load_padded(array, o_x, mask, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load vectors ``o_x`` of an array [.., HEAD_DIM], with zeros up to BLOCK_D, and zeros where ``mask`` is false."""
    o_d = tl.arange(0, BLOCK_D)
    pointers = array + o_x[:, None] * HEAD_DIM + o_d[None, :]
    return tl.load(pointers, mask=padded_mask(mask, HEAD_DIM, BLOCK_D), other=0.0)


@triton.jit
def store_padded(array, i, b_x, HEAD_DIM: tl.constexpr):
    """Store the first HEAD_DIM elements of a vector at place ``i`` of an array [.., HEAD_DIM]."""
    o_d = tl.arange(0, b_x.shape[0])
    tl.store(array + i * HEAD_DIM + o_d, b_x, mask=o_d < HEAD_DIM)


@triton.jit
def padded_mask(mask, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return the mask [len(mask), BLOCK_D] of the elements of vectors of HEAD_DIM that are padded to BLOCK_D."""
    return mask[:, None] & (tl.arange(0, BLOCK_D) < HEAD_DIM)[None, :]
