# SPDX-License-Identifier: Apache-2.0
"""Slabs and runs. A slab has rows whose keys are rounded together; a run has tiles that one launch scores.

Slabs never split the keys of a row, and runs never split the scores of a tile. The division of a row's tiles into runs
depends only on that row. Therefore the selection of a tile does not depend on other rows of the step.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from vllm_sparse_kernels.compile_time import Constant
from vllm_sparse_kernels.rows import Rows, ceil_div, round_up

STEP_TOKENS = Constant(128)
"""Keys of a row are rounded in whole steps."""

SLAB_TOKENS = 1 << 17
"""Number of keys that are rounded at a time, unless a single row has more. With 8 kv heads they take 67 MB for top_p
(64 channels), and 160 MB for SALE (128 channels, 32 heads)."""

SLAB_BYTES = 128 << 20
"""Maximum bytes of a slab's sums and kept lines (``lines``), of its pooled keys, and of the products of a run
(``pooled``), unless a single row or tile needs more."""

RUN_BYTES = 272 << 20
"""Bytes of one launch's tiles, unless a single tile needs more. For top_p with 32 heads on Hopper, these are 64 tiles
at 32,768 tokens, or 16 at 131,072. Smaller launches leave a card idle at their end."""

SET_FIELDS = Constant(3)
"""Numbers of a tile set: first tile, tiles, and where the row's keys begin in the slab."""


TileBytes = Callable[[int, int], int]
"""(number of selected heads, keys in the tile's causal reach) → bytes of one tile while its run is processed."""


class Run(NamedTuple):
    """Tiles [first_tile, end_tile) of a slab, measured by one launch."""

    first_tile: int
    end_tile: int
    reach: int  # keys in the longest causal reach of these tiles
    tile_sets: Any = None  # [num_sets, SET_FIELDS] int32: ``_tile_sets``

    @property
    def num_tiles(self) -> int:
        return self.end_tile - self.first_tile


class KeySlab(NamedTuple):
    """Rows whose keys are rounded together."""

    first_row: int
    key_starts: torch.Tensor  # [rows of the slab] int32, where a row's keys begin in the buffer: multiples of 128
    num_keys: int  # of the buffer, which all slabs of the step share
    longest: int  # keys of the longest row
    run_bytes: int  # memory for a run of these rows, or of fewer tiles or keys
    runs: list[Run]


def slabs_of(rows: Rows, num_selected: int, tile_bytes: TileBytes, set_tiles: int = 2) -> list[KeySlab]:
    """Return the slabs of a step."""
    return [
        _slab(rows, *row_range, num_selected, tile_bytes, set_tiles)
        for row_range in rows_within(list(map(padded, rows.seq_lens)), SLAB_TOKENS)
    ]


def rows_within(sizes: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """Divide rows into slabs of at most ``most``, with at least one row each."""
    first = taken = 0
    for row, size in enumerate(sizes):
        if row > first and taken + size > most:
            yield first, row
            first, taken = row, 0
        taken += size
    yield first, len(sizes)


def most_at_once(sizes: Sequence[int], most: int) -> int:
    """Return a bound of the largest part that ``rows_within`` makes, which never falls as sizes grow or are added."""
    return min(sum(sizes), max(most, *sizes))


def padded(seq_len: int) -> int:
    """Return the number of keys of a row, in whole steps of 128."""
    return round_up(seq_len, STEP_TOKENS.value)


def _runs(rows: Rows, first_row: int, end_row: int, num_selected: int, tile_bytes: TileBytes) -> list[Run]:
    """Divide the tiles of some rows into runs.

    Each row is cut separately, so other rows never change where it is cut. A run joins pieces of neighbouring rows, at
    most one of each, as long as all of their tiles fit at the longest reach among them.
    """
    runs: list[Run] = []
    for row in range(first_row, end_row):
        for i, piece in enumerate(_pieces(rows, row, num_selected, tile_bytes)):
            if i == 0 and runs:
                joined = Run(runs[-1].first_tile, piece.end_tile, max(runs[-1].reach, piece.reach))
                if joined.num_tiles * tile_bytes(num_selected, joined.reach) <= RUN_BYTES:
                    runs[-1] = joined
                    continue
            runs.append(piece)
    return runs


def _pieces(rows: Rows, row: int, num_selected: int, tile_bytes: TileBytes) -> list[Run]:
    """Divide a row's tiles into the fewest pieces that ``RUN_BYTES`` allows, of about equal size."""
    tiles, reach = rows.tiles_of(row), rows.seq_lens[row]
    # A piece has an even number of tiles, except for a row's last piece, or if only a single tile fits.
    fit = max(RUN_BYTES // tile_bytes(num_selected, reach), 1)
    size = round_up(ceil_div(len(tiles), ceil_div(len(tiles), fit)), 2)
    if size > fit:
        size = max(fit // 2 * 2, 1)
    return [Run(first, min(first + size, tiles.stop), reach) for first in tiles[::size]]


def _tile_sets(
    rows: Rows, first_tile: int, end_tile: int, key_starts: tuple[tuple[int, int], ...], set_tiles: int
) -> torch.Tensor:
    """Divide tiles into sets of neighbours of a row that one program scores; ``key_starts`` has (row, first key)."""
    sets: list[tuple[int, int, int]] = []
    for row, start in key_starts:
        end = min(end_tile, rows.tile_starts[row + 1])
        for tile in range(max(first_tile, rows.tile_starts[row]), end, set_tiles):
            sets.append((tile, min(set_tiles, end - tile), start))
    return rows.to_device(sets)


def _slab(
    rows: Rows, first_row: int, end_row: int, num_selected: int, tile_bytes: TileBytes, set_tiles: int
) -> KeySlab:
    seq_lens = rows.seq_lens[first_row:end_row]
    starts = (*accumulate(map(padded, seq_lens[:-1]), initial=0),)
    key_starts = tuple(enumerate(starts, first_row))
    # Tables are made once for all layers, whose numbers of selected heads differ.
    runs = [
        run._replace(tile_sets=rows.once(_tile_sets, run.first_tile, run.end_tile, key_starts, set_tiles))
        for run in _runs(rows, first_row, end_row, num_selected, tile_bytes)
    ]
    num_tiles, longest = rows.tile_starts[end_row] - rows.tile_starts[first_row], max(seq_lens)
    return KeySlab(
        first_row,
        rows.once(Rows.to_device, starts),
        most_at_once([*map(padded, rows.seq_lens)], SLAB_TOKENS),
        longest,
        most_at_once([tile_bytes(num_selected, longest)] * num_tiles, RUN_BYTES),
        runs,
    )
