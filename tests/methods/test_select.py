# SPDX-License-Identifier: Apache-2.0
"""What selections are built of: slabs, products that do not depend on them, sums of listed pairs, widths of blocks."""

from collections.abc import Sequence

import pytest
import torch

from benchmarks.batches import random_batch, random_index
from tests.methods.cases import DEVICE, all_lists, select
from vllm_sparse_kernels import width
from vllm_sparse_kernels.index import SparseIndex
from vllm_sparse_kernels.methods import METHODS
from vllm_sparse_kernels.methods.anchor_attention.method import AnchorAttention
from vllm_sparse_kernels.methods.base import Method
from vllm_sparse_kernels.methods.dense.method import Dense
from vllm_sparse_kernels.methods.minference.a_shape import AShape
from vllm_sparse_kernels.methods.minference.block_sparse import BlockSparse
from vllm_sparse_kernels.methods.sale.method import Sale
from vllm_sparse_kernels.methods.sparge_attn.method import SpargeAttn
from vllm_sparse_kernels.pairs import CHUNK_LISTS, add_listed_pairs
from vllm_sparse_kernels.rows import Rows
from vllm_sparse_kernels.select import pooled
from vllm_sparse_kernels.select.pooled import Slab, slabs_of
from vllm_sparse_kernels.width import index_block_tokens


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


HOPPER, AMPERE, ADA, BLACKWELL = (9, 0), (8, 0), (8, 9), (10, 0)
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
SALE = [Sale(), Sale(tau=0.008), Sale(tau=0.0)]


@pytest.fixture(params=[HOPPER, AMPERE, ADA, BLACKWELL], ids=str)
def capability(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """A GPU of that kind, with Hopper's shared memory, so that nothing else tells them apart."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: request.param)
    monkeypatch.setattr(width, "shared_bytes", lambda device: 227 << 10)
    return request.param


@pytest.mark.parametrize("engine", ["auto", "hopper", "flash", "portable"])
def test_sale_alone(capability: tuple[int, int], engine: str) -> None:
    narrow = capability == HOPPER and engine != "portable"
    assert index_block_tokens(SALE, 128, CUDA, engine) == (32 if narrow else 64)


@pytest.mark.parametrize(
    ("methods", "expected"),
    [
        ([*SALE, Dense()], 64),
        ([*SALE, SpargeAttn()], 64),
        ([*SALE, Sale(int8_scores=True)], 64),  # which portable alone has
        ([*SALE, SpargeAttn(skip_margin=-5.0)], 64),
        ([Dense(), AShape()], 128),
        ([AShape(), SpargeAttn()], 64),
        ([AnchorAttention()], 128),
        ([AnchorAttention(whole_blocks=True), AnchorAttention()], 128),
    ],
)
@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
def test_what_shares_an_index_with_others_is_as_wide_as_these(
    methods: Sequence[Method], expected: int, device: torch.device, capability: tuple[int, int]
) -> None:
    assert index_block_tokens(methods, 128, device) == expected


def test_without_a_gpu_as_on_hopper() -> None:
    assert index_block_tokens(SALE, 128, CPU) == 32
    assert index_block_tokens(SALE, 128, CPU, "portable") == 64
    assert index_block_tokens([AnchorAttention(whole_blocks=True)], 128, CPU) == 32


def test_shared_memory_has_the_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: AMPERE)
    monkeypatch.setattr(width, "shared_bytes", lambda device: 99 << 10)
    assert index_block_tokens([Dense()], 128, CUDA) == 64
