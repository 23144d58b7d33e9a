# SPDX-License-Identifier: Apache-2.0
"""The memory of selection and attention: one arena per worker, which its layers use one after the other.

It is sized on the host, from the configuration alone, and allocated in vLLM's profile run, so that vLLM counts it
before it sizes the cache. It holds any row that the scheduler can hand over, and as many rows at once as half a GiB
takes; steps with more rows run in several slabs, each of which selects and attends on its own. A row whose selection
alone is larger than the arena is cut into chunks, as the scheduler would have done with a smaller budget; only where
single tiles of it do not fit does it run dense. How a row is cut depends on that row alone. What a row takes is
computed for every row of every step, as it need not grow with the row's length.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
from vllm.config import VllmConfig

from vllm_sparse_backend.config.crossover_table import Thresholds
from vllm_sparse_backend.config.request_levels import SERVER_LEVEL, RequestLevel
from vllm_sparse_backend.config.resolved import Resolved
from vllm_sparse_backend.config.settings import AUTO
from vllm_sparse_backend.identity import LOGGER
from vllm_sparse_backend.serving import compat
from vllm_sparse_backend.serving.worker.batch_rows import BatchRow
from vllm_sparse_backend.serving.worker.step import Slab
from vllm_sparse_kernels import TILE_TOKENS, LayerShape, Rows, SparseIndex, Workspace, shared_bytes, widest_block
from vllm_sparse_kernels.attention import workspace_bytes
from vllm_sparse_kernels.block_width import index_block_tokens
from vllm_sparse_kernels.layer import LayerPlan, methods_by_head, stripes_of
from vllm_sparse_kernels.methods.base import Method
from vllm_sparse_kernels.rows import ceil_div

logger = logging.getLogger(LOGGER)

SEVERAL_ROWS_BYTES = 512 << 20
"""Up to here the arena grows for steps of several rows, past what the longest row alone needs."""

SLACK = 1.01
"""A row that is shorter by a tile may need a little more than the longest, as methods share out room for stripes among
tiles."""

KNOWN_LENGTHS = 1 << 14
"""Rows, by their lengths, of which it is remembered whether they fit alone."""

DEVICE_SHARE = 1 / 16
"""Of the device's memory: the arena is never larger."""


class Arena(Workspace):
    """A workspace that asks torch for what does not fit, says so once, and counts it, rather than ending the server."""

    overflows = 0

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        try:
            return super().empty(*shape, dtype=dtype)
        except MemoryError as error:
            if self.overflows == 0:
                logger.warning(
                    "sparse-prefill: a tensor did not fit into the arena and took other memory (%s); please report it "
                    "with the plan that the log shows at start-up (said once)", error,
                )  # fmt: skip
            self.overflows += 1
            return torch.empty(shape, dtype=dtype, device=self.device)


@dataclass(frozen=True)
class LayerNeed:
    """What one layer of the plan takes of the arena."""

    groups: LayerPlan
    shape: LayerShape
    """The most that a step has: each token may have a log-sum-exp, whether it belongs to a sparse row or not."""

    @staticmethod
    def of(
        groups: LayerPlan,
        num_kv_heads: int,
        head_dim: int,
        element_bytes: int,
        device: torch.device,
        engine: str = AUTO,
    ) -> "LayerNeed":
        """``engine``: name of the attention engine that the operator asks for."""
        methods = methods_by_head(groups)
        num_heads, block_tokens = len(methods), index_block_tokens(methods, head_dim, device, engine)
        shape = LayerShape(num_heads, num_kv_heads, head_dim, block_tokens, element_bytes)
        return LayerNeed(groups, shape)

    @cached_property
    def heads_of_methods(self) -> tuple[tuple[Method, int], ...]:
        """How many heads have methods that take as much room."""
        heads: dict[Method, int] = {}
        for group in self.groups:
            heads[group.method.size_key] = heads.get(group.method.size_key, 0) + len(group.heads)
        return tuple(heads.items())

    @cached_property
    def int8_scores(self) -> bool:
        """Whether any head asks for 8-bit scores."""
        return any(method.int8_scores for method in methods_by_head(self.groups))

    def num_bytes(self, rows: Rows) -> int:
        """The index, and on top of it the largest of what selecting any group and attending take."""
        shape = self.shape
        stripes = [(stripes_of(method, rows), num_heads) for method, num_heads in self.heads_of_methods]
        stripe_capacity = sum(layout.capacity * num_heads for layout, num_heads in stripes)
        longest_stripes = max(layout.longest for layout, _ in stripes)
        index = SparseIndex.bytes_for(rows, shape.num_heads, shape.block_tokens, stripe_capacity)
        select = max(self._select_bytes(rows, method, num_heads) for method, num_heads in self.heads_of_methods)
        attend = workspace_bytes(rows, shape, stripe_capacity, longest_stripes, self.int8_scores)
        return index + max(select, attend)

    def _select_bytes(self, rows: Rows, method: Method, num_heads: int) -> int:
        """At least what selecting so many heads takes of a workspace."""
        return rows.once(
            (method, num_heads, self.shape),
            lambda: method.workspace_bytes(rows, self.shape, num_heads, stripes_of(method, rows).capacity),
        )


