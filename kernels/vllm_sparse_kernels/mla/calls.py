# SPDX-License-Identifier: Apache-2.0
"""What a call of MLA's prefill consists of: its rows, its method, and its tiles of queries on the device."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from vllm_sparse_kernels.compile_time import Constant
from vllm_sparse_kernels.methods.minference import AShape
from vllm_sparse_kernels.methods.top_p import TopP
from vllm_sparse_kernels.methods.top_p.choice import KEY_BLOCK
from vllm_sparse_kernels.rows import TILE_TOKENS, ceil_div, host_to_device

KEY_D, VALUE_D = Constant(192), Constant(128)
"""Channels of queries and keys, and of values: those of DeepSeek-V3, DeepSeek-R1 and Kimi-K2."""

BLOCK = Constant(64)
"""Keys of a block, which ``top_p`` keeps or drops. A row's blocks begin at its first key of the call."""

SINK = Constant(128)
"""Keys at the beginning of a request that ``top_p`` always keeps, in whole blocks."""

TILE_FIELDS = Constant(8)
"""Fields of a tile on the device, in the order of ``TileFields``."""

SET_FIELDS = Constant(2)
"""Fields of a set of tiles on the device: its first tile, and their number."""

MOST_ROWS = 16
"""Rows that are processed at a time."""

EVERYTHING = 1 << 30
FULL_WINDOW = AShape(0, EVERYTHING)
"""A window that reaches every key."""

MlaMethod = AShape | TopP
"""``top_p`` scores half of the queries by 128 channels. It reads its ``kept_mass`` and ``most_tokens``."""


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


class Tensors(NamedTuple):
    """Queries, keys, values and results, whose channels are contiguous.

    Triton specialises kernels by these strides, which follow from a model's layouts. The stride of ``lse`` changes with
    the number of tokens, so it is not a field.
    """

    q: Any  # [tokens, heads, KEY_D]
    k: Any  # [keys, heads, KEY_D]
    v: Any  # [keys, heads, VALUE_D]
    out: Any  # [tokens, heads, VALUE_D]
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
        return Tensors(q, k, v, out, lse, *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *out.stride()[:2])


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


@triton.jit
def load_fields(tiles, i_tile):
    """Load the ``TileFields`` of a tile."""
    fields = tiles + i_tile * TILE_FIELDS
    return TileFields(
        tl.load(fields), tl.load(fields + 1), tl.load(fields + 2), tl.load(fields + 3),
        tl.load(fields + 4), tl.load(fields + 5), tl.load(fields + 6), tl.load(fields + 7),
    )  # fmt: skip


class Part(NamedTuple):
    """Up to ``MOST_ROWS`` rows of a call, on the device."""

    tiles: torch.Tensor  # [num_tiles, TILE_FIELDS] int32
    rows: torch.Tensor  # [num_rows, 4] int32: first query, number of queries, first key, number of keys
    sets: torch.Tensor  # [num_sets, SET_FIELDS] int32, neighbouring tiles of a row whose queries are scored together
    width: int  # blocks in the longest reach
    most_queries: int  # of a row
    most_keys: int

    @staticmethod
    def of(rows: Sequence[MlaRow], set_tiles: int, device: torch.device) -> "Part":
        """Copy rows to the device, without waiting for it. The set with the longest reach comes first."""
        tile_sets = [tiles for row in rows for tiles in _tile_sets(row, set_tiles)]
        tile_sets.sort(key=_longest_reach, reverse=True)
        ends = accumulate(map(len, tile_sets))
        tables: tuple[list[tuple[int, ...]], ...] = (
            [tile for tiles in tile_sets for tile in tiles],
            [(row.query_start, row.num_queries, row.key_start, row.num_keys) for row in rows],
            [(end - len(tiles), len(tiles)) for tiles, end in zip(tile_sets, ends, strict=True)],
        )
        tiles, device_rows, sets = (host_to_device(torch.tensor(x, dtype=torch.int32), device) for x in tables)
        return Part(
            tiles, device_rows, sets, ceil_div(max(map(_longest_reach, tile_sets)), BLOCK.value),
            max(row.num_queries for row in rows), max(row.num_keys for row in rows),
        )  # fmt: skip


def _tile_sets(row: MlaRow, set_tiles: int) -> list[list[TileFields]]:
    """Return the sets of a row's tiles, from the last tile to the first."""
    tiles = [TileFields.of(row, offset) for offset in range(0, row.num_queries, TILE_TOKENS)][::-1]
    return [tiles[first : first + set_tiles] for first in range(0, len(tiles), set_tiles)]


def _longest_reach(tiles: Sequence[TileFields]) -> int:
    return max(tile.reach for tile in tiles)


@dataclass(frozen=True)
class MlaCall:
    """Attention of some rows' queries over a part of their keys. All layers of a step use the same object."""

    method: MlaMethod
    rows: tuple[MlaRow, ...]
    is_causal: bool
    """True for the rows' new tokens, False for a chunk of context."""
    parts: tuple[Part, ...]
    """The rows for kernels; empty where the reference runs."""

    @property
    def is_selected(self) -> bool:
        """Whether blocks are selected by their mass. With a ``kept_mass`` of 1, ``top_p`` keeps every key."""
        return isinstance(self.method, TopP) and self.method.kept_mass < 1

    @property
    def most_blocks(self) -> int:
        """Maximum number of a tile's blocks that the call keeps for their mass."""
        assert isinstance(self.method, TopP)
        return ceil_div(self.method.most_blocks * KEY_BLOCK.value, BLOCK.value)

    @property
    def window(self) -> AShape:
        """The sinks and the window that queries keep if nothing is selected, within the range of int32."""
        if isinstance(self.method, TopP):
            return FULL_WINDOW
        return AShape(min(self.method.sink_tokens, EVERYTHING), min(self.method.local_tokens, EVERYTHING))

    @cached_property
    def window_pairs(self) -> int:
        """Number of pairs of a query and a key, of one head, within the window."""
        return self._pairs(self.window)

    @cached_property
    def causal_pairs(self) -> int:
        """Number of pairs of a query and a key, of one head, in dense attention."""
        return self._pairs(FULL_WINDOW)

    def _pairs(self, window: AShape) -> int:
        total = 0
        for row in self.rows:
            queries = row.query_position + torch.arange(row.num_queries)
            end = torch.clamp(queries + 1, max=row.key_position + row.num_keys)  # of keys up to the query
            sink_end = end.clamp(max=max(window.sink_tokens, row.key_position))
            local_start = torch.maximum(queries + 1 - window.local_tokens, sink_end)
            total += int((sink_end - row.key_position).clamp(min=0).sum() + (end - local_start).clamp(min=0).sum())
        return total
