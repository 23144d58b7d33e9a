# SPDX-License-Identifier: Apache-2.0
"""SparseIndex, its layouts and Rows: their properties, and that check() refuses every broken invariant."""

import pytest
import torch

from tests.helpers.batches import new_index, random_batch, random_index
from tests.helpers.masks import mask_of
from vllm_sparse_kernels.index import SparseIndex, StripeLayout
from vllm_sparse_kernels.paged import PagedCache
from vllm_sparse_kernels.rows import Rows, Tile


def make_rows(lengths: list[tuple[int, int]], gap_tokens: int = 0) -> Rows:
    """Return rows of (context_len, query_len) that need no cache."""
    tokens, token = [], 0
    for _, query_len in lengths:
        tokens.append(token)
        token += query_len + gap_tokens
    contexts, queries = zip(*lengths, strict=True)
    return Rows(tuple(tokens), tuple(queries), tuple(contexts), torch.zeros(len(lengths), 1, dtype=torch.int32))


@pytest.fixture
def index() -> SparseIndex:
    """Return an index for a row of 100 cached and 200 new tokens: tiles at 100 and 228; every block of head 0, few of
    head 1."""
    rows = make_rows([(100, 200)])
    index = new_index(rows, 2, 64, {h: StripeLayout.per_tile(rows, 10) for h in range(2)})
    for i_tile, tile in enumerate(rows.tile_list):
        num_blocks = index.num_causal_blocks(tile)
        index.set_blocks(0, i_tile, torch.ones(num_blocks, dtype=torch.bool))
        index.set_blocks(1, i_tile, torch.zeros(num_blocks, dtype=torch.bool))
    index.set_stripes(1, 1, torch.tensor([70, 3, 5, 3, 200]))  # 3 twice; 200 lies in the diagonal block 3
    index.check()
    return index


class TestRows:
    def test_tiles_count_from_the_rows_first_query(self):
        rows = make_rows([(37, 300), (0, 1), (5, 128)], gap_tokens=2)
        expected = (0, 0, 128, 37), (0, 128, 128, 165), (0, 256, 44, 293), (1, 302, 1, 0), (2, 305, 128, 5)
        assert rows.tile_list == tuple(Tile(*fields) for fields in expected)
        assert rows.tile_starts == (0, 3, 4, 5)
        assert rows.tile_lengths.tolist() == [tile.length_tokens for tile in rows.tile_list]
        assert rows.seq_lens == (337, 1, 133)
        assert rows.tiles.tolist() == [[t.row, t.token, t.length_tokens, t.position] for t in rows.tile_list]
        assert [t.last_position for t in rows.tile_list] == [164, 292, 336, 0, 132]

    def test_tiles_with_the_longest_reach_come_first(self):
        rows = make_rows([(37, 300), (0, 1), (400, 128)])
        assert rows.device_tile_order.tolist() == [4, 2, 1, 0, 3]

    @pytest.mark.parametrize(
        ("queries", "contexts", "num_rows", "says"),
        [
            ((4, 4), (0, 0), 2, "expected the same number of rows"),
            ((4,), (0,), 2, "expected the same number of rows"),
            ((0,), (5,), 1, "expected query_lens >= 1 and context_lens >= 0"),
            ((3,), (-1,), 1, "expected query_lens >= 1 and context_lens >= 0"),
        ],
    )
    def test_lengths_that_cannot_be(self, queries, contexts, num_rows, says):
        with pytest.raises(ValueError, match=says):
            Rows((0,), queries, contexts, torch.zeros(num_rows, 1, dtype=torch.int32))


class TestPagedCache:
    @pytest.mark.parametrize(
        ("keys", "values"),
        [
            [torch.zeros(2, 16, 64, 2).transpose(2, 3)] * 2,
            (torch.zeros(2, 16, 1, 64), torch.zeros(2, 16, 1, 128)[..., :64]),
        ],
        ids=["heads that are not contiguous", "strides that differ"],
    )
    def test_what_kernels_cannot_read_is_refused(self, keys, values):
        with pytest.raises(ValueError, match="expected equal strides, and 1 for head_dim"):
            _ = PagedCache(keys, values).strides


class TestLayouts:
    def test_per_tile_is_bounded_by_what_lies_before(self):
        rows = make_rows([(100, 300), (0, 130)])
        layout = StripeLayout.per_tile(rows, 150)
        # Tiles at 100, 228, 356, 0 and 128.
        assert layout.offsets == (0, 100, 250, 400, 400)
        assert layout.capacity == 400 + 128
        assert StripeLayout.none(rows) == StripeLayout((0,) * 5, 0)
        assert not new_index(rows, 2, 64).has_stripes
        some = new_index(rows, 2, 64, {1: layout})
        assert (some.has_stripes, some.stripe_counts[0].any().item()) == (True, False)