@dataclass(frozen=True)
class Row:
    """A sparse row, or a part of one: where its queries begin in q, and its new and its cached tokens."""

    number: int  # in the block table that ``Room.slabs`` is given
    token: int
    query_len: int
    context_len: int

    @staticmethod
    def sparse_of(row: BatchRow, number: int) -> "Row":
        """What the dense backend leaves of a batch's row."""
        return Row(number, row.dense_end, row.end - row.dense_end, row.context_len + row.dense_end - row.token)

    def chunks(self, query_tokens: int) -> list["Row"]:
        """The row as chunks of ``query_tokens``, the last one maybe shorter."""
        starts = range(0, self.query_len, query_tokens)
        return [
            Row(self.number, self.token + i, min(query_tokens, self.query_len - i), self.context_len + i)
            for i in starts
        ]


class Room:
    """What the layers of a worker need for given rows, and how rows are dealt out where not all of them fit at once.

    Args:
        layers: What each layer needs.
        num_bytes: Of the arena.
    """

    def __init__(self, layers: Sequence[LayerNeed], num_bytes: int) -> None:
        self.layers = tuple(dict.fromkeys(layers))
        self.num_bytes = num_bytes
        self._fits_alone = lru_cache(maxsize=KNOWN_LENGTHS)(self._row_fits_alone)

    def needed(self, rows: Rows) -> int:
        """Bytes of the arena that the most demanding layer takes for these rows."""
        return max(layer.num_bytes(rows) for layer in self.layers)

    def fits(self, row: Row) -> bool:
        """Whether the row has room, whole or in chunks."""
        return all(self._fits_alone(chunk.query_len, chunk.context_len) for chunk in self.chunks(row))

    def slabs(
        self, rows: Sequence[Row], block_table: torch.Tensor, request: RequestLevel = SERVER_LEVEL
    ) -> tuple[Slab, ...]:
        """All rows, in order, in as few slabs as have room.

        A row is cut into chunks by itself, whatever it runs beside: what it keeps is then bitwise the same in any
        batch.

        Args:
            rows: Each must have room (``fits``).
            block_table: [num_rows, max_pages], the pages of the rows by their number.
            request: the level of all these rows.
        """
        chunks = [chunk for row in rows for chunk in self.chunks(row)]
        if len(chunks) == len(rows):
            whole = rows_of(rows, block_table)
            if self.needed(whole) <= self.num_bytes:
                return (Slab(whole, request),)
        packed: list[list[Row]] = []
        for chunk in chunks:
            # Two chunks of one row would need its pages twice.
            if packed and packed[-1][-1].number != chunk.number and self._fits([*packed[-1], chunk]):
                packed[-1].append(chunk)
            else:
                packed.append([chunk])
        return tuple(Slab(rows_of(part, block_table), request) for part in packed)

    def chunks(self, row: Row) -> list[Row]:
        """The row itself, or as few chunks of it, of equal size, as fit, each alone. Depends on nothing else.

        Chunks of one tile are the smallest: whether these fit is for ``fits`` to say.
        """
        num_tiles = ceil_div(row.query_len, TILE_TOKENS)
        while True:
            chunks = row.chunks(num_tiles * TILE_TOKENS)
            if num_tiles == 1 or all(self._fits_alone(chunk.query_len, chunk.context_len) for chunk in chunks):
                return chunks
            num_tiles = ceil_div(num_tiles, 2)

    def _row_fits_alone(self, query_len: int, context_len: int) -> bool:
        return self._fits([Row(0, 0, query_len, context_len)])

    def _fits(self, rows: Sequence[Row]) -> bool:
        return self.needed(rows_of(rows)) <= self.num_bytes


def rows_of(rows: Sequence[Row], block_table: torch.Tensor | None = None) -> Rows:
    """Rows with consecutive numbers as kernels take them; without a block table only to reckon with."""
    if block_table is None:
        block_table = torch.empty(len(rows), 0, dtype=torch.int32)
    else:
        block_table = block_table[rows[0].number : rows[-1].number + 1]
    return Rows(
        tokens=tuple(row.token for row in rows),
        query_lens=tuple(row.query_len for row in rows),
        context_lens=tuple(row.context_len for row in rows),
        block_table=block_table,
    )


def longest_rows(max_tokens: int, max_len: int, thresholds: Thresholds) -> list[Row]:
    """The row that the scheduler can form with most new and cached tokens, and the one that begins a token earlier.

    A method that groups tiles by absolute position (AnchorAttention) has a group more in the latter. Of any other row
    no method takes more than of these two, but for ``SLACK``.

    Args:
        max_tokens: Of a step.
        max_len: Of a request.
        thresholds: The least of any level.

    Returns:
        The rows; none where nothing ever goes sparse.
    """
    if thresholds.min_tokens is None or max_len <= thresholds.min_tokens:
        return []
    query_len = min(max_tokens, max_len - thresholds.min_tokens)
    context_len = max_len - query_len
    return [Row(0, 0, query_len, context_len - earlier) for earlier in (0, 1) if context_len >= earlier]


