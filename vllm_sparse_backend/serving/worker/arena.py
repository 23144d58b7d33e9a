# SPDX-License-Identifier: Apache-2.0
"""The memory of selection and attention: one arena per worker, which its layers use one after the other.

The arena is sized on the host, from the configuration, and allocated in vLLM's profile run, so that vLLM counts it
before it sizes the KV cache. It holds any row that the scheduler can form, and several rows at once up to half a GiB.
Steps with more rows run in several slabs, and each slab selects and attends separately. A row whose selection is larger
than the arena is cut into chunks, as the scheduler would do with a smaller token budget. It runs dense only if a single
tile of it does not fit. The parts of a row do not depend on other rows. The memory of every row is computed in every
step, because it does not always grow with the row's length.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
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
from vllm_sparse_kernels import TILE_TOKENS, LayerShape, Rows, SparseIndex, Workspace
from vllm_sparse_kernels.attention import workspace_bytes
from vllm_sparse_kernels.block_width import index_block_tokens
from vllm_sparse_kernels.layer import LayerPlan, fits_shared_memory, stripes_of
from vllm_sparse_kernels.methods.base import Method
from vllm_sparse_kernels.rows import ceil_div

logger = logging.getLogger(LOGGER)

SEVERAL_ROWS_BYTES = 512 << 20
"""Maximum size in bytes to which the arena grows for steps of several rows, if the longest row needs less."""

SLACK = 1.01
"""Factor on the arena's size. A row that is shorter by a tile may need slightly more than the longest row, because
methods distribute room for stripes among tiles."""

KNOWN_LENGTHS = 1 << 14
"""Number of row lengths for which the result of ``fits`` is cached."""

DEVICE_SHARE = 1 / 16
"""Maximum size of the arena, as a share of the device's memory."""


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
class LayerNeed:
    """The arena memory that one layer of the plan needs."""

    plan: LayerPlan
    shape: LayerShape

    @staticmethod
    def of(
        plan: LayerPlan,
        num_kv_heads: int,
        head_dim: int,
        element_bytes: int,
        device: torch.device,
        engine: str = AUTO,
    ) -> "LayerNeed":
        """Return the memory that a layer with this plan needs."""
        block_tokens = index_block_tokens(plan.methods, head_dim, device, engine)
        shape = LayerShape(len(plan.methods), num_kv_heads, head_dim, block_tokens, element_bytes)
        return LayerNeed(plan, shape)

    @cached_property
    def heads_of_methods(self) -> tuple[tuple[Method, int], ...]:
        """Methods that differ in the memory they need, each with the number of its heads."""
        heads: dict[Method, int] = {}
        for group in self.plan.groups:
            largest = group.method.largest(group.methods)
            heads[largest] = heads.get(largest, 0) + len(group)
        return tuple(heads.items())

    @cached_property
    def int8_scores(self) -> bool:
        """Whether the method of any head uses 8-bit scores."""
        return any(method.int8_scores for method in self.plan.methods)

    def num_bytes(self, rows: Rows) -> int:
        """Return the memory that the layer needs for these rows.

        The index is in memory during the entire step. The groups' selections and attention run one after the other.
        """
        shape = self.shape
        stripes = [(stripes_of(method, rows), num_heads) for method, num_heads in self.heads_of_methods]
        stripe_capacity = sum(layout.capacity * num_heads for layout, num_heads in stripes)
        longest_stripes = max(layout.longest for layout, _ in stripes)
        index = SparseIndex.bytes_for(rows, shape.num_heads, shape.block_tokens, stripe_capacity)
        select = max(self._select_bytes(rows, method, num_heads) for method, num_heads in self.heads_of_methods)
        attend = workspace_bytes(rows, shape, stripe_capacity, longest_stripes, self.int8_scores)
        return index + max(select, attend)

    def _select_bytes(self, rows: Rows, method: Method, num_heads: int) -> int:
        """Return an upper bound, in bytes, of the workspace that selection for heads of one method needs."""
        return rows.once(
            (method, num_heads, self.shape),
            lambda: method.workspace_bytes(rows, self.shape, num_heads, stripes_of(method, rows).capacity),
        )


