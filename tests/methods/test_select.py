# SPDX-License-Identifier: Apache-2.0
"""Pooled queries and keys: slabs, and products that do not depend on them."""

import pytest
import torch

from benchmarks.batches import random_batch
from tests.methods.cases import DEVICE, all_lists, select
from vllm_sparse_kernels.methods import METHODS
from vllm_sparse_kernels.methods.minference.block_sparse import BlockSparse
from vllm_sparse_kernels.methods.sparge_attn.method import SpargeAttn
from vllm_sparse_kernels.rows import Rows
from vllm_sparse_kernels.select import pooled
from vllm_sparse_kernels.select.pooled import Slab, slabs_of


def rows_of(*lengths: tuple[int, int]) -> Rows:
    contexts, queries = zip(*lengths)
    tokens = [sum(queries[:i]) for i in range(len(queries))]
    return Rows(tuple(tokens), queries, contexts, torch.zeros(len(lengths), 1, dtype=torch.int32))


def test_what_fits_is_one_slab():
    rows = rows_of((1000, 300), (0, 64), (5000, 1))
    assert slabs_of(rows, 4, 2, 128, 1) == [Slab(0, 3, 0, 5, 21 + 1 + 79, 79)]


def test_slabs_follow_each_other_within_their_bounds(monkeypatch):
    """Room for four tiles of up to 64 key blocks, or for fewer of longer rows; rows of 64 blocks together at most."""
    monkeypatch.setattr(pooled, "SLAB_BYTES", 4 * 4 * 2 * 64 * 4)
    rows = rows_of((0, 300), (2000, 200), (100, 10), (4000, 1), (9000, 400), (0, 1))
    slabs = slabs_of(rows, 4, 2, 16, 2)
    assert [slab.first_tile for slab in slabs] == [0, *(slab.end_tile for slab in slabs[:-1])]
    assert slabs[-1].end_tile == rows.num_tiles
    for slab in slabs:
        tiles = rows.tile_list[slab.first_tile : slab.end_tile]
        assert (slab.first_row, slab.end_row) == (tiles[0].row, tiles[-1].row + 1)
        own = [-(-n // 64) for n in rows.seq_lens[slab.first_row : slab.end_row]]
        assert (slab.num_blocks, slab.max_blocks) == (sum(own), max(own))
        products = 4 * 2 * slab.num_tiles * slab.width * 64 * 4
        assert slab.num_tiles == 1 or products <= pooled.SLAB_BYTES
        assert slab.end_row - slab.first_row == 1 or slab.num_blocks <= 64
    assert [slab.num_tiles for slab in slabs] == [4, 2, 1, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("method", [BlockSparse(2), SpargeAttn(0.5, -1.0), SpargeAttn(0.5, -1.0, smooth_keys=False)])
def test_slabs_change_nothing(monkeypatch, method):
    """One slab, one for each tile, and two of which one holds two rows."""
    batch = random_batch([(200, 70), (0, 3), (130, 140)], 2, 1, 64, 16, torch.float16, DEVICE)
    whole = all_lists(select(method, batch))
    per_tile = 2 if isinstance(method, BlockSparse) else 1
    for limit, num_slabs in ((1, 4), (3 * 2 * per_tile * 64 * 4, 2)):
        monkeypatch.setattr(pooled, "SLAB_BYTES", limit)
        assert len(slabs_of(batch.rows, 2, 1, 64, per_tile)) == num_slabs
        assert all_lists(select(method, batch)) == whole
    assert len({tuple(blocks) for of_head in whole for blocks, _ in of_head}) > 3


@pytest.mark.parametrize("name", ["block_sparse", "sparge_attn"])
def test_a_pass_makes_its_table_once(name):
    batch = random_batch([(200, 70)], 2, 1, 64, 16, torch.float16, DEVICE)
    method = METHODS[name].parameters()
    select(method, batch)
    table = pooled.row_table(batch.rows)
    select(method, batch)
    assert pooled.row_table(batch.rows) is table
    assert table.tolist() == [[270, 0, 0]]
