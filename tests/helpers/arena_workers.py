# SPDX-License-Identifier: Apache-2.0
"""Random steps of workers of many shapes: tensors that do not fit the arena, and rows whose cuts depend on other rows.

The host's part of selection and attention runs with each engine, kernels do nothing, and tensors have no memory
(torch's meta device).
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from benchmarks.arena import MAX_ROWS, THRESHOLDS
from tests.helpers.offline_compiler import without_launches
from vllm_sparse_backend.config.crossover_table import UNMEASURED_MIN_TOKENS
from vllm_sparse_backend.config.model_shape import ModelShape
from vllm_sparse_backend.config.plan import Plan
from vllm_sparse_backend.config.settings import SparsePrefillConfig
from vllm_sparse_backend.serving.worker.arena import Arena, ArenaSize, LayerNeed, Room, SparseRow
from vllm_sparse_kernels import PagedCache, Rows
from vllm_sparse_kernels.attention import PORTABLE
from vllm_sparse_kernels.layer import Layer
from vllm_sparse_kernels.methods.top_p import hopper, portable
from vllm_sparse_kernels.methods.top_p.scored import ALL_SCORED
from vllm_sparse_kernels.selection.slabs import TileBytes, slabs_of

META, CPU = torch.device("meta"), torch.device("cpu")

WORKERS: tuple[tuple[int, int, int], ...] = (
    (32, 8, 128), (16, 4, 128), (8, 2, 128), (64, 8, 128), (16, 2, 128), (8, 1, 128), (40, 8, 128), (20, 4, 128),
    (10, 2, 128), (5, 1, 128), (28, 4, 128), (14, 2, 128), (7, 1, 128), (16, 1, 128), (9, 3, 64), (32, 8, 64),
    (32, 32, 128), (24, 8, 128), (8, 4, 256), (12, 2, 96),
)  # fmt: skip
"""(heads, kv heads, head_dim) of a worker, for models from 1B to 405B at tensor parallelism of 1, 2, 4 and 8."""

CHUNKS = (2_048, 4_096, 8_192, 16_384, 32_768)
"""max_num_batched_tokens."""

MAX_LEN = 131_072


def random_step(generator: random.Random, max_tokens: int, max_len: int = MAX_LEN) -> list[SparseRow]:
    """Return random sparse rows of a step, each long enough to run sparse. Half of the steps have a single row."""
    num_rows = generator.choice((1, 1, 1, 2, 3, 4, 8))
    left, rows = max_tokens, list[SparseRow]()
    for number in range(num_rows):
        most = min(left, max_len - UNMEASURED_MIN_TOKENS)
        if most < 1:
            break
        query_len = most if number == num_rows - 1 and generator.random() < 0.5 else generator.randint(1, most)
        longest = max_len - query_len
        context_len = generator.choice((longest, generator.randint(UNMEASURED_MIN_TOKENS, longest)))
        rows.append(SparseRow(number, max_tokens - left, query_len, context_len))
        left -= query_len
    return rows


def table_of(rows: Sequence[SparseRow], device: torch.device = META) -> torch.Tensor:
    """Return a block table. If it has memory, its entries are the rows' numbers."""
    return torch.arange(len(rows), dtype=torch.int32, device=device)[:, None]