@dataclass(frozen=True)
class SparseRow:
    """A sparse row, or a part of a sparse row."""

    number: int
    token: int
    query_len: int
    context_len: int
    prompt_len: int | None = None

    @staticmethod
    def sparse_of(row: BatchRow, number: int) -> "SparseRow":
        """Return the part of a batch's row that does not run on the dense backend."""
        num_dense = row.dense_end - row.token
        return SparseRow(
            number, row.dense_end, row.query_len - num_dense, row.context_len + num_dense, prompt_len=row.prompt_len
        )

    def chunks(self, query_tokens: int) -> list["SparseRow"]:
        """Cut the row into chunks."""
        starts = range(0, self.query_len, query_tokens)
        return [
            replace(
                self,
                token=self.token + i,
                query_len=min(query_tokens, self.query_len - i),
                context_len=self.context_len + i,
            )
            for i in starts
        ]


class Room:
    """Divides rows into slabs that fit into the arena."""

    def __init__(self, layers: Sequence[LayerNeed], num_bytes: int) -> None:
        self.layers = tuple(dict.fromkeys(layers))
        self.num_bytes = num_bytes
        self._fits_alone = lru_cache(maxsize=KNOWN_LENGTHS)(self._row_fits_alone)

    def needed(self, rows: Rows) -> int:
        """Return the memory that the most demanding layer needs for these rows."""
        return max(layer.num_bytes(rows) for layer in self.layers)

    def fits(self, row: SparseRow) -> bool:
        """Return whether the row fits into the arena, whole or in chunks."""
        return all(self._fits_alone(chunk.query_len, chunk.context_len) for chunk in self.chunks(row))

    def slabs(
        self,
        rows: Sequence[SparseRow],
        block_table: torch.Tensor,
        request: RequestLevel = SERVER_LEVEL,
        is_long: bool = False,
    ) -> tuple[Slab, ...]:
        """Divide rows into as few slabs as possible, each of which fits into the arena.

        A row's chunks do not depend on other rows. The row therefore keeps the same keys in any batch.
        """
        chunks = [chunk for row in rows for chunk in self.chunks(row)]
        if len(chunks) == len(rows):
            whole = kernel_rows(rows, block_table)
            if self.needed(whole) <= self.num_bytes:
                return (Slab(whole, request, is_long),)
        packed: list[list[SparseRow]] = []
        for chunk in chunks:
            # Two chunks of the same row would need its pages twice.
            if packed and packed[-1][-1].number != chunk.number and self._fits([*packed[-1], chunk]):
                packed[-1].append(chunk)
            else:
                packed.append([chunk])
        return tuple(Slab(kernel_rows(part, block_table), request, is_long) for part in packed)

    def chunks(self, row: SparseRow) -> list[SparseRow]:
        """Cut a row into the fewest chunks of equal size that fit into the arena one at a time."""
        num_tiles = ceil_div(row.query_len, TILE_TOKENS)
        while True:
            chunks = row.chunks(num_tiles * TILE_TOKENS)
            if num_tiles == 1 or all(self._fits_alone(chunk.query_len, chunk.context_len) for chunk in chunks):
                return chunks
            num_tiles = ceil_div(num_tiles, 2)

    def _row_fits_alone(self, query_len: int, context_len: int) -> bool:
        return self._fits([SparseRow(0, 0, query_len, context_len)])

    def _fits(self, rows: Sequence[SparseRow]) -> bool:
        return self.needed(kernel_rows(rows)) <= self.num_bytes


def kernel_rows(rows: Sequence[SparseRow], block_table: torch.Tensor | None = None) -> Rows:
    """Convert rows to the form that kernels accept."""
    if block_table is None:
        block_table = torch.empty(len(rows), 0, dtype=torch.int32)
    else:
        block_table = block_table[rows[0].number : rows[-1].number + 1]
    prompt_lens = tuple(row.prompt_len for row in rows if row.prompt_len is not None)
    return Rows(
        query_starts=tuple(row.token for row in rows),
        query_lens=tuple(row.query_len for row in rows),
        context_lens=tuple(row.context_len for row in rows),
        block_table=block_table,
        prompt_lens=prompt_lens if len(prompt_lens) == len(rows) else None,
    )


def longest_rows(max_tokens: int, max_len: int, thresholds: Thresholds) -> list[SparseRow]:
    """Return the two rows that need the most memory of all rows that the scheduler can form, up to ``SLACK``.

    These are the row with the most new and cached tokens, and the row that begins a token earlier. A method that groups
    tiles by absolute position (AnchorAttention) has one more group in the second row.
    """
    if thresholds.min_tokens is None or max_len <= thresholds.min_tokens:
        return []
    query_len = min(max_tokens, max_len - thresholds.min_tokens)
    context_len = max_len - query_len
    return [SparseRow(0, 0, query_len, context_len - earlier) for earlier in (0, 1) if context_len >= earlier]


