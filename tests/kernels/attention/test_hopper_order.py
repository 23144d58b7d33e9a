# SPDX-License-Identifier: Apache-2.0
"""The order in which ``hopper`` processes its work, and the places where it finds blocks, from its first kernel."""

from itertools import product
from math import gcd

import pytest
import torch

from tests.helpers.batches import random_batch, random_index
from vllm_sparse_kernels.attention.hopper import engine as hopper
from vllm_sparse_kernels.engine_trial import Batch
from vllm_sparse_kernels.index import SparseIndex
from vllm_sparse_kernels.paged import key_args


def _prepare(batch: Batch, index: SparseIndex, box: int) -> hopper.WorkArgs:
    group = batch.call(index).group
    shape = {"NUM_HEADS": index.num_heads, "GROUP": group, "BLOCK_N": index.block_tokens, "BOX": box}
    return hopper._prepare(index, key_args(batch.cache, batch.rows.block_table), index.args, shape)


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
    with index.workspace.frame():
        items = _prepare(batch, index, index.block_tokens).order.tolist()
    order = [(item % num_heads, item // num_heads) for item in items]
    assert sorted(order) == [(h, t) for h in range(num_heads) for t in range(batch.rows.num_tiles)]

    excess = torch.log2((keys / keys.mean()).clamp(min=1)).floor()
    group = num_heads // num_kv_heads
    ranks = [(-float(excess[h, t]), h // group, -float(keys[h, t])) for h, t in order]
    assert ranks == sorted(ranks)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("page_size", [16, 48, 64])
def test_boxes_of_listed_blocks_hold_their_keys(page_size: int, layout: str) -> None:
    """A page holds 16 or more keys of a block. Boxes past a row's end, which may have no page, repeat the last box."""
    batch = random_batch([(77, 40), (0, 50), (640, 129)], 4, 2, 64, page_size, layout=layout)
    index, cache, box = random_index(batch, 64, 0.5), batch.cache, gcd(64, page_size)
    _, stride_token, stride_head = cache.strides
    with index.workspace.frame():
        places = _prepare(batch, index, box).places.view(index.num_heads, -1, 64 // box)
        for head, (i_tile, tile) in product(range(index.num_heads), enumerate(batch.rows.tile_list)):
            seq_len = int(batch.rows.seq_lens[tile.row])
            keys, _ = cache.gather(batch.rows.block_table[tile.row], seq_len)
            first_column = head // 2 * (stride_head % stride_token)
            rows = cache.keys.as_strided(
                (cache.last_offset // stride_token + 1, 64), (stride_token, 1), first_column
            )  # fmt: skip
            for i, block in enumerate(index.blocks_of(head, i_tile).tolist()):
                for i_box, place in enumerate(places[head, int(index.block_offsets[i_tile]) + i].tolist()):
                    start = min(block * 64 + i_box * box, (seq_len - 1) // box * box)
                    expected = keys[start : start + box, head // 2]
                    assert torch.equal(rows[place : place + len(expected)], expected), (head, i_tile, block, i_box)
