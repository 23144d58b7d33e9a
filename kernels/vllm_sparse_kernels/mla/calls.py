# SPDX-License-Identifier: Apache-2.0
"""What a call of MLA's prefill consists of: its rows, its method, and its tiles of queries on the device."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any, Literal, NamedTuple, get_args

import torch

from vllm_sparse_kernels.compile_time import Constant
from vllm_sparse_kernels.methods.top_p.scored import ALL_SCORED, HALF_SCORED
from vllm_sparse_kernels.rows import TILE_TOKENS, ceil_div, host_to_device

BLOCK_TOKENS = 64
"""Keys of a block, which ``top_p`` keeps or drops. A row's blocks begin at its first key of the call."""

SINK_TOKENS = 128
"""Keys at the beginning of a request that ``top_p`` always keeps, in whole blocks."""

CHANNELS = (64, 128, 192)
"""Numbers of channels that estimates of ``top_p`` may multiply."""

QUERIES = Literal["half", "all"]
"""Queries of a tile that ``top_p`` scores."""

EVERYTHING = 1 << 30
"""A window of the A-shape that reaches every key."""

ROW_FIELDS = Constant(4)
"""Fields of a row on the device: first query, number of queries, first key, number of keys."""

TILE_FIELDS = Constant(8)
"""Fields of a tile on the device, in the order of ``TileFields``."""

SET_TILES = Constant(4)
"""Most tiles of a set. Half of their queries are 256 rows of a matrix product."""

SET_FIELDS = Constant(2)
"""Fields of a set of tiles on the device, in the order of ``TileSet``."""


class MlaRow(NamedTuple):
    """A request's part of a call. All fields are host integers; positions count from the request's first token."""

    query_start: int
    """Index of the row's first query in q, out and lse."""
    num_queries: int
    query_position: int
    """Position of the first query in its request."""
    state_start: int
    """Index of the row's first query among the step's new tokens, where its running sums are."""
    key_start: int
    """Index of the row's first key in k and v."""
    num_keys: int
    key_position: int
    """Position of the first key in its request."""


class MlaAShape(NamedTuple):
    """MInference's A-shape: a query at position i keeps keys [0, sink_tokens) and (i - local_tokens, i]."""

    sink_tokens: int
    local_tokens: int

    @property
    def num_scored(self) -> int:
        """Queries of a whole tile that are scored: none."""
        return 0


class MlaTopP(NamedTuple):
    """Blocks that hold the share ``kept_mass`` of a tile's estimated attention, by running sums over the chunks."""

    kept_mass: float
    """p, in (0, 1]. 1 keeps every key, and nothing is estimated."""
    most_share: float = 1.0
    """Largest share, in (0, 1], of a tile's blocks of a call that are kept for their mass, rounded up to whole blocks.

    Where it limits a call, the tile drops more than its budget of 1 - p. Later calls then have no budget until the
    running sum has grown enough, but the limit applies to them too. So with a ``most_share`` below 1, p is not
    guaranteed: a tile keeps either the mass that p asks for or, in each call, this share of its blocks.
    """
    channels: int = 192
    """Channels that estimates multiply: 192, or the 128 or 64 that affect the scores of a row and head most."""
    queries: QUERIES = "all"
    """Queries of a tile that are scored: ``all``, or with ``half`` the second of each two neighbours
    (``methods.top_p.scored``). The kept blocks are for all queries of the tile. Estimates, running sums and p are those
    of scored queries."""

    @property
    def num_scored(self) -> int:
        """Queries of a whole tile that are scored, 128 or 64."""
        return ALL_SCORED if self.queries == "all" else HALF_SCORED


MlaMethod = MlaAShape | MlaTopP


