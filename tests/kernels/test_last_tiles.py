# SPDX-License-Identifier: Apache-2.0
"""A dense last tile: kernel and reference, over what a method has selected."""

import pytest
import torch

from benchmarks.batches import random_batch, random_index
from vllm_sparse_kernels.methods.base import last_tile_heads
from vllm_sparse_kernels.methods.minference.method import AShape
from vllm_sparse_kernels.select.last_tiles import keep_last_tiles
from vllm_sparse_kernels.select.last_tiles_reference import keep_last_tiles as by_reference


@pytest.mark.parametrize("block_tokens", [32, 64, 128])
@pytest.mark.parametrize("lengths", [[(0, 1)], [(37, 300), (0, 5), (200, 128)], [(1000, 129)]], ids=str)
def test_the_last_tile_of_each_row_keeps_everything(device, lengths, block_tokens):
    batch = random_batch(lengths, 4, 2, 64, 16, torch.float16, device, gap_tokens=2)
    indices = [random_index(batch, block_tokens, 0.3, stripes=40) for _ in range(3)]
    heads = torch.tensor([1, 3], dtype=torch.int32, device=device)
    before, after, reference = indices
    keep_last_tiles(after, heads)
    by_reference(reference, heads)
    after.check()
    last = {end - 1 for end in batch.rows.tile_starts[1:]}
    for i_tile, tile in enumerate(batch.rows.tile_list):
        for head in range(4):
            dense = i_tile in last and head in (1, 3)
            assert torch.equal(after.blocks_of(head, i_tile), reference.blocks_of(head, i_tile))
            assert torch.equal(after.stripes_of(head, i_tile), reference.stripes_of(head, i_tile))
            if dense:
                assert bool(after.tile_keys(head, i_tile).all())
                assert after.blocks_of(head, i_tile).tolist() == list(range(after.num_causal_blocks(tile)))
                assert not len(after.stripes_of(head, i_tile))
            else:
                assert torch.equal(after.blocks_of(head, i_tile), before.blocks_of(head, i_tile))
                assert torch.equal(after.stripes_of(head, i_tile), before.stripes_of(head, i_tile))


def test_which_heads_ask_for_it():
    device, methods = torch.device("cpu"), [AShape(), AShape(dense_last_tile=True), AShape(block_means=True)]
    assert last_tile_heads(methods, device).tolist() == [1]
    assert last_tile_heads(methods[:1], device) is None
