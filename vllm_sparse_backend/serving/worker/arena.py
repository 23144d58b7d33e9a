# SPDX-License-Identifier: Apache-2.0
"""The memory of selection and attention: one arena per worker, which its layers use one after the other.

The arena is sized and allocated in vLLM's profile run, so that vLLM counts it before it sizes the KV cache. Its size is
what the layers allocate (``count_bytes``) for the largest steps that the scheduler can form. It holds any row, and
several rows if half a GiB is enough for them. Steps with more rows run in several slabs, and each slab selects and
attends separately. If the device is too small for a row, the row is cut into chunks, as the scheduler would do with a
smaller token budget. The parts of a row do not depend on other rows.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from vllm.config import VllmConfig

from vllm_sparse_backend.config.crossover_table import Lengths
from vllm_sparse_backend.config.request_levels import SERVER_LEVEL, RequestLevel
from vllm_sparse_backend.identity import logger
from vllm_sparse_backend.serving import compat
from vllm_sparse_backend.serving.worker.rows import BatchRow, Slab
from vllm_sparse_kernels import TILE_TOKENS, Rows, Workspace
from vllm_sparse_kernels.layer import Layer
from vllm_sparse_kernels.memory import META, count_bytes
from vllm_sparse_kernels.rows import ceil_div

MOST_KEYS = 2**31 - 2**20
"""Keys of all rows of a slab: kernels count them in 32 bits, with up to 63 more for each row."""

SEVERAL_ROWS_BYTES = 512 << 20
"""Size in bytes to which the arena grows for slabs of several rows, if the longest row needs less."""

SEVERAL_ROWS_SHARE = 1.03
"""Share of the longest row's memory to which the arena grows for slabs of several rows, if that is more."""

SLACK = 1.01
"""Factor on the arena's size. A row that is shorter by a tile may need slightly more than the longest row, because
methods distribute room for stripes among tiles."""

GROUP_TOKENS = 16 * TILE_TOKENS
"""Tokens of a group of tiles, which AnchorAttention divides by position: a row that begins before one has one more."""

DEVICE_SHARE = 1 / 16
"""Maximum size of the arena, as a share of the device's memory, unless a single tile needs more."""