def method_problem(method: MlaMethod) -> str | None:
    """Check a method's parameters."""
    if isinstance(method, MlaAShape):
        if method.sink_tokens < 0 or method.local_tokens < 1:
            return f"given {method}, expected sink_tokens of at least 0 and local_tokens of at least 1"
        return None
    for name in ("kept_mass", "most_share"):
        if not 0 < getattr(method, name) <= 1:
            return f"given {method}, expected a {name} above 0 and at most 1"
    if method.channels not in CHANNELS:
        return f"given {method}, expected channels of {', '.join(map(str, CHANNELS))}"
    if method.queries not in get_args(QUERIES):
        return f"given {method}, expected queries of {' or '.join(get_args(QUERIES))}"
    return None


class MlaLimits(NamedTuple):
    """Largest sizes of a step, for which memory is allocated."""

    query_tokens: int
    """New tokens of a step."""
    key_tokens: int
    """Keys of a call."""
    num_scored: int = ALL_SCORED
    """Queries of a whole tile that the method scores, its ``num_scored``: 128; 64, so that more heads are selected at a
    time; or 0, so that no memory is allocated for the selection of ``top_p``."""


class Tensors(NamedTuple):
    """Queries, keys, values and results, whose channels are contiguous.

    Triton specialises kernels by these strides, which follow from a model's layouts. The stride of ``lse`` changes with
    the number of tokens, so it is not a field.
    """

    q: Any  # [tokens, heads, qk_head_dim]
    k: Any  # [keys, heads, qk_head_dim]
    v: Any  # [keys, heads, v_head_dim]
    out: Any  # [tokens, heads, v_head_dim]
    lse: Any  # [heads, tokens] float32
    stride_q_token: int
    stride_q_head: int
    stride_k_token: int
    stride_k_head: int
    stride_v_token: int
    stride_v_head: int
    stride_out_token: int
    stride_out_head: int

    @staticmethod
    def of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> "Tensors":
        """Collect tensors and their strides."""
        return Tensors(
            q, k, v, out, lse,
            q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1), out.stride(0), out.stride(1),
        )  # fmt: skip


class TileFields(NamedTuple):
    """A tile of queries: at most 128 neighbouring queries of a row, and the row's keys in the call."""

    query: int  # index of its first query in q, out and lse
    length: int
    offset: int  # queries of the row before the tile
    position: int  # of the first query in its request
    state: int  # index of its first query among the step's new tokens
    key_start: int
    num_keys: int
    key_position: int

    @staticmethod
    def of(row: MlaRow, offset: int) -> "TileFields":
        """Return the tile that begins after ``offset`` queries of a row."""
        return TileFields(
            row.query_start + offset, min(TILE_TOKENS, row.num_queries - offset), offset, row.query_position + offset,
            row.state_start + offset, row.key_start, row.num_keys, row.key_position,
        )  # fmt: skip

    @property
    def reach(self) -> int:
        """Number of the row's keys that the last query of the tile may attend to."""
        return min(self.num_keys, self.position + self.length - self.key_position)


class TileSet(NamedTuple):
    """Up to ``SET_TILES`` neighbouring tiles of a row, the last one first: their queries are scored together."""

    first_tile: int  # number among the tiles of the call
    num_tiles: int


class Run(NamedTuple):
    """Tiles that are selected and attended to at a time, in whole sets."""

    tiles: torch.Tensor  # [num_tiles, 8] int32
    num_tiles: int
    width: int  # blocks in the longest reach
    sets: torch.Tensor  # [num_sets, 2] int32
    num_sets: int
    first_tile: int  # number of the first tile among the tiles of the call


