# SPDX-License-Identifier: Apache-2.0
"""The queries of a tile that ``top_p`` scores: the second of each two neighbours.

Scored query j of a tile with n queries is its query min(2 j + 1, n - 1), for j < ⌈n / 2⌉. The last query of a tile is
therefore always scored, and a tile of one query is scored by it.
"""

import triton
import triton.language as tl

from vllm_sparse_kernels.compile_time import Constant
from vllm_sparse_kernels.rows import TILE_TOKENS

SCORED = Constant(TILE_TOKENS // 2)
"""Queries that are scored in a whole tile."""

GROUP_TILES = Constant(2)
"""Neighbouring tiles whose scored queries make up 128 rows of a matrix product."""

SET_TILES = Constant(4)
"""Maximum number of tiles of a tile set: two groups."""


@triton.jit
def num_scored(length):
    """Return the number of scored queries of a tile."""
    return (length + 1) // 2


@triton.jit
def scored_offsets(o_s, length):
    """Return the places in their tile of scored queries; queries past the last one get the last one's place."""
    return tl.minimum(o_s * 2 + 1, length - 1)
