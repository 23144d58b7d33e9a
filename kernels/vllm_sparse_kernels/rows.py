# SPDX-License-Identifier: Apache-2.0
"""``Rows``: the rows of a step that run sparse, and their tiles of 128 queries.

The host knows all of this before the step starts, so no size ever has to be read back from the device.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any, TypeVar

import torch

from vllm_sparse_kernels.compile_time import Constant

TILE_TOKENS = 128
"""Queries of a tile. Tiles of 64 queries are about half as fast on Hopper, because keys are read twice as often."""

TILE = Constant(TILE_TOKENS)
"""``TILE_TOKENS`` in kernels."""

TILE_FIELDS = Constant(4)
"""Columns of ``Rows.tiles``: row, first token in q, number of queries, position of the first query."""

ROW_FIELDS = Constant(4)
"""Columns of ``Rows.row_table``: first token in q, number of queries, number of keys, place of the first key."""

KEY_ALIGN = Constant(64)
"""Alignment of a row's keys in ``Rows.key_starts``, in tokens."""

T = TypeVar("T")


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def round_up(a: int, multiple: int) -> int:
    return ceil_div(a, multiple) * multiple


def split_blocks(x: torch.Tensor, size: int) -> torch.Tensor:
    """Split the first axis into blocks, of which the last is filled up with zeros: [blocks, size, ...]."""
    padding = x.new_zeros(-len(x) % size, *x.shape[1:])
    return torch.cat((x, padding)).unflatten(0, (-1, size))