class TestContents:
    def test_lists_by_hand(self, index):
        """The diagonal is added to blocks; stripes are sorted, and dropped if a block contains them."""
        assert index.blocks_of(1, 0).tolist() == [1, 2, 3]  # positions 100 to 227
        assert index.blocks_of(1, 1).tolist() == [3, 4]  # positions 228 to 299
        assert index.stripes_of(1, 1).tolist() == [3, 5, 70]

    def test_to_mask_by_hand(self, index):
        mask = mask_of(index, 0)
        positions, keys = torch.arange(100, 300)[:, None], torch.arange(300)
        causal = keys <= positions
        assert torch.equal(mask[0], causal)
        second = positions >= 228
        stripes = torch.isin(keys, torch.tensor([3, 5, 70]))
        assert torch.equal(mask[1], causal & torch.where(second, (keys >= 192) | stripes, keys >= 64))

    @pytest.mark.parametrize("block_tokens", [64, 128])
    @pytest.mark.parametrize("density", [0.0, 0.3, 1.0])
    def test_kept_pairs_are_those_of_the_mask(self, density, block_tokens):
        """Pairs are counted from the lists alone, at offsets and lengths that align with nothing."""
        batch = random_batch([(0, 1), (63, 130), (1000, 49), (65, 64), (0, 300)], 4, 2, 8, 16, gap_tokens=1)
        for stripes in (0, 33):
            index = random_index(batch, block_tokens, density, stripes=stripes, seed=stripes)
            kept = sum(int(mask_of(index, row).sum()) for row in range(5))
            assert index.kept_pairs().item() == kept
            assert index.kept_pairs().dtype == torch.int64
            totals = torch.full((3,), 7)
            index.add_listed_pairs(totals, 1)
            assert totals.tolist() == [7, 7 + kept + index.masked_pairs, 7]


def count(lists: str, head: int, i_tile: int, number: int):
    return lambda index: getattr(index, lists)[head, i_tile].fill_(number)


def put(values: torch.Tensor, start: torch.Tensor, others: tuple[int, ...]) -> None:
    values[int(start) : int(start) + len(others)] = torch.tensor(others, dtype=torch.int32)


def put_blocks(head: int, i_tile: int, place: int, *ids: int):
    """Replace the ids of a list from a place on."""
    return lambda index: put(index.block_ids[head], index.block_offsets[i_tile] + place, ids)


def put_stripes(place: int, *positions: int):
    """Replace the stripes of head 1 for its second tile from a place on."""
    return lambda index: put(index.stripe_positions, index.stripe_offsets[1, 1] + place, positions)


def overflow_stripes(index: SparseIndex) -> None:
    """Write 11 stripes of head 1 for its first tile, which has room for 10, into the list of the second tile."""
    put(index.stripe_positions, index.stripe_offsets[1, 0], tuple(range(11)))
    index.stripe_counts[1] = torch.tensor([11, 0], dtype=torch.int32)


NOT_UNIQUE, NOT_CAUSAL = (
    "head 1, tile 1 .* stripes are not sorted and unique",
    "head 1, tile 1 .* a stripe is not causal",
)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (count("block_counts", 0, 0, 0), "head 0, tile 0 at position 100: given 0 blocks, expected 1 to 4"),
        (count("block_counts", 1, 1, 6), "head 1, tile 1 at position 228: given 6 blocks, expected 1 to 5"),
        (count("block_counts", 1, 1, -1), "-1 blocks"),
        (put_blocks(0, 0, 0, 1, 0), r"head 0, tile 0 .* blocks are not sorted and unique"),
        (put_blocks(1, 1, 1, 5), r"head 1, tile 1 .* a block is outside of \[0, 5\)"),
        (put_blocks(1, 0, 0, -1), r"head 1, tile 0 .* a block is outside of"),
        (put_blocks(1, 1, 0, 2, 4), r"head 1, tile 1 .* a diagonal block is missing"),
        (count("stripe_counts", 1, 1, -1), "head 1, tile 1 .* -1 stripes"),
        (count("stripe_counts", 1, 1, 100), "head 1, tile 1 .* 100 stripes"),
        (overflow_stripes, "head 1, tile 0 .* given 11 stripes at offset 20, expected at most 10"),
        (put_stripes(0, 5, 3, 70), NOT_UNIQUE),
        (put_stripes(0, 3, 3, 70), NOT_UNIQUE),
        (put_stripes(0, -1, 5, 70), NOT_CAUSAL),
        (put_stripes(0, 3, 5, 229), NOT_CAUSAL),
        (put_stripes(2, 195), "head 1, tile 1 .* a stripe is inside a kept block"),
        (put_stripes(2, 228), "head 1, tile 1 .* stripe"),  # every query sees it, in the tile's diagonal blocks
    ],
)
def test_every_broken_invariant_is_found(index, damage, says):
    damage(index)
    with pytest.raises(AssertionError, match=says):
        index.check()
