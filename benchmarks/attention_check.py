# SPDX-License-Identifier: Apache-2.0
"""Checks attention over an index on sampled tiles against float64, with eager torch's error as the measure of rounding.

Results are checked before they are timed.
"""

import random
from dataclasses import dataclass

import torch

from vllm_sparse_kernels import SparseIndex
from vllm_sparse_kernels.attention.reference import fp8_weights, walk
from vllm_sparse_kernels.engine_trial import Batch
from vllm_sparse_kernels.paged import FP8

SAMPLED_TILES = 12
BUDGET = 2.0
"""Largest error of a result relative to that of eager attention in its dtype, with weights rounded to fp8 if the cache
is in fp8."""


@dataclass(frozen=True)
class Check:
    """Worst relative errors on the sampled tiles."""

    error: float
    eager: float

    @property
    def ratio(self) -> float:
        return self.error / self.eager

    @property
    def passed(self) -> bool:
        return self.ratio <= BUDGET  # never with NaN

    def __str__(self) -> str:
        return f"error {self.error:.2e}, {self.ratio:.1f} times eager's (at most {BUDGET:g})"


def check_attention(batch: Batch, index: SparseIndex, out: torch.Tensor) -> Check:
    """Compare ``out`` with the softmax over the index's keys. Synchronises with the device."""
    chosen = random.Random(0)
    errors = []
    group = batch.num_heads // batch.cache.num_kv_heads
    for _ in range(SAMPLED_TILES):
        i_tile, head = chosen.randrange(batch.rows.num_tiles), chosen.randrange(batch.num_heads)
        tile = batch.rows.tile_list[i_tile]
        k, v = batch.cache.gather(batch.rows.block_table[tile.row], batch.rows.seq_lens[tile.row])
        kept, _ = walk(index, head, i_tile)
        k, v = k[kept, head // group], v[kept, head // group]
        tokens = slice(tile.token, tile.token + tile.length_tokens)
        positions = tile.position + torch.arange(tile.length_tokens, device=k.device)
        hidden = kept[None] > positions[:, None]
        results = []
        for dtype in (torch.float64, out.dtype):
            scores = batch.q[tokens, head].to(dtype) @ k.to(dtype).T * batch.scale
            p = scores.masked_fill(hidden, -torch.inf).softmax(-1).to(dtype)
            if batch.q.dtype == FP8 and dtype == out.dtype:
                p = fp8_weights(p)
            results.append((p @ v.to(dtype)).double() * batch.cache.value_scale)
        truth, rounded = results
        errors.append([float((x - truth).norm() / truth.norm()) for x in (out[tokens, head].double(), rounded)])
    error, eager = torch.tensor(errors).amax(0).tolist()  # NaN if any is NaN
    return Check(error, eager or 1.0)
