# SPDX-License-Identifier: Apache-2.0
"""The order in which ``hopper`` processes its work, from the kernel that ranks it."""

import pytest
import torch

from tests.helpers.batches import random_batch, random_index
from vllm_sparse_kernels.attention.hopper import engine as hopper
from vllm_sparse_kernels.attention.portable.engine import matrix_args
from vllm_sparse_kernels.engine_trial import Batch
from vllm_sparse_kernels.index import SparseIndex
from vllm_sparse_kernels.paged import key_args


def _order(batch: Batch, index: SparseIndex) -> list[tuple[int, int]]:
    """Return (head, tile) in the order of the work."""
    matrix = matrix_args(batch.cache)
    assert matrix is not None
    with index.workspace.frame():
        shape = {
            "NUM_HEADS": index.num_heads,
            "GROUP": batch.call(index).group,
            "BLOCK_N": index.block_tokens,
            "BOX": index.block_tokens,
        }
        keys = key_args(batch.cache, batch.rows.block_table)
        order = hopper._prepare(index, keys, index.args, matrix, shape).order
        return [(int(i) % index.num_heads, int(i) // index.num_heads) for i in order]


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "stripes", "density"), [(4, 2, 0, 0.5), (6, 2, 24, 0.5), (3, 3, 7, 0.0)]
)
def test_work_goes_by_kv_head_and_then_by_falling_number_of_keys(
    num_heads: int, num_kv_heads: int, stripes: int, density: float
) -> None:
    batch = random_batch([(1000, 300), (0, 63), (512, 129)], num_heads, num_kv_heads, 64, 64)
    index = random_index(batch, 32, density, stripes)
    last = batch.rows.num_tiles - 1  # weighs far more than the other items if these keep little
    index.set_blocks(num_heads - 1, last, torch.ones(index.num_causal_blocks(batch.rows.tile_list[last])).bool())
    keys = index.block_counts * float(index.block_tokens) + index.stripe_counts * 1.5  # costs of items
    order = _order(batch, index)
    assert sorted(order) == [(h, t) for h in range(num_heads) for t in range(batch.rows.num_tiles)]

    excess = torch.log2((keys / keys.mean()).clamp(min=1)).floor()
    group = num_heads // num_kv_heads
    ranks = [(-float(excess[h, t]), h // group, -float(keys[h, t])) for h, t in order]
    assert ranks == sorted(ranks)
