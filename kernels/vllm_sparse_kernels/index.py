# SPDX-License-Identifier: Apache-2.0
"""SparseIndex: what each (query head, tile) attends to.

Per head and tile, a sorted list of key blocks and a sorted list of single key positions ("stripes"), in buffers whose
layout the host fixes from upper bounds, so that nothing has to be read back. A tile's block list has room for every
block in its causal reach: it cannot overflow. A method states how many stripes it may keep (``StripeLayout``), and
tiles that share one list (groups of AnchorAttention) share its place.

Invariants (``check``): lists sorted, unique and causal; every block of a tile's diagonal present; no stripe inside a
kept block; counts within capacity.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch

from vllm_sparse_kernels.rows import Rows, Tile, ceil_div, host_to_device, to_device
from vllm_sparse_kernels.workspace import Workspace, padded_bytes


@dataclass(frozen=True)
class LayerShape:
    """What the memory that a layer needs depends on, beside its rows: heads of this rank, and its index's blocks."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_tokens: int
    element_bytes: int  # of q, keys and values


@dataclass(frozen=True)
class StripeLayout:
    """Where one head's stripe lists begin: ``offsets[i]`` for tile i, within ``capacity`` positions in all."""

    offsets: tuple[int, ...]
    capacity: int

    @cached_property
    def longest(self) -> int:
        """Positions that the longest list has room for: a list ends where the next one begins."""
        places = sorted({*self.offsets, self.capacity})
        return max((end - start for start, end in pairwise(places)), default=0)

    @cached_property
    def host_offsets(self) -> torch.Tensor:
        """[num_tiles] int64: ``offsets``."""
        return torch.tensor(self.offsets, dtype=torch.int64)

    @staticmethod
    def none(rows: Rows) -> "StripeLayout":
        """Return the layout of a head that keeps no stripes.

        Args:
            rows: the rows of a step.

        Returns:
            Room for none.
        """
        return StripeLayout((0,) * rows.num_tiles, 0)

    @staticmethod
    def per_tile(rows: Rows, stripes: int) -> "StripeLayout":
        """Return room for at most ``stripes`` positions for each tile, and no more than lie before it.

        Args:
            rows: the rows of a step.
            stripes: positions of a tile, at most.

        Returns:
            Lists side by side, in the order of the tiles.
        """
        ends = rows.tile_positions.clamp(max=stripes).cumsum(0).tolist()
        return StripeLayout((0, *ends[:-1]), ends[-1]) if ends else StripeLayout((), 0)