@dataclass
class Worker:
    """A worker's layer, its arena in the size that serving gives it, and counts of misses."""

    heads: tuple[int, int, int]
    max_tokens: int
    method: str = "default"
    share: float = 1.0
    """Fraction of that size; below 1 as on a device whose memory limits the arena."""

    num_misses: int = field(default=0, init=False)
    peak_bytes: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        num_heads, num_kv_heads, self.head_dim = self.heads
        shape = ModelShape("LlamaForCausalLM", 1, num_heads, num_kv_heads, self.head_dim)
        (plan,) = Plan.build(SparsePrefillConfig(method=self.method), shape).layers
        assert plan is not None
        need, layer = LayerNeed.of(plan, num_kv_heads, self.head_dim, 2, CPU), Layer.of(plan, self.head_dim, CPU)
        size = ArenaSize.of([need], self.max_tokens, MAX_ROWS, MAX_LEN, THRESHOLDS)
        assert size is not None
        self.room = Room([need], int(size.num_bytes * self.share))
        self.layer = layer
        page = torch.empty(1, 128, num_kv_heads, 2 * self.head_dim, dtype=torch.float16, device=META)
        self.cache = PagedCache(*page.split(self.head_dim, dim=-1))
        self.engines = [group.method.select_engines for group in layer.plan.groups]

    def run(self, rows: Sequence[SparseRow]) -> None:
        """Select with each engine and attend over the kept keys, on the host only; count tensors that do not fit."""
        tokens = rows[-1].token + rows[-1].query_len
        q = torch.empty(tokens, self.heads[0], self.head_dim, dtype=torch.float16, device=META)
        for slab in self.room.slabs(rows, table_of(rows)):
            for i_engine in range(max(map(len, self.engines))):
                arena = Arena(META, torch.empty(self.room.num_bytes, dtype=torch.uint8, device=META))
                call = self.layer.new_call(q, self.cache, slab.rows, 0.1, arena)
                for group, engines in zip(self.layer.plan.groups, self.engines, strict=True):
                    with arena.frame():
                        engines[i_engine % len(engines)].select(replace(call, heads=group))
                with arena.frame():
                    PORTABLE.attend(call, torch.empty_like(q), options=self.layer.options)
                self.num_misses += arena.overflows
                self.peak_bytes = max(self.peak_bytes, arena.peak_bytes)

    def cuts(self, rows: Sequence[SparseRow]) -> dict[int, list[Any]]:
        """Return the cuts of each row: its chunks by first token, and their tiles by run."""
        cuts: dict[int, list[Any]] = {row.number: [] for row in rows}
        begins = {row.number: row.token for row in rows}
        for slab in self.room.slabs(rows, table_of(rows, CPU)):
            for i, number in enumerate(slab.rows.block_table[:, 0].tolist()):
                chunk = slab.rows.query_starts[i] - begins[number], slab.rows.query_lens[i]
                runs = [
                    run_cuts(slab.rows, i, self.heads[0], tile_bytes)
                    for tile_bytes in (hopper.tile_bytes(ALL_SCORED), portable.tile_bytes(ALL_SCORED))
                ]
                cuts[number].append((*chunk, *runs))
        return cuts


def run_cuts(rows: Rows, row: int, num_selected: int, tile_bytes: TileBytes) -> list[tuple[int, int]]:
    """Return the tiles (first, end) of each run of a row, counted from the row's first tile."""
    begin, end = rows.tile_starts[row], rows.tile_starts[row + 1]
    cuts = []
    for slab in slabs_of(rows, num_selected, tile_bytes):
        for run in slab.runs:
            first, last = max(run.first_tile, begin), min(run.end_tile, end)
            if first < last:
                cuts.append((first - begin, last - begin))
    return cuts


def count_misses(number: int, method: str = "default", seed: int = 0) -> int:
    """Return the number of tensors that did not fit into the arena, over random steps of all workers."""
    generator = random.Random(seed)
    misses = 0
    with without_launches():
        for i, heads in enumerate(WORKERS):
            workers = [Worker(heads, max_tokens, method) for max_tokens in CHUNKS]
            for step in range(number * i // len(WORKERS), number * (i + 1) // len(WORKERS)):
                worker = workers[step % len(workers)]
                worker.run(random_step(generator, worker.max_tokens))
            misses += sum(worker.num_misses for worker in workers)
    return misses


def count_cut_differently(number: int, seed: int = 0) -> int:
    """Return the number of rows that are cut differently in a batch than alone, over random batches of all workers.

    Arenas have the size that a server gives them, or a share of this size.
    """
    generator = random.Random(seed)
    differing = 0
    for i, heads in enumerate(WORKERS):
        workers = [Worker(heads, chunk, share=share) for chunk in (4_096, 8_192, 32_768) for share in (1.0, 0.8, 0.5)]
        for batch in range(number * i // len(WORKERS), number * (i + 1) // len(WORKERS)):
            worker = workers[batch % len(workers)]
            sparse = filter(worker.room.fits, random_step(generator, worker.max_tokens))
            rows = [replace(row, number=i_row) for i_row, row in enumerate(sparse)]
            together = worker.cuts(rows) if rows else {}
            for row in rows:
                alone = worker.cuts([SparseRow(0, 0, row.query_len, row.context_len)])
                differing += together[row.number] != alone[0]
    return differing
