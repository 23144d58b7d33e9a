# SPDX-License-Identifier: Apache-2.0
"""The queries of a tile that ``top_p`` scores: all of them, or the second of each two neighbours.

Scored query j of a tile with n queries is its query min(2 j + 1, n - 1), for j < ⌈n / 2⌉, or its query j if all are
scored. The last query of a tile is therefore always scored, and a tile of one query is scored by it.
"""

import triton
import triton.language as tl

from vllm_sparse_kernels.compile_time import Constant
from vllm_sparse_kernels.rows import TILE_TOKENS

TILE = Constant(TILE_TOKENS)

ALL_SCORED, HALF_SCORED = TILE_TOKENS, TILE_TOKENS // 2
"""Queries that are scored in a whole tile. Kernels get one of these numbers as SCORED."""

TILES_OF_GROUP = {ALL_SCORED: 1, HALF_SCORED: 2}
"""Tiles whose scored queries make up 128 rows of a matrix product, by SCORED."""


@triton.jit
def num_scored(length, SCORED: tl.constexpr):
    """Return the number of scored queries of a tile."""
    PERIOD: tl.constexpr = TILE // SCORED
    return (length + PERIOD - 1) // PERIOD


@triton.jit
def scored_offsets(o_s, length, SCORED: tl.constexpr):
    """Return the places in their tile of scored queries; queries past the last one get the last one's place."""
    PERIOD: tl.constexpr = TILE // SCORED
    return tl.minimum(o_s * PERIOD + PERIOD - 1, length - 1)