@dataclass(frozen=True)
class IndexLayout:
    """Where each list lies, which the host knows of the rows alone: layers that keep alike may share it in a pass."""

    rows: Rows
    num_heads: int
    block_tokens: int
    block_capacity: int  # of a head
    stripe_capacity: int  # of all heads
    longest_stripes: int
    block_offsets: torch.Tensor  # [num_tiles] int64
    stripe_offsets: torch.Tensor  # [num_heads, num_tiles] int64
    no_stripes: torch.Tensor | None  # [num_heads, num_tiles] int32, zeros: the counts where no head has room for any

    @staticmethod
    def of(
        rows: Rows, num_heads: int, block_tokens: int, stripes: Mapping[int, StripeLayout] | None = None
    ) -> "IndexLayout":
        """Work out where each list lies.

        Args:
            rows: the rows of a step.
            num_heads: query heads.
            block_tokens: keys of a block of the index.
            stripes: each query head's layout; heads that are not in it keep no stripes.

        Returns:
            The layout, copied to the rows' device.
        """
        stripes = stripes or {}
        capacities = rows.block_capacities(block_tokens)
        layouts = [stripes.get(head) for head in range(num_heads)]
        begins = [0, *accumulate(layout.capacity if layout else 0 for layout in layouts)]
        nothing = torch.zeros(rows.num_tiles, dtype=torch.int64)
        stripe_offsets = torch.stack([layout.host_offsets if layout else nothing for layout in layouts])
        stripe_offsets += torch.tensor(begins[:-1])[:, None]
        no_stripes = None
        if not begins[-1]:
            no_stripes = torch.zeros(num_heads, rows.num_tiles, dtype=torch.int32, device=rows.device)
        return IndexLayout(
            rows,
            num_heads,
            block_tokens,
            padded_capacity(sum(capacities)),
            begins[-1],
            max((layout.longest for layout in stripes.values()), default=0),
            to_device([0, *accumulate(capacities)][:-1], torch.int64, rows.device),
            host_to_device(stripe_offsets, rows.device),
            no_stripes,
        )

    def allocate(self, workspace: Workspace) -> "SparseIndex":
        """Take room for every causal block of every tile, and for the stripes.

        Args:
            workspace: where temporary tensors come from.

        Returns:
            An index of which all but stripes' counts is undefined.

        Raises:
            MemoryError: the workspace has no room left.
        """
        room = partial(workspace.empty, dtype=torch.int32)
        none = self.no_stripes
        return SparseIndex(
            rows=self.rows,
            num_heads=self.num_heads,
            block_tokens=self.block_tokens,
            block_counts=room(self.num_heads, self.rows.num_tiles),
            block_ids=room(self.num_heads, self.block_capacity),
            block_offsets=self.block_offsets,
            stripe_counts=room(self.num_heads, self.rows.num_tiles).zero_() if none is None else none,
            stripe_positions=room(self.stripe_capacity),
            stripe_offsets=self.stripe_offsets,
            longest_stripes=self.longest_stripes,
            workspace=workspace,
        )


class IndexArgs(NamedTuple):
    """Tensors of Rows and SparseIndex, for kernels.

    No number here changes with a batch's size in a way that Triton specialises on (a head's lists are a multiple of 16
    long): a kernel that is compiled at start-up serves every later batch.
    """

    tiles: Any
    order: Any
    row_ends: Any
    block_counts: Any
    block_ids: Any
    block_offsets: Any
    stride_blocks: int
    stripe_counts: Any
    stripe_positions: Any
    stripe_offsets: Any


def padded_capacity(num_blocks: int) -> int:
    """Return the length of a head's block lists: a multiple of 16, which kernels are compiled for.

    Args:
        num_blocks: of all tiles.

    Returns:
        Blocks.
    """
    return ceil_div(num_blocks, 16) * 16


