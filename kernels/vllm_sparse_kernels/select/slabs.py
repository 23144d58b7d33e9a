# SPDX-License-Identifier: Apache-2.0
"""What is rounded, measured and chosen from together: rows whose keys fit a buffer, and of these tiles whose scores do.

Rows are never cut and tiles never looked at in part, so what a tile keeps does not depend on what runs beside it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from vllm_sparse_kernels.rows import Rows, ceil_div, to_device

STEP_TOKENS = 128
"""Keys of a row are rounded in whole steps."""

SLAB_TOKENS = 1 << 17
"""Keys that are rounded at a time, unless one row has more: with 8 kv heads 67 MB of 64 channels for top_p, and 160 MB
of 128 channels for SALE with 32 heads."""

SCRATCH_BYTES = 288 << 20
"""What the scores of some tiles take, unless one tile needs more: with 32 heads 64 tiles after 24,576 tokens, or 16
after 122,880. A launch of less leaves a card waiting at its end."""

PAIR_FIELDS = 3


class Run(NamedTuple):
    """Tiles [first_tile, end_tile) of a slab, which are measured by one launch."""

    first_tile: int
    end_tile: int
    reach: int  # keys that the furthest of them may see
    pairs: torch.Tensor  # [num_pairs, PAIR_FIELDS] int32: for each two tiles of a row ``pairs_of``

    @property
    def num_tiles(self) -> int:
        """Tiles of the run."""
        return self.end_tile - self.first_tile


class Slab(NamedTuple):
    """Rows whose keys are rounded together."""

    first_row: int
    key_starts: torch.Tensor  # [rows of the slab] int32, where a row's keys begin in the buffer: multiples of 128
    num_keys: int  # of the buffer
    longest: int  # keys of the longest row
    runs: list[Run]


def slabs_of(rows: Rows, num_selected: int, scratch_bytes: Callable[[int, int], int]) -> list[Slab]:
    """Return the slabs of a step, the same for all layers of a pass that select as many heads.

    Args:
        rows: the rows of a step.
        num_selected: query heads that are selected.
        scratch_bytes: what a tile takes, by the heads and by the keys that it may see.

    Returns:
        Slabs in the order of their rows.
    """
    return rows.once(
        (slabs_of, num_selected, scratch_bytes),
        lambda: [_slab(rows, *of_slab, num_selected, scratch_bytes) for of_slab in rows_of_slabs(rows)],
    )


def rows_of_slabs(rows: Rows) -> Iterator[tuple[int, int]]:
    """Return the rows of each slab of rounded keys.

    Args:
        rows: the rows of a step.

    Returns:
        First row and behind the last one.
    """
    return rows_within(list(map(padded, rows.seq_lens)), SLAB_TOKENS)


def rows_within(sizes: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """Return rows that are taken together: as many as ``most`` holds, at least 1.

    Args:
        sizes: what each row takes.
        most: what all of a slab may take.

    Returns:
        First row and behind the last one.
    """
    first = taken = 0
    for row, size in enumerate(sizes):
        if row > first and taken + size > most:
            yield first, row
            first, taken = row, 0
        taken += size
    yield first, len(sizes)


def padded(seq_len: int) -> int:
    """Return keys of a row in whole steps of 128.

    Args:
        seq_len: the row's keys.

    Returns:
        A multiple of 128.
    """
    return ceil_div(seq_len, STEP_TOKENS) * STEP_TOKENS


def tiles_of_runs(
    rows: Rows, first_tile: int, end_tile: int, num_selected: int, scratch_bytes: Callable[[int, int], int]
) -> Iterator[tuple[int, int, int]]:
    """Return runs of tiles: as many as fit ``SCRATCH_BYTES`` if all reach as far.

    Args:
        rows: the rows of a step.
        first_tile: the first tile.
        end_tile: behind the last one.
        num_selected: query heads that are selected.
        scratch_bytes: what a tile takes, by the heads and by the keys that it may see.

    Returns:
        (first tile, behind the last one, keys that the furthest may see).
    """
    reach = max(tile.last_position for tile in rows.tile_list[first_tile:end_tile]) + 1
    fit = max(SCRATCH_BYTES // scratch_bytes(num_selected, reach), 1)
    num_tiles = end_tile - first_tile
    run_tiles = ceil_div(ceil_div(num_tiles, ceil_div(num_tiles, fit)), 2) * 2
    run_tiles = run_tiles if run_tiles <= fit else max(fit // 2 * 2, 1)
    for first in range(first_tile, end_tile, run_tiles):
        yield first, min(first + run_tiles, end_tile), reach


def pairs_of(rows: Rows, first_tile: int, end_tile: int, key_starts: Mapping[int, int]) -> list[int]:
    """Pair the tiles of each row.

    Args:
        rows: the rows of a step.
        first_tile: the first tile of the run.
        end_tile: behind the last tile of the run.
        key_starts: where each row's keys begin in the slab.

    Returns:
        For each two tiles: first tile, tiles, and where the row's keys begin in the slab; flat.
    """
    flat: list[int] = []
    for row, start in key_starts.items():
        end = min(end_tile, rows.tile_starts[row + 1])
        for tile in range(max(first_tile, rows.tile_starts[row]), end, 2):
            flat += [tile, min(2, end - tile), start]
    return flat


def _slab(
    rows: Rows, first_row: int, end_row: int, num_selected: int, scratch_bytes: Callable[[int, int], int]
) -> Slab:
    seq_lens = rows.seq_lens[first_row:end_row]
    *starts, num_keys = accumulate(map(padded, seq_lens), initial=0)
    tiles = rows.tile_starts[first_row], rows.tile_starts[end_row]
    runs = []
    for first, end, reach in tiles_of_runs(rows, *tiles, num_selected, scratch_bytes):
        flat = pairs_of(rows, first, end, dict(enumerate(starts, first_row)))
        runs.append(Run(first, end, reach, to_device(flat, torch.int32, rows.device).view(-1, PAIR_FIELDS)))
    return Slab(first_row, to_device(starts, torch.int32, rows.device), num_keys, max(seq_lens), runs)