def to_device(
    values: Sequence[float] | Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Copy numbers, or rows of numbers, to a tensor on the device, without synchronising with it."""
    return host_to_device(torch.tensor(values, dtype=dtype), device)


def host_to_device(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor from the host to the device, without synchronising with it."""
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


@dataclass(frozen=True)
class Tile:
    """Up to 128 consecutive queries of one row. Tiles are counted from the row's first query of this step."""

    row: int
    token: int
    length_tokens: int
    position: int

    @property
    def last_position(self) -> int:
        """Position of the last query in the row's sequence."""
        return self.position + self.length_tokens - 1


@dataclass(frozen=True)
class Rows:
    """The sparse rows of one forward pass.

    All layers of a pass get the same object, and the next pass gets a new object, even if the lengths are equal
    (``dataclasses.replace(rows)`` copies them, with an empty ``state``). A pass with too many rows for its memory is
    split into several objects, each of which runs through all layers with its own state.

    Attributes:
        query_starts: Per row, the index of its first query in q.
        query_lens: Per row, its new tokens, at least 1.
        context_lens: Per row, its cached tokens.
        block_table: [num_rows, max_pages] int32 on the device. Page p of row i holds the keys at positions
            [p · page_size, (p + 1) · page_size).
        state: Values that a method keeps from layer to layer of this pass, under its own key.
    """

    query_starts: tuple[int, ...]
    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    block_table: torch.Tensor
    state: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    _computed: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        lengths = {len(self.query_starts), len(self.query_lens), len(self.context_lens), self.block_table.shape[0]}
        if len(lengths) != 1:
            raise ValueError(
                f"Rows: given query_starts, query_lens, context_lens and block_table with {sorted(lengths)} rows, "
                "expected the same number of rows in each"
            )
        if min(self.query_lens, default=1) < 1 or min(self.context_lens, default=0) < 0:
            raise ValueError(
                f"Rows: given query_lens {self.query_lens} and context_lens {self.context_lens}, expected query_lens "
                ">= 1 and context_lens >= 0"
            )

    @property
    def num_rows(self) -> int:
        return len(self.query_starts)

    @property
    def device(self) -> torch.device:
        return self.block_table.device

    def to_device(
        self, values: Sequence[int] | Sequence[tuple[int, ...]], dtype: torch.dtype = torch.int32
    ) -> torch.Tensor:
        """Copy numbers, or rows of numbers, to the rows' device, without synchronising with it."""
        return to_device(values, dtype, self.device)

    @cached_property
    def end_token(self) -> int:
        """Index in q after the last query of all rows."""
        return max((start + query_len for start, query_len in zip(self.query_starts, self.query_lens)), default=0)

    def check_tokens(self, name: str, x: torch.Tensor) -> None:
        """Check that kernels can read or write the tokens of all rows in ``x`` [num_tokens, num_heads, head_dim].

        Raises ValueError with ``name`` if tokens are missing, or if the elements of a head are not contiguous.
        """
        if len(x) < self.end_token or x.stride(2) != 1:
            raise ValueError(
                f"{name}: given shape {tuple(x.shape)} with strides {x.stride()}, expected [tokens, heads, "
                f"head_dim] with at least {self.end_token} tokens, where the last row ends, and stride 1 along head_dim"
            )

    @cached_property
    def seq_lens(self) -> tuple[int, ...]:
        """Per row, its cached and new tokens together."""
        return tuple(c + q for c, q in zip(self.context_lens, self.query_lens, strict=True))

    @cached_property
    def tile_list(self) -> tuple[Tile, ...]:
        """All tiles on the host, row after row."""
        return tuple(
            Tile(
                row=row,
                token=self.query_starts[row] + start,
                length_tokens=min(TILE_TOKENS, self.query_lens[row] - start),
                position=context_len + start,
            )
            for row, context_len in enumerate(self.context_lens)
            for start in range(0, self.query_lens[row], TILE_TOKENS)
        )

    @property
    def num_tiles(self) -> int:
        """Number of tiles of all rows."""
        return len(self.tile_list)

    @cached_property
    def tile_starts(self) -> tuple[int, ...]:
        """[num_rows + 1] number of each row's first tile. The last entry is the number of all tiles."""
        return (0, *accumulate(ceil_div(query_len, TILE_TOKENS) for query_len in self.query_lens))

    def tiles_of(self, row: int) -> range:
        """Return the numbers of a row's tiles."""
        return range(self.tile_starts[row], self.tile_starts[row + 1])

    @cached_property
    def device_tile_starts(self) -> torch.Tensor:
        """[num_rows + 1] int32 on the device: ``tile_starts``."""
        return self.to_device(self.tile_starts)

    def once(self, make: Callable[..., T], *arguments: Hashable) -> T:
        """Return ``make(rows, *arguments)``, which the first call computes for all layers of the pass.

        ``make`` must be a function of a module or class: a new lambda would be computed at every call.
        """
        key = (make, *arguments)
        if key not in self._computed:
            self._computed[key] = make(self, *arguments)
        return self._computed[key]

    @cached_property
    def tiles(self) -> torch.Tensor:
        """[num_tiles, 4] int32 on the device: row, first token in q, number of queries, position of the first query."""
        fields = [(tile.row, tile.token, tile.length_tokens, tile.position) for tile in self.tile_list]
        return self.to_device(fields)

    @cached_property
    def tile_lengths(self) -> torch.Tensor:
        """[num_tiles] int32 on the device: number of queries, a column of ``tiles``."""
        return self.tiles[:, 2]

    @cached_property
    def device_seq_lens(self) -> torch.Tensor:
        """[num_rows] int32 on the device: ``seq_lens``."""
        return self.to_device(self.seq_lens)

    @cached_property
    def tile_order(self) -> tuple[int, ...]:
        """Numbers of tiles in descending order of keys in reach: long tiles start first, so that none finishes late."""
        return tuple(sorted(range(self.num_tiles), key=lambda i: -self.tile_list[i].last_position))

    @cached_property
    def device_tile_order(self) -> torch.Tensor:
        """[num_tiles] int32 on the device: ``tile_order``."""
        return self.to_device(self.tile_order)

    @cached_property
    def key_starts(self) -> tuple[int, ...]:
        """[num_rows + 1] offset of each row's keys, in tokens, if all rows' keys are stored in one array.

        A row's length is rounded up to a multiple of 64. The last entry is the array's length.
        """
        return (0, *accumulate(round_up(seq_len, KEY_ALIGN.value) for seq_len in self.seq_lens))

    @cached_property
    def row_table(self) -> torch.Tensor:
        """[num_rows + 1, 4] int32 on the device: first token in q, number of queries, number of keys, ``key_starts``.

        The last row is 0 in all columns but the last.
        """
        fields = zip((*self.query_starts, 0), (*self.query_lens, 0), (*self.seq_lens, 0), self.key_starts, strict=True)
        return self.to_device([*fields])