@dataclass(frozen=True)
class SparseIndex:
    """Selected keys of every (query head, tile). All tensors lie on the device; see the module for the invariants."""

    rows: Rows
    num_heads: int
    block_tokens: int
    block_counts: torch.Tensor  # [num_heads, num_tiles] int32
    block_ids: torch.Tensor  # [num_heads, block_capacity] int32, keys [id * block_tokens, (id + 1) * block_tokens)
    block_offsets: torch.Tensor  # [num_tiles] int64, where a tile's list begins in a head's row of block_ids
    stripe_counts: torch.Tensor  # [num_heads, num_tiles] int32
    stripe_positions: torch.Tensor  # [stripe_capacity] int32
    stripe_offsets: torch.Tensor  # [num_heads, num_tiles] int64, where a list begins in stripe_positions
    longest_stripes: int  # positions that the longest of the stripe lists has room for, on the host
    workspace: Workspace  # for what fills the index and what walks it

    @staticmethod
    def allocate(
        rows: Rows,
        num_heads: int,
        block_tokens: int,
        stripes: Mapping[int, StripeLayout] | None = None,
        workspace: Workspace | None = None,
    ) -> "SparseIndex":
        """Take room for every causal block of every tile, and for the stripes that each head's layout asks for.

        Args:
            rows: the rows of a step.
            num_heads: query heads.
            block_tokens: keys of a block of the index.
            stripes: each query head's layout; heads that are not in it keep no stripes.
            workspace: where it lies; None: torch's allocator.

        Returns:
            An index whose contents are undefined until every head has been selected.

        Raises:
            MemoryError: the workspace has no room left.
        """
        return IndexLayout.of(rows, num_heads, block_tokens, stripes).allocate(workspace or Workspace(rows.device))

    @staticmethod
    def bytes_for(rows: Rows, num_heads: int, block_tokens: int, stripe_capacity: int) -> int:
        """Return what ``allocate`` takes from the workspace.

        Args:
            rows: the rows of a step.
            num_heads: query heads.
            block_tokens: keys of a block of the index.
            stripe_capacity: stripes of all heads together.

        Returns:
            Bytes.
        """
        room = partial(padded_bytes, dtype=torch.int32)
        block_capacity = padded_capacity(sum(rows.block_capacities(block_tokens)))
        counts = (2 if stripe_capacity else 1) * room(num_heads, rows.num_tiles)
        return counts + room(num_heads, block_capacity) + room(stripe_capacity)

    @property
    def args(self) -> IndexArgs:
        """The tensors, for kernels."""
        rows = self.rows
        return IndexArgs(
            rows.tiles, rows.heaviest_first, rows.row_ends,
            self.block_counts, self.block_ids, self.block_offsets, self.block_ids.stride(0),
            self.stripe_counts, self.stripe_positions, self.stripe_offsets,
        )  # fmt: skip

    @property
    def has_stripes(self) -> bool:
        """Whether any head has room for stripes."""
        return len(self.stripe_positions) > 0

    def clear_stripes(self, heads: torch.Tensor) -> None:
        """Leave no stripes in some heads.

        Args:
            heads: [n] int32 on the device.
        """
        if self.has_stripes:  # else counts are zeros that no layer writes
            self.stripe_counts.index_fill_(0, heads.long(), 0)

    def num_causal_blocks(self, tile: Tile) -> int:
        """Return blocks with a key that the tile's last query may see: the capacity of the tile's list.

        Args:
            tile: a tile of the step.

        Returns:
            Blocks.
        """
        return ceil_div(tile.last_position + 1, self.block_tokens)

    def first_diagonal_block(self, tile: Tile) -> int:
        """Return the block from which on every block of the tile holds a key that some of its queries may not see.

        Args:
            tile: a tile of the step.

        Returns:
            A block's id.
        """
        return tile.position // self.block_tokens

    @property
    def masked_pairs(self) -> int:
        """(query, key) pairs of all rows' and heads' listed blocks that the causal mask forbids; known to the host."""
        return self.num_heads * self.rows.masked_pairs(self.block_tokens)

    def kept_pairs(self) -> torch.Tensor:
        """Kept (query, key) pairs of all rows and heads: an int64 scalar on the device, not waited for."""
        return self.listed_pairs().sum() - self.masked_pairs

    def pairs_of_heads(self) -> torch.Tensor:
        """Kept (query, key) pairs of all rows: int64 [num_heads] on the device, not waited for."""
        return self.listed_pairs().sum(1) - self.rows.masked_pairs(self.block_tokens)

    def listed_pairs(self) -> torch.Tensor:
        """[num_heads, num_tiles] int32: a tile's queries times the keys of its blocks and stripes, masked or not."""
        return torch.add(self.stripe_counts, self.block_counts, alpha=self.block_tokens) * self.rows.tile_lengths

    # What follows reads the device: for references, tests and debugging only.

    def blocks_of(self, head: int, i_tile: int) -> torch.Tensor:
        """Return the blocks that a tile keeps. Reads the device.

        Args:
            head: a query head.
            i_tile: a tile of the step.

        Returns:
            [count] int64, ascending.
        """
        start = int(self.block_offsets[i_tile])
        return self.block_ids[head, start : start + int(self.block_counts[head, i_tile])].long()

    def stripes_of(self, head: int, i_tile: int) -> torch.Tensor:
        """Return the single keys that a tile keeps. Reads the device.

        Args:
            head: a query head.
            i_tile: a tile of the step.

        Returns:
            [count] int64, ascending positions.
        """
        start = int(self.stripe_offsets[head, i_tile])
        return self.stripe_positions[start : start + int(self.stripe_counts[head, i_tile])].long()

    def set_blocks(self, head: int, i_tile: int, kept: torch.Tensor) -> None:
        """Keep some blocks, and the diagonal ones. Reads the device.

        Args:
            head: a query head.
            i_tile: a tile of the step.
            kept: [num_causal_blocks] bool.
        """
        tile = self.rows.tile_list[i_tile]
        kept = kept.clone()
        kept[self.first_diagonal_block(tile) :] = True
        ids = kept.nonzero().flatten().int()
        start = int(self.block_offsets[i_tile])
        self.block_ids[head, start : start + len(ids)] = ids
        self.block_counts[head, i_tile] = len(ids)

    def set_stripes(self, head: int, i_tile: int, positions: torch.Tensor) -> None:
        """Keep some key positions, less those inside kept blocks. Call after ``set_blocks``. Reads the device.

        Args:
            head: a query head.
            i_tile: a tile of the step.
            positions: [n], of keys.
        """
        positions = positions.long().unique()
        inside = torch.isin(positions // self.block_tokens, self.blocks_of(head, i_tile))
        positions = positions[~inside].int()
        start = int(self.stripe_offsets[head, i_tile])
        self.stripe_positions[start : start + len(positions)] = positions
        self.stripe_counts[head, i_tile] = len(positions)

    def check(self, heads: Sequence[int] | None = None) -> None:
        """Raise AssertionError naming head, tile and broken invariant. Reads the device: not for a step.

        Args:
            heads: The query heads to check; None checks all.
        """
        for i_tile, tile in enumerate(self.rows.tile_list):
            for head in range(self.num_heads) if heads is None else heads:
                where = f"head {head}, tile {i_tile} at position {tile.position}"
                self._check_blocks(head, i_tile, tile, where)
                self._check_stripes(head, i_tile, tile, where)

    def _check_blocks(self, head: int, i_tile: int, tile: Tile, where: str) -> None:
        count, capacity = int(self.block_counts[head, i_tile]), self.num_causal_blocks(tile)
        assert 0 < count <= capacity, f"{where}: {count} blocks, capacity {capacity}"
        blocks = self.blocks_of(head, i_tile)
        assert bool((blocks.diff() > 0).all()), f"{where}: blocks not sorted and unique"
        in_reach = 0 <= int(blocks[0]) <= int(blocks[-1]) < capacity
        assert in_reach, f"{where}: block outside [0, {capacity})"
        diagonal = torch.arange(self.first_diagonal_block(tile), capacity, device=blocks.device)
        assert bool(torch.isin(diagonal, blocks).all()), f"{where}: diagonal block missing"

    def _check_stripes(self, head: int, i_tile: int, tile: Tile, where: str) -> None:
        count = int(self.stripe_counts[head, i_tile])
        start = int(self.stripe_offsets[head, i_tile])
        assert 0 <= count <= len(self.stripe_positions) - start, f"{where}: {count} stripes from {start}"
        stripes = self.stripes_of(head, i_tile)
        if count == 0:
            return
        assert bool((stripes.diff() > 0).all()), f"{where}: stripes not sorted and unique"
        causal = 0 <= int(stripes[0]) <= int(stripes[-1]) <= tile.position
        assert causal, f"{where}: stripe not causal"
        inside = torch.isin(stripes // self.block_tokens, self.blocks_of(head, i_tile))
        assert not bool(inside.any()), f"{where}: stripe inside a kept block"


def causal_pairs(rows: Rows) -> int:
    """Return (query, key) pairs of one head that a causal mask allows, all rows together.

    Args:
        rows: the rows of a step.

    Returns:
        Pairs.
    """
    return sum(q * c + q * (q + 1) // 2 for q, c in zip(rows.query_lens, rows.context_lens, strict=True))