@dataclass(frozen=True)
class Call:
    """The rows of a call, on the device."""

    rows: torch.Tensor
    tiles: torch.Tensor
    sets: torch.Tensor
    set_reaches: tuple[int, ...]
    set_ends: tuple[int, ...]
    state_ranges: tuple[tuple[int, int], ...]
    longest_queries: int
    longest_keys: int

    @staticmethod
    def of(rows: Sequence[MlaRow], device: torch.device) -> "Call":
        """Copy rows to the device, without waiting for it."""
        tile_sets = sorted((tiles for row in rows for tiles in _tile_sets(row)), key=lambda tiles: -tiles[0].reach)
        set_ends = tuple(accumulate(len(tiles) for tiles in tile_sets))
        tiles = [tile for tiles in tile_sets for tile in tiles]
        sets = [TileSet(end - len(tiles), len(tiles)) for tiles, end in zip(tile_sets, set_ends, strict=True)]
        fields = [(row.query_start, row.num_queries, row.key_start, row.num_keys) for row in rows]
        numbers = torch.tensor([number for group in (*tiles, *fields, *sets) for number in group], dtype=torch.int32)
        sizes = (len(tiles) * TILE_FIELDS.value, len(fields) * ROW_FIELDS.value, len(sets) * SET_FIELDS.value)
        tiles_on_device, rows_on_device, sets_on_device = host_to_device(numbers, device).split(sizes)
        return Call(
            rows_on_device.view(-1, ROW_FIELDS.value),
            tiles_on_device.view(-1, TILE_FIELDS.value),
            sets_on_device.view(-1, SET_FIELDS.value),
            tuple(tiles[0].reach for tiles in tile_sets),
            set_ends,
            _state_ranges(rows),
            max(row.num_queries for row in rows),
            max(row.num_keys for row in rows),
        )

    def runs(self, most_tiles: int, most_blocks: int) -> list[Run]:
        """Divide the tiles into runs that fit the scratch memory."""
        runs: list[Run] = []
        first_set, first_tile = 0, 0
        while first_set < len(self.set_ends):
            width = self._width(first_set)
            last_tile = first_tile + min(most_tiles, most_blocks // width)
            end_set = max(bisect_right(self.set_ends, last_tile), first_set + 1)
            runs.append(self._run(first_set, end_set, first_tile, width))
            first_set, first_tile = end_set, self.set_ends[end_set - 1]
        return runs

    def whole(self) -> Run:
        """Return all tiles as a single run, for methods that need no scratch memory."""
        return self._run(0, len(self.set_ends), 0, self._width(0))

    def _width(self, i_set: int) -> int:
        return max(ceil_div(self.set_reaches[i_set], BLOCK_TOKENS), 1)

    def _run(self, first_set: int, end_set: int, first_tile: int, width: int) -> Run:
        end_tile = self.set_ends[end_set - 1]
        return Run(
            self.tiles[first_tile:end_tile], end_tile - first_tile, width,
            self.sets[first_set:end_set], end_set - first_set, first_tile,
        )  # fmt: skip


def _tile_sets(row: MlaRow) -> list[list[TileFields]]:
    """Return the sets of a row's tiles. A set's first tile has its longest reach."""
    tiles = [TileFields.of(row, offset) for offset in range(0, row.num_queries, TILE_TOKENS)][::-1]
    return [tiles[first : first + SET_TILES.value] for first in range(0, len(tiles), SET_TILES.value)]


def _state_ranges(rows: Sequence[MlaRow]) -> tuple[tuple[int, int], ...]:
    ranges: list[tuple[int, int]] = []
    for row in sorted(rows, key=lambda row: row.state_start):
        if ranges and sum(ranges[-1]) == row.state_start:
            start, length = ranges.pop()
            ranges.append((start, length + row.num_queries))
        else:
            ranges.append((row.state_start, row.num_queries))
    return tuple(ranges)


@lru_cache(maxsize=256)
def kept_pairs_of_a_shape(rows: tuple[MlaRow, ...], method: MlaAShape) -> int:
    """Count the pairs of a query and a key that the A-shape keeps in a call.

    Results are cached, because all layers of a step make the same calls.
    """
    total = 0
    for row in rows:
        queries = row.query_position + torch.arange(row.num_queries)
        end = torch.clamp(queries + 1, max=row.key_position + row.num_keys)  # of keys up to the query
        sink_end = end.clamp(max=max(method.sink_tokens, row.key_position))
        local_start = torch.maximum(queries + 1 - method.local_tokens, sink_end)
        total += int((sink_end - row.key_position).clamp(min=0).sum() + (end - local_start).clamp(min=0).sum())
    return total
