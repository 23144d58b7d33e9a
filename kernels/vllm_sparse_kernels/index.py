# SPDX-License-Identifier: Apache-2.0
"""``SparseIndex``: the keys that each (query head, tile) attends to.

Each head and tile has a sorted list of key blocks and a sorted list of single key positions ("stripes"). The host fixes
the layout of the buffers from upper bounds, so nothing has to be read back from the device. A tile's block list has
room for every block in its causal reach and cannot overflow. A method states the number of stripes that it may keep
(``StripeLayout``). Tiles that share a list of stripes (groups of AnchorAttention) share its memory.

Invariants, which ``SparseIndex.check`` verifies: lists are sorted, unique and causal; every block of a tile's diagonal
is present; no stripe lies inside a kept block; counts are within capacity.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from vllm_sparse_kernels.rows import TILE_FIELDS, Rows, Tile, ceil_div, host_to_device, round_up, split_blocks
from vllm_sparse_kernels.workspace import Workspace


@dataclass(frozen=True)
class StripeLayout:
    """Places of one head's stripe lists."""

    offsets: tuple[int, ...]
    capacity: int

    @cached_property
    def longest(self) -> int:
        """Capacity of the longest list, in positions. A list ends where the next list begins."""
        places = sorted({*self.offsets, self.capacity})
        return max((end - start for start, end in pairwise(places)), default=0)

    @cached_property
    def host_offsets(self) -> torch.Tensor:
        """[num_tiles] int64: ``offsets``."""
        return torch.tensor(self.offsets, dtype=torch.int64)

    @staticmethod
    def of(capacities: Iterable[int]) -> "StripeLayout":
        """Return the layout of a head with a separate list for each tile, from their capacities."""
        *offsets, capacity = accumulate(capacities, initial=0)
        return StripeLayout(tuple(offsets), capacity)

    @staticmethod
    def none(rows: Rows) -> "StripeLayout":
        """Return the layout of a head without stripes."""
        return StripeLayout((0,) * rows.num_tiles, 0)

    @staticmethod
    def per_tile(rows: Rows, stripes: int) -> "StripeLayout":
        """Return the layout of a head that keeps up to a number of stripes in each tile."""
        return StripeLayout.of(min(tile.position, stripes) for tile in rows.tile_list)


@dataclass(frozen=True)
class IndexLayout:
    """Places of all lists of an index, which follow from the rows. Layers with equal layouts share it in a pass."""

    rows: Rows
    num_heads: int
    block_tokens: int
    block_capacity: int
    stripe_capacity: int
    longest_stripes: int
    block_offsets: torch.Tensor
    stripe_offsets: torch.Tensor
    zero_counts: torch.Tensor | None

    @staticmethod
    def build(rows: Rows, block_tokens: int, stripes: Sequence[StripeLayout]) -> "IndexLayout":
        """Lay out the lists of heads, each with its layout of stripes."""
        *head_offsets, stripe_capacity = accumulate((layout.capacity for layout in stripes), initial=0)
        stripe_offsets = torch.stack([layout.host_offsets for layout in stripes]) + torch.tensor(head_offsets)[:, None]
        capacities = (ceil_div(tile.last_position + 1, block_tokens) for tile in rows.tile_list)
        *block_offsets, num_blocks = accumulate(capacities, initial=0)
        zero_counts = None
        if not stripe_capacity:
            zero_counts = torch.zeros(len(stripes), rows.num_tiles, dtype=torch.int32, device=rows.device)
        return IndexLayout(
            rows=rows,
            num_heads=len(stripes),
            block_tokens=block_tokens,
            block_capacity=round_up(num_blocks, 16),  # for which kernels are specialised
            stripe_capacity=stripe_capacity,
            longest_stripes=max(layout.longest for layout in stripes),
            block_offsets=rows.to_device(block_offsets, torch.int64),
            stripe_offsets=host_to_device(stripe_offsets, rows.device),
            zero_counts=zero_counts,
        )

    def new_index(self, workspace: Workspace) -> "SparseIndex":
        """Allocate the lists."""
        empty = partial(workspace.empty, dtype=torch.int32)
        block_counts = empty(self.num_heads, self.rows.num_tiles)
        block_ids = empty(self.num_heads, self.block_capacity)
        stripe_counts = self.zero_counts
        if stripe_counts is None:
            stripe_counts = empty(self.num_heads, self.rows.num_tiles).zero_()
        return SparseIndex(
            **vars(self),
            block_counts=block_counts,
            block_ids=block_ids,
            stripe_counts=stripe_counts,
            stripe_positions=empty(self.stripe_capacity),
            workspace=workspace,
        )


