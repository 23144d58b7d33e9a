# SPDX-License-Identifier: Apache-2.0
"""The rows of a step that run sparse, and their tiles of 128 queries.

Everything here is known on the host before the step starts, so that no size ever has to come back from the device.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any, TypeVar

import torch

TILE_TOKENS = 128
"""Queries of one tile. 64-query tiles reach about half the speed on Hopper: the key tile is read twice as often."""

TILE_FIELDS = 4
"""Columns of ``Rows.tiles``: row, first token in q, number of queries, position of the first query."""

ROW_FIELDS = 4
"""Columns of ``Rows.row_table``: first token in q, number of queries, number of keys, place of the first key."""

KEY_ALIGN = 64

Made = TypeVar("Made")


def ceil_div(a: int, b: int) -> int:
    """Return a / b, rounded up.

    Args:
        a: >= 0.
        b: > 0.

    Returns:
        An integer.
    """
    return -(-a // b)


def to_device(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A list of host numbers on the device, without waiting for the device.

    Args:
        values: numbers, in order.
        dtype: of the result.
        device: where they go.
    """
    return host_to_device(torch.tensor(values, dtype=dtype), device)


def host_to_device(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host on the device, without waiting for the device.

    Args:
        host: a tensor in the host's memory.
        device: where it goes.
    """
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


@dataclass(frozen=True)
class Tile:
    """128 consecutive queries of one row (fewer at the row's end), counted from the row's first query of this step."""

    row: int
    token: int  # of the first query, in q
    length_tokens: int
    position: int  # of the first query, in the sequence

    @property
    def last_position(self) -> int:
        """Position of the tile's last query."""
        return self.position + self.length_tokens - 1


@dataclass(frozen=True)
class Rows:
    """The sparse rows of one step.

    ``tokens[i]`` is the place of row i's first query in q, ``query_lens[i]`` and ``context_lens[i]`` are its new and
    its cached tokens, all host integers. ``block_table`` is [num_rows, max_pages] int32 on the device; page p of row i
    holds the keys at positions [p · page_size, (p + 1) · page_size).

    A Rows object is one forward pass: all of its layers get the same one, and the next pass gets another, also where
    the lengths are equal (``dataclasses.replace(rows)`` makes it, with an empty ``state``). A pass that has too many
    rows for its memory is several such objects, each with layers and a state of its own.
    """

    tokens: tuple[int, ...]
    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    block_table: torch.Tensor
    state: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """What a method keeps from layer to layer of this pass, under a key of its own. It never outlives the step."""

    _made: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        lengths = {len(self.tokens), len(self.query_lens), len(self.context_lens), self.block_table.shape[0]}
        if len(lengths) != 1:
            raise ValueError(f"Rows: tokens, query_lens, context_lens and block_table differ in length: {lengths}")
        if min(self.query_lens, default=1) < 1 or min(self.context_lens, default=0) < 0:
            raise ValueError(f"Rows: query_lens {self.query_lens} must be >= 1, context_lens {self.context_lens} >= 0")

    @property
    def num_rows(self) -> int:
        """Rows of the step."""
        return len(self.tokens)

    @property
    def device(self) -> torch.device:
        """Where the block table lies."""
        return self.block_table.device

    @cached_property
    def seq_lens(self) -> tuple[int, ...]:
        """Per row the keys that its last query may see."""
        return tuple(c + q for c, q in zip(self.context_lens, self.query_lens, strict=True))

    @cached_property
    def tile_list(self) -> tuple[Tile, ...]:
        """All tiles on the host, row after row."""
        return tuple(
            Tile(row, self.tokens[row] + start, min(TILE_TOKENS, self.query_lens[row] - start), context_len + start)
            for row, context_len in enumerate(self.context_lens)
            for start in range(0, self.query_lens[row], TILE_TOKENS)
        )

    @property
    def num_tiles(self) -> int:
        """Tiles of all rows."""
        return len(self.tile_list)

    @cached_property
    def tile_starts(self) -> tuple[int, ...]:
        """Per row the id of its first tile, and at the end the number of tiles."""
        starts = [0]
        for query_len in self.query_lens:
            starts.append(starts[-1] + ceil_div(query_len, TILE_TOKENS))
        return tuple(starts)

    def tiles_of(self, row: int) -> range:
        """Return the ids of a row's tiles.

        Args:
            row: a row of the step.

        Returns:
            Consecutive ids.
        """
        return range(self.tile_starts[row], self.tile_starts[row + 1])

    @cached_property
    def tile_bounds(self) -> torch.Tensor:
        """[num_rows + 1] int32 on the device: ``tile_starts``."""
        return to_device(self.tile_starts, torch.int32, self.device)

    @cached_property
    def tile_positions(self) -> torch.Tensor:
        """[num_tiles] int64 on the host: position of each tile's first query."""
        return torch.tensor([tile.position for tile in self.tile_list], dtype=torch.int64)

    def once(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """Return what the host works out of these rows once for all layers that ask under the same key.

        Args:
            key: hashable.
            make: works it out.

        Returns:
            What ``make`` returned the first time.
        """
        if key not in self._made:
            self._made[key] = make()
        made: Made = self._made[key]
        return made

    def block_capacities(self, block_tokens: int) -> list[int]:
        """Return per tile the blocks with a key that its last query may see.

        Args:
            block_tokens: keys of a block of the index.

        Returns:
            Blocks, by tile.
        """
        return self.once(
            ("block_capacities", block_tokens),
            lambda: [ceil_div(tile.last_position + 1, block_tokens) for tile in self.tile_list],
        )

    def masked_pairs(self, block_tokens: int) -> int:
        """Return (query, key) pairs of all tiles' diagonal blocks, of one head, that a causal mask forbids.

        Args:
            block_tokens: keys of a block of the index.

        Returns:
            Pairs.
        """
        return self.once(
            ("masked_pairs", block_tokens),
            lambda: sum(
                # The first query may see one key of its own block past the keys before it, each later one one more.
                tile.length_tokens * (ceil_div(tile.last_position + 1, block_tokens) * block_tokens - tile.position)
                - tile.length_tokens * (tile.length_tokens + 1) // 2
                for tile in self.tile_list
            ),
        )

    @cached_property
    def tiles(self) -> torch.Tensor:
        """[num_tiles, 4] int32 on the device: row, first token in q, number of queries, position of the first query."""
        flat = [v for t in self.tile_list for v in (t.row, t.token, t.length_tokens, t.position)]
        return to_device(flat, torch.int32, self.device).view(-1, TILE_FIELDS)

    @cached_property
    def tile_lengths(self) -> torch.Tensor:
        """[num_tiles] int32 on the device: number of queries, a column of ``tiles``.

        A copy even of one tile's, where the column is contiguous as it lies, since kernels are compiled anew for
        addresses that 16 bytes do not divide.
        """
        return self.tiles[:, 2].clone(memory_format=torch.contiguous_format)

    @cached_property
    def row_ends(self) -> torch.Tensor:
        """[num_rows] int32 on the device: ``seq_lens``."""
        return to_device(self.seq_lens, torch.int32, self.device)

    @cached_property
    def heaviest_order(self) -> tuple[int, ...]:
        """Tile ids by falling number of keys in reach, so that none straggles."""
        return tuple(sorted(range(self.num_tiles), key=lambda i: -self.tile_list[i].last_position))

    @cached_property
    def key_starts(self) -> tuple[int, ...]:
        """Per row where its keys begin when all rows' lie in one array, rounded up to 64 each; and at the end its
        length."""
        return (0, *accumulate(ceil_div(seq_len, KEY_ALIGN) * KEY_ALIGN for seq_len in self.seq_lens))

    @cached_property
    def row_table(self) -> torch.Tensor:
        """[num_rows + 1, 4] int32 on the device: first token in q, numbers of queries and keys, place of the first key
        by ``key_starts``; of the last row only the latter."""
        lengths = zip((*self.tokens, 0), (*self.query_lens, 0), (*self.seq_lens, 0), self.key_starts, strict=True)
        return to_device([v for row in lengths for v in row], torch.int32, self.device).view(-1, ROW_FIELDS)

    @cached_property
    def heaviest_first(self) -> torch.Tensor:
        """[num_tiles] int32 on the device: ``heaviest_order``."""
        return to_device(self.heaviest_order, torch.int32, self.device)