class Arena(Workspace):
    """A workspace that uses torch to allocate tensors that do not fit, and logs the first of them."""

    overflows = 0

    def _create(self, begin: int, dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[int, torch.Tensor]:
        """Create a tensor in the arena, or outside it if it does not fit: a full arena must not stop a server."""
        try:
            return super()._create(begin, dtype, shape)
        except MemoryError as error:
            if self.overflows == 0:
                logger.warning(
                    "sparse-prefill: a tensor did not fit into the arena and was allocated outside it (%s); please "
                    "report this with the plan that the log shows at start-up (logged once)", error,
                )  # fmt: skip
            self.overflows += 1
            return begin, torch.empty(shape, dtype=dtype, device=self.device)


@dataclass(frozen=True)
class SparseRow:
    """A sparse row, or a part of a sparse row."""

    number: int
    token: int
    query_len: int
    context_len: int

    @staticmethod
    def sparse_of(row: BatchRow, number: int) -> "SparseRow":
        """Return the part of a batch's row that does not run on the dense backend."""
        num_dense = row.dense_end - row.token
        return SparseRow(number, row.dense_end, row.query_len - num_dense, row.context_len + num_dense)

    def chunks(self, query_tokens: int) -> list["SparseRow"]:
        """Cut the row into chunks."""
        return [
            SparseRow(self.number, self.token + i, min(query_tokens, self.query_len - i), self.context_len + i)
            for i in range(0, self.query_len, query_tokens)
        ]


class Extent(NamedTuple):
    """Size of a row, or of all rows of a slab."""

    num_tiles: int
    num_keys: int


@dataclass(frozen=True)
class Room:
    """How rows are divided into slabs, which the arena holds one at a time."""

    max_tokens: int
    """Queries of a slab. Longer rows are cut."""
    limits: tuple[Extent, ...]
    """Slabs of several rows are within at least one of these."""

    def slabs(
        self, rows: Sequence[SparseRow], block_table: torch.Tensor, level: RequestLevel = SERVER_LEVEL
    ) -> tuple[Slab, ...]:
        """Divide rows into as few slabs as possible. A row's chunks do not depend on other rows."""
        packed: list[list[SparseRow]] = []
        for chunk in (chunk for row in rows for chunk in row.chunks(self.max_tokens)):
            # Two chunks of the same row would need its pages twice.
            if packed and packed[-1][-1].number != chunk.number and self._holds([*packed[-1], chunk]):
                packed[-1].append(chunk)
            else:
                packed.append([chunk])
        return tuple(Slab(kernel_rows(part, block_table), level) for part in packed)

    def _holds(self, rows: Sequence[SparseRow]) -> bool:
        num_tiles = sum(ceil_div(row.query_len, TILE_TOKENS) for row in rows)
        num_keys = sum(row.context_len + row.query_len for row in rows)
        return sum(row.query_len for row in rows) <= self.max_tokens and any(
            num_tiles <= limit.num_tiles and num_keys <= limit.num_keys for limit in self.limits
        )


def kernel_rows(rows: Sequence[SparseRow], block_table: torch.Tensor) -> Rows:
    """Convert rows to the form that kernels accept."""
    return Rows(
        query_starts=tuple(row.token for row in rows),
        query_lens=tuple(row.query_len for row in rows),
        context_lens=tuple(row.context_len for row in rows),
        block_table=block_table[rows[0].number : rows[-1].number + 1],
    )


def consecutive_rows(lengths: Sequence[tuple[int, int]]) -> list[SparseRow]:
    """Return rows of (context_len, query_len) whose queries follow each other."""
    rows: list[SparseRow] = []
    for context_len, query_len in lengths:
        token = rows[-1].token + rows[-1].query_len if rows else 0
        rows.append(SparseRow(len(rows), token, query_len, context_len))
    return rows


@dataclass(frozen=True)
class StepLimits:
    """Limits of the rows that run sparse in a step."""

    max_tokens: int
    """New tokens of all rows."""
    max_rows: int
    max_len: int
    """Tokens of a row with its context."""
    min_len: int

    @staticmethod
    def of(max_tokens: int, max_rows: int, max_len: int, lengths: Lengths) -> "StepLimits | None":
        """Return the limits of a scheduler; None if no row can run sparse."""
        if max_len <= lengths.min_tokens:
            return None
        fewest_tokens = max(lengths.min_query_tokens, 1)
        return StepLimits(
            max_tokens=min(max_tokens, max_len - lengths.min_tokens),
            max_rows=max(min(max_rows, max_tokens // fewest_tokens), 1),
            max_len=max_len,
            min_len=lengths.min_tokens + 1,
        )

    def largest_slabs(self, limit: Extent) -> Iterator[list[SparseRow]]:
        """Yield the slabs within a limit that may need most: of one row, two rows, four rows ..., alike or unlike."""
        max_rows = min(self.max_rows, limit.num_tiles, max(limit.num_keys // self.min_len, 1))
        powers_of_two = {1 << i for i in range(max_rows.bit_length())}
        for num_rows in sorted(powers_of_two | {max_rows}):
            # Rows that end within a tile have more tiles than a single row of the same number of tokens.
            num_tiles = min((self.max_tokens - num_rows) // TILE_TOKENS + num_rows, limit.num_tiles)
            slab = Extent(num_tiles, limit.num_keys)
            yield from _rows_of(self._equal_rows(slab, num_rows))
            if num_rows > 1:
                yield from _rows_of(self._long_and_short_rows(slab, num_rows))

    def _equal_rows(self, slab: Extent, num_rows: int) -> list[Extent]:
        tiles, remainder = divmod(slab.num_tiles, num_rows)
        num_keys = min(self.max_len, slab.num_keys // num_rows)
        return [Extent(tiles + (i < remainder), num_keys) for i in range(num_rows)]

    def _long_and_short_rows(self, slab: Extent, num_rows: int) -> list[Extent]:
        """Return one row as long as possible, next to rows of a single tile."""
        num_short = num_rows - 1
        short_keys = max(self.min_len, min(self.max_len, (slab.num_keys - self.max_len) // num_short))
        long_keys = min(self.max_len, slab.num_keys - num_short * short_keys)
        return [Extent(slab.num_tiles - num_short, long_keys), *[Extent(1, short_keys)] * num_short]


def _rows_of(extents: Sequence[Extent]) -> Iterator[list[SparseRow]]:
    """Yield rows of these sizes, and the same rows if each begins a token before a group of tiles."""
    query_lens = [min(row.num_tiles * TILE_TOKENS, row.num_keys) for row in extents]
    context_lens = [row.num_keys - query_len for row, query_len in zip(extents, query_lens, strict=True)]
    before_groups = [max(context_len // GROUP_TOKENS * GROUP_TOKENS - 1, 0) for context_len in context_lens]
    for contexts in (context_lens, before_groups):
        yield consecutive_rows([*zip(contexts, query_lens, strict=True)])


@dataclass(frozen=True)
class LayerMemory:
    """Counts the memory that the layers of a worker need, which run one after the other."""

    layers: Sequence[Layer]
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    def needed(self, rows: Sequence[SparseRow]) -> int:
        """Return the memory that the most demanding layer needs for these rows."""
        slab = kernel_rows(rows, torch.empty(rows[-1].number + 1, 0, dtype=torch.int32, device=META))
        # A copy for each layer, because methods keep values for later layers in the rows.
        return max(
            count_bytes(layer, replace(slab), self.num_kv_heads, self.head_dim, self.dtype) for layer in self.layers
        )

    def most(self, limits: StepLimits, limit: Extent) -> int:
        """Return the memory that any slab within a limit needs."""
        return int(max(map(self.needed, limits.largest_slabs(limit))) * SLACK)

    def arena(self, limits: StepLimits, max_bytes: int) -> tuple[int, Room]:
        """Return the size of the arena in bytes, up to ``max_bytes`` if a tile fits, and how it is used."""
        longest_row, num_bytes = self._longest_row(limits, max_bytes)
        limits = replace(limits, max_tokens=min(limits.max_tokens, longest_row.num_tiles * TILE_TOKENS))
        several_rows_bytes = min(SEVERAL_ROWS_BYTES, max_bytes)
        # Rows that together have as many keys as the longest row, and any rows that the scheduler can form.
        short_rows = longest_row._replace(num_tiles=longest_row.num_tiles + limits.max_rows)
        any_rows = longest_row._replace(num_keys=min(limits.max_rows * limits.max_len, MOST_KEYS))
        held = []
        for slab in (short_rows, any_rows):
            needed = self.most(limits, slab)
            if needed <= max(num_bytes * SEVERAL_ROWS_SHARE, several_rows_bytes):
                held.append(slab)
                num_bytes = max(num_bytes, needed)
        return num_bytes, Room(limits.max_tokens, tuple(held))

    def _longest_row(self, limits: StepLimits, max_bytes: int) -> tuple[Extent, int]:
        """Return the longest row, or the longest part of it that fits into ``max_bytes``, and its memory."""
        limits = replace(limits, max_rows=1)
        row = Extent(ceil_div(limits.max_tokens, TILE_TOKENS), limits.max_len)
        num_bytes = self.most(limits, row)
        while num_bytes > max_bytes and row.num_tiles > 1:
            row = row._replace(num_tiles=ceil_div(row.num_tiles, 2))
            num_bytes = self.most(limits, row)
        return row, num_bytes


@dataclass(frozen=True)
class Memory:
    """A worker's arena."""

    arena: Arena
    room: Room

    @staticmethod
    def reserve(
        vllm_config: VllmConfig, layers: LayerMemory, lengths: Lengths, device: torch.device, rank: int
    ) -> "Memory | None":
        """Allocate a worker's arena."""
        scheduler = vllm_config.scheduler_config
        limits = StepLimits.of(
            scheduler.max_num_batched_tokens,
            scheduler.max_num_seqs,
            vllm_config.model_config.max_model_len,
            lengths,
        )
        if limits is None or not layers.layers:
            return None
        num_bytes, room = layers.arena(limits, int(compat.device_memory_bytes() * DEVICE_SHARE))
        # Zeros, because a host would map the pages of an empty tensor one by one while serving.
        buffer = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        if rank == 0:
            logger.info(
                "sparse-prefill: reserved an arena of %d MiB for temporary tensors of selection and attention, of %d "
                "new tokens at a time", num_bytes >> 20, room.max_tokens,
            )  # fmt: skip
        return Memory(Arena(device, buffer), room)
