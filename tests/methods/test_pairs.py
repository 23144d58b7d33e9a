# SPDX-License-Identifier: Apache-2.0
"""Pairs added up on the device, against the index's own count."""

import pytest
import torch

from benchmarks.batches import random_batch, random_index
from vllm_sparse_kernels.index import SparseIndex
from vllm_sparse_kernels.pairs import CHUNK_LISTS, add_listed_pairs
from vllm_sparse_kernels.rows import Rows


@pytest.mark.parametrize("stripes", [0, 24])
@pytest.mark.parametrize("lengths", [[(0, 1)], [(1000, 300), (0, 63), (512, 129)]])
def test_sums_of_layers_add_up_apart(lengths: list[tuple[int, int]], stripes: int, device: str) -> None:
    batch = random_batch(lengths, 6, 2, 64, 64, device=device)
    totals = torch.tensor([3, -1, 2**40], device=device)
    expected = totals.tolist()
    for i_total, density in ((2, 0.1), (0, 0.9), (2, 0.5)):
        index = random_index(batch, 32, density, stripes)
        add_listed_pairs(index, totals, i_total)
        expected[i_total] += int(index.listed_pairs().sum())
    assert totals.tolist() == expected
    assert expected[1] == -1


def test_more_lists_than_one_program_adds_up_and_more_pairs_than_32_bits_hold(device: str) -> None:
    rows = Rows((0,), (9 * 128 + 5,), (10_000_000,), torch.zeros(1, 1, dtype=torch.int32, device=device))
    index = SparseIndex.allocate(rows, 120, 128)
    assert index.block_counts.numel() > CHUNK_LISTS
    index.block_counts.fill_(70_000)
    add_listed_pairs(index, totals := torch.zeros(1, dtype=torch.int64, device=device), 0)
    assert totals.item() == 120 * rows.query_lens[0] * 70_000 * 128