class IndexArgs(NamedTuple):
    """Tensors of ``Rows`` and ``SparseIndex``, as arguments of kernels.

    No number here causes a new variant of a kernel as the batch changes, because the length of a head's lists is a
    multiple of 16. A kernel that is compiled at start-up therefore serves every later batch.
    """

    tiles: Any
    order: Any
    seq_lens: Any
    block_counts: Any
    block_ids: Any
    block_offsets: Any
    stride_blocks: int
    stripe_counts: Any
    stripe_positions: Any
    stripe_offsets: Any


@dataclass(frozen=True)
class SparseIndex(IndexLayout):
    """Selected keys of every (query head, tile). The module's docstring has the invariants.

    Attributes:
        rows: The rows of a step.
        num_heads: Query heads of this rank.
        block_tokens: Keys of a block. Block i holds the keys at positions [i · block_tokens, (i + 1) · block_tokens).
        block_counts: [num_heads, num_tiles] int32, lengths of the lists of blocks.
        block_ids: [num_heads, block_capacity] int32, the lists of blocks.
        block_offsets: [num_tiles] int64, offset of a tile's list in a head's row of ``block_ids``.
        stripe_counts: [num_heads, num_tiles] int32, lengths of the lists of stripes.
        stripe_positions: [stripe_capacity] int32, the lists of stripes.
        stripe_offsets: [num_heads, num_tiles] int64, offset of a list in ``stripe_positions``.
        longest_stripes: Capacity of the longest list of stripes, in positions, known on the host.
        workspace: Memory for selection and attention with this index.
    """

    block_counts: torch.Tensor
    block_ids: torch.Tensor
    stripe_counts: torch.Tensor
    stripe_positions: torch.Tensor
    workspace: Workspace

    @cached_property
    def args(self) -> IndexArgs:
        """Arguments of kernels that read or write the index."""
        rows = self.rows
        return IndexArgs(
            rows.tiles, rows.device_tile_order, rows.device_seq_lens,
            self.block_counts, self.block_ids, self.block_offsets, self.block_ids.stride(0),
            self.stripe_counts, self.stripe_positions, self.stripe_offsets,
        )  # fmt: skip

    @property
    def has_stripes(self) -> bool:
        """Whether any head has room for stripes."""
        return self.stripe_capacity > 0

    def num_causal_blocks(self, tile: Tile) -> int:
        """Return the number of blocks with a key that a tile's last query may attend to: its list's capacity."""
        return ceil_div(tile.last_position + 1, self.block_tokens)

    def first_diagonal_block(self, tile: Tile) -> int:
        """Return the id of the first block with a key that at least one query of a tile may not attend to."""
        return tile.position // self.block_tokens

    @property
    def masked_pairs(self) -> int:
        """(query, key) pairs of listed blocks that the causal mask excludes, all rows and heads; known on the host."""
        return self.num_heads * self.rows.once(_masked_pairs, self.block_tokens)

    def kept_pairs(self) -> torch.Tensor:
        """Count the kept (query, key) pairs of all rows and heads: int64 scalar on the device. Does not synchronise."""
        return self.pairs_of_heads().sum()

    def pairs_of_heads(self) -> torch.Tensor:
        """Count the kept (query, key) pairs of each head: [num_heads] int64 on the device. Does not synchronise."""
        keys = torch.add(self.stripe_counts, self.block_counts, alpha=self.block_tokens)
        return (keys * self.rows.tile_lengths).sum(1) - self.rows.once(_masked_pairs, self.block_tokens)

    def add_listed_pairs(self, totals: torch.Tensor, i_total: int) -> None:
        """Add the listed (query, key) pairs, including those that the mask excludes, to an element of ``totals``.

        ``totals`` is int64 on the device. Does not synchronise.
        """
        if not totals.is_cuda and isinstance(_count_kernel, triton.JITFunction):  # a CPU without Triton's interpreter
            totals[i_total] += self.kept_pairs() + self.masked_pairs
            return
        rows = self.rows
        _count_kernel[(self.num_heads,)](
            self.args, rows.tile_lengths, rows.num_tiles, totals, i_total, BLOCK_N=self.block_tokens
        )  # fmt: skip

    # The methods below synchronise with the device: for references, tests and debugging only.

    def blocks_of(self, head: int, i_tile: int) -> torch.Tensor:
        """Return the block ids of one list, [n] int64."""
        return self._block_list(head, i_tile)[: self.block_counts[head, i_tile]].long()

    def stripes_of(self, head: int, i_tile: int) -> torch.Tensor:
        """Return the key positions of one list of stripes, [n] int64."""
        return self._stripe_list(head, i_tile)[: self.stripe_counts[head, i_tile]].long()

    def _block_list(self, head: int, i_tile: int) -> torch.Tensor:
        """Return ``block_ids`` from the beginning of a list on."""
        return self.block_ids[head, self.block_offsets[i_tile] :]

    def _stripe_list(self, head: int, i_tile: int) -> torch.Tensor:
        """Return ``stripe_positions`` from the beginning of a list on."""
        return self.stripe_positions[self.stripe_offsets[head, i_tile] :]

    def set_blocks(self, head: int, i_tile: int, kept: torch.Tensor, tokens: int | None = None) -> None:
        """Write one list: the blocks of which any part is flagged in ``kept``, and those on the diagonal.

        ``kept`` [n] bool has a flag for each ``tokens`` keys up to the tile's last query; by default, for each block.
        """
        tile = self.rows.tile_list[i_tile]
        parts = self.block_tokens // (tokens or self.block_tokens)
        kept = split_blocks(kept, parts).any(1)
        kept[self.first_diagonal_block(tile) :] = True
        ids = kept.nonzero().flatten().int()
        self._block_list(head, i_tile)[: len(ids)] = ids
        self.block_counts[head, i_tile] = len(ids)

    def set_stripes(self, head: int, i_tile: int, positions: torch.Tensor) -> None:
        """Write one list of stripes: ``positions`` [n] of keys in any order.

        Call ``set_blocks`` first: positions inside kept blocks are left out.
        """
        positions = positions.long().unique()
        inside = torch.isin(positions // self.block_tokens, self.blocks_of(head, i_tile))
        positions = positions[~inside].int()
        self._stripe_list(head, i_tile)[: len(positions)] = positions
        self.stripe_counts[head, i_tile] = len(positions)

    def check(self, heads: Sequence[int] | None = None) -> None:
        """Check the invariants, synchronising with the device: for tests and debugging.

        Args:
            heads: The query heads to check; None checks all.

        Raises:
            AssertionError: An invariant is broken; the message names it with head and tile.
        """
        list_starts = [*self.stripe_offsets.unique().tolist(), len(self.stripe_positions)]
        for i_tile, tile in enumerate(self.rows.tile_list):
            for head in range(self.num_heads) if heads is None else heads:
                where = f"head {head}, tile {i_tile} at position {tile.position}"
                self._check_blocks(head, i_tile, tile, where)
                self._check_stripes(head, i_tile, tile, where, list_starts)

    def _check_blocks(self, head: int, i_tile: int, tile: Tile, where: str) -> None:
        count, capacity = int(self.block_counts[head, i_tile]), self.num_causal_blocks(tile)
        assert 0 < count <= capacity, f"{where}: given {count} blocks, expected 1 to {capacity}"
        blocks = self.blocks_of(head, i_tile)
        assert (blocks.diff() > 0).all(), f"{where}: blocks are not sorted and unique"
        in_reach = (blocks >= 0) & (blocks < capacity)
        assert in_reach.all(), f"{where}: a block is outside of [0, {capacity})"
        diagonal = torch.arange(self.first_diagonal_block(tile), capacity, device=blocks.device)
        assert torch.isin(diagonal, blocks).all(), f"{where}: a diagonal block is missing"

    def _check_stripes(self, head: int, i_tile: int, tile: Tile, where: str, list_starts: Sequence[int]) -> None:
        """Check one list of stripes, which ends at the next position in the ascending ``list_starts``."""
        count = int(self.stripe_counts[head, i_tile])
        start = int(self.stripe_offsets[head, i_tile])
        i_next = bisect_right(list_starts, start)
        capacity = list_starts[i_next] - start if i_next < len(list_starts) else 0
        assert 0 <= count <= capacity, f"{where}: given {count} stripes at offset {start}, expected at most {capacity}"
        stripes = self.stripes_of(head, i_tile)
        if count == 0:
            return
        assert (stripes.diff() > 0).all(), f"{where}: stripes are not sorted and unique"
        causal = (stripes >= 0) & (stripes <= tile.position)
        assert causal.all(), f"{where}: a stripe is not causal"
        inside = torch.isin(stripes // self.block_tokens, self.blocks_of(head, i_tile))
        assert not inside.any(), f"{where}: a stripe is inside a kept block"


def causal_pairs(rows: Rows) -> int:
    """Count the (query, key) pairs of one head that a causal mask allows."""
    return rows.once(_causal_pairs)


def _causal_pairs(rows: Rows) -> int:
    return sum(q * c + q * (q + 1) // 2 for q, c in zip(rows.query_lens, rows.context_lens, strict=True))


def _masked_pairs(rows: Rows, block_tokens: int) -> int:
    """Count the (query, key) pairs of one head in diagonal blocks of tiles that a causal mask excludes."""
    return sum(
        # Query i of a tile attends to i + 1 keys in addition to the keys before the tile.
        tile.length_tokens * (round_up(tile.last_position + 1, block_tokens) - tile.position)
        - tile.length_tokens * (tile.length_tokens + 1) // 2
        for tile in rows.tile_list
    )


@triton.jit(do_not_specialize=["num_tiles", "i_total"])
def _count_kernel(index, tile_lengths, num_tiles, totals, i_total, BLOCK_N: tl.constexpr):
    """Add the listed pairs of a head to ``totals[i_total]``: for each tile, its queries times its listed keys.

    Grid: (heads,). Bound by latency: a few loads. The total is given by its index: views of elements differ in
    alignment, for which Triton compiles variants.

    Args:
        tile_lengths: ``Rows.tile_lengths``, a column of ``Rows.tiles``.
    """
    b_pairs = tl.zeros([128], tl.int64)
    for start in range(0, num_tiles, 128):
        o_tile = start + tl.arange(0, 128)
        valid, o_count = o_tile < num_tiles, tl.program_id(0) * num_tiles + o_tile
        b_keys = tl.load(index.block_counts + o_count, mask=valid, other=0) * BLOCK_N
        b_keys += tl.load(index.stripe_counts + o_count, mask=valid, other=0)
        b_pairs += b_keys.to(tl.int64) * tl.load(tile_lengths + o_tile * TILE_FIELDS, mask=valid, other=0)
    tl.atomic_add(totals + i_total, tl.sum(b_pairs, 0), sem="relaxed")