def largest_steps(max_tokens: int, max_rows: int, max_len: int, thresholds: Thresholds) -> Iterator[list[SparseRow]]:
    """Yield the largest steps that the scheduler can form, with one row, two rows, four rows and so on."""
    rows = longest_rows(max_tokens, max_len, thresholds)
    if not rows:
        return
    longest = rows[0].query_len
    most_rows = max(min(max_rows, max_tokens // max(thresholds.min_query_tokens, 1)), 1)
    num_rows = 1
    while True:
        # Several rows that end within a tile have more tiles in total than a single row of the same number of tokens.
        query_len = min(ceil_div(max_tokens // num_rows, TILE_TOKENS) * TILE_TOKENS, longest)
        yield [SparseRow(i, i * query_len, query_len, max_len - query_len) for i in range(num_rows)]
        if num_rows == most_rows:
            return
        num_rows = min(2 * num_rows, most_rows)


class ArenaSize(NamedTuple):
    """Bytes that an arena needs on a device that does not limit it."""

    longest_row: int
    largest_step: int

    @property
    def num_bytes(self) -> int:
        """Size for any single row, and for several rows at once up to ``SEVERAL_ROWS_BYTES``."""
        return int(max(self.longest_row, min(self.largest_step, SEVERAL_ROWS_BYTES)) * SLACK)

    @staticmethod
    def of(
        layers: Sequence[LayerNeed], max_tokens: int, max_rows: int, max_len: int, thresholds: Thresholds
    ) -> "ArenaSize | None":
        """Return the size for a server's layers and limits."""

        def needed(rows: Sequence[SparseRow]) -> int:
            return max(layer.num_bytes(kernel_rows(rows)) for layer in layers)

        longest = [needed([row]) for row in longest_rows(max_tokens, max_len, thresholds) if layers]
        if not longest:
            return None
        steps = [needed(step) for step in largest_steps(max_tokens, max_rows, max_len, thresholds)]
        return ArenaSize(max(longest), max(steps))


@dataclass(frozen=True)
class Memory:
    """A worker's arena."""

    arena: Arena
    room: Room

    @staticmethod
    def reserve(vllm_config: VllmConfig, resolved: Resolved, device: torch.device, rank: int = 0) -> "Memory | None":
        """Allocate this worker's arena."""
        scheduler = vllm_config.scheduler_config
        layers = _layer_needs(vllm_config, resolved, device)
        size = ArenaSize.of(
            layers,
            max_tokens=scheduler.max_num_batched_tokens,
            max_rows=scheduler.max_num_seqs,
            max_len=vllm_config.model_config.max_model_len,
            thresholds=resolved.earliest_thresholds(),
        )
        if size is None:
            return None
        num_bytes = min(size.num_bytes, int(compat.device_memory_bytes() * DEVICE_SHARE))
        # The profile run is in inference mode; a tensor created in it could not be written to outside of it.
        with torch.inference_mode(False):
            buffer = torch.empty(num_bytes, dtype=torch.uint8, device=device)
            if device.type == "cpu":
                buffer.zero_()  # otherwise the host would map its pages one by one while serving
        if rank == 0:
            logger.info(
                "sparse-prefill: reserved an arena of %d MiB for temporary tensors of selection and attention; the "
                "longest request needs %d MiB of it, and the largest step %d MiB",
                num_bytes >> 20, size.longest_row >> 20, size.largest_step >> 20,
            )  # fmt: skip
        return Memory(Arena(device, buffer), Room(layers, num_bytes))


def _layer_needs(vllm_config: VllmConfig, resolved: Resolved, device: torch.device) -> tuple[LayerNeed, ...]:
    """Return the memory that each distinct layer of this worker needs at any level."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    head_dim, engine = resolved.plan.shape.head_dim, resolved.config.engine
    first, end = model.get_layers_start_end_indices(parallel)
    plans = [resolved.layer(number) for number in range(first, end)]
    fitting = [plan for plan in plans if all(fits_shared_memory(layer, head_dim, device) for layer in plan)]
    layers = {layer for plan in fitting for layer in plan}
    num_kv_heads, element_bytes = model.get_num_kv_heads(parallel), model.dtype.itemsize
    return tuple(LayerNeed.of(layer, num_kv_heads, head_dim, element_bytes, device, engine) for layer in layers)