def largest_steps(max_tokens: int, max_rows: int, max_len: int, thresholds: Thresholds) -> Iterator[list[Row]]:
    """Steps that the scheduler can form, each of rows as long as can be: of one row, of two, of four and so on.

    ``max_tokens`` and ``max_rows``: of a step; ``max_len``: of a request.
    """
    rows = longest_rows(max_tokens, max_len, thresholds)
    if not rows:
        return
    longest = rows[0].query_len
    most_rows = max(min(max_rows, max_tokens // max(thresholds.min_query_tokens, 1)), 1)
    num_rows = 1
    while True:
        # Rows that end within a tile have more tiles together than one that is as long as all of them.
        query_len = min(ceil_div(max_tokens // num_rows, TILE_TOKENS) * TILE_TOKENS, longest)
        yield [Row(i, i * query_len, query_len, max_len - query_len) for i in range(num_rows)]
        if num_rows == most_rows:
            return
        num_rows = min(2 * num_rows, most_rows)


class ArenaSize(NamedTuple):
    """Bytes of an arena on a device that does not limit it, and what they are for."""

    longest_row: int
    """What the most demanding row takes alone."""

    largest_step: int
    """What the most demanding step takes at a time."""

    @property
    def num_bytes(self) -> int:
        """Enough for any row alone, and for several at once up to ``SEVERAL_ROWS_BYTES``."""
        return int(max(self.longest_row, min(self.largest_step, SEVERAL_ROWS_BYTES)) * SLACK)

    @staticmethod
    def of(
        layers: Sequence[LayerNeed], max_tokens: int, max_rows: int, max_len: int, thresholds: Thresholds
    ) -> "ArenaSize | None":
        """The size for a server's layers and limits.

        Args:
            layers: What each distinct layer needs.
            max_tokens: Of a step.
            max_rows: Of a step.
            max_len: Of a request.
            thresholds: The least of any level.

        Returns:
            The size; None if nothing will ever go sparse.
        """

        def needed(rows: Sequence[Row]) -> int:
            return max(layer.num_bytes(rows_of(rows)) for layer in layers)

        longest = [needed([row]) for row in longest_rows(max_tokens, max_len, thresholds) if layers]
        if not longest:
            return None
        steps = [needed(step) for step in largest_steps(max_tokens, max_rows, max_len, thresholds)]
        return ArenaSize(max(longest), max(steps))


@dataclass(frozen=True)
class Memory:
    """A worker's arena, and what has room in it."""

    arena: Arena
    room: Room

    @staticmethod
    def reserve(vllm_config: VllmConfig, resolved: Resolved, device: torch.device, rank: int = 0) -> "Memory | None":
        """Allocate this worker's arena; None if nothing will ever go sparse here."""
        scheduler, max_len = vllm_config.scheduler_config, vllm_config.model_config.max_model_len
        most = scheduler.max_num_batched_tokens, scheduler.max_num_seqs
        layers = _needs(vllm_config, resolved, device)
        size = ArenaSize.of(layers, *most, max_len, resolved.earliest_thresholds())
        if size is None:
            return None
        num_bytes = min(size.num_bytes, int(compat.device_memory_bytes() * DEVICE_SHARE))
        # In inference mode, as in the profile run, it would be a tensor that nothing outside may write to.
        with torch.inference_mode(False):
            buffer = torch.empty(num_bytes, dtype=torch.uint8, device=device)
            if device.type == "cpu":
                buffer.zero_()  # a host would take its pages one by one, while serving
        if rank == 0:
            logger.info(
                "sparse-prefill: an arena of %d MiB for selection and attention; the longest row takes %d, the largest "
                "step %d", num_bytes >> 20, size.longest_row >> 20, size.largest_step >> 20,
            )  # fmt: skip
        return Memory(Arena(device, buffer), Room(layers, num_bytes))


def _needs(vllm_config: VllmConfig, resolved: Resolved, device: torch.device) -> tuple[LayerNeed, ...]:
    """What each distinct layer of this worker's part of the plans takes."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    head_dim, engine = resolved.plan.shape.head_dim, resolved.config.engine
    if widest_block(head_dim, shared_bytes(device)) is None:
        return ()
    first, end = model.get_layers_start_end_indices(parallel)
    layers = {groups for number in range(first, end) for groups in resolved.layer(number)}
    num_kv_heads, element_bytes = model.get_num_kv_heads(parallel), model.dtype.itemsize
    return tuple(LayerNeed.of(groups, num_kv_heads, head_dim, element_bytes, device, engine) for groups in layers)
