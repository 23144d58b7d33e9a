# SPDX-License-Identifier: Apache-2.0
"""The size of a server's arena, tensors that do not fit into it, and rows whose cuts depend on other rows.

Everything is computed on the host; no device is needed.

    python -m benchmarks.arena [--results docs/results/arena.json] [--mend docs/results/mend.json] [--number 10000]

Sizes are for one worker with the heads of an 8B model, on an H100 or H200, with the ``min_tokens`` and
``min_query_tokens`` of unmeasured devices. A server of another shape logs its own size.

Misses and cuts are counted over random steps of 20 shapes of a worker's heads. The host's part of selection and
attention runs with each engine, kernels do nothing, and tensors have no memory (torch's meta device).
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.figures import FIELDS, merge_figures
from tests.helpers.offline_compiler import without_launches
from vllm_sparse_backend.config.crossover_table import UNMEASURED_MIN_QUERY_TOKENS, UNMEASURED_MIN_TOKENS, Thresholds
from vllm_sparse_backend.config.model_shape import ModelShape
from vllm_sparse_backend.config.plan import Plan
from vllm_sparse_backend.config.settings import SparsePrefillConfig
from vllm_sparse_backend.serving.worker.arena import Arena, ArenaSize, LayerNeed, Room, SparseRow
from vllm_sparse_kernels import PagedCache, Rows
from vllm_sparse_kernels.attention import PORTABLE
from vllm_sparse_kernels.layer import Layer
from vllm_sparse_kernels.methods.top_p import hopper, portable
from vllm_sparse_kernels.methods.top_p.scored import ALL_SCORED
from vllm_sparse_kernels.selection.engine import SelectEngine
from vllm_sparse_kernels.selection.slabs import TileBytes, slabs_of

RESULTS = Path("docs/results/arena.json")
SHAPE = ModelShape("LlamaForCausalLM", num_layers=1, num_heads=32, num_kv_heads=8, head_dim=128)
METHODS = (
    "default", "a_shape", "vertical_slash", "block_sparse", "anchor_attention", "sparge_attn", "flex_vertical_slash",
)  # fmt: skip
SIZES = ((32_768, 8_192), (131_072, 2_048), (131_072, 8_192), (131_072, 32_768), (1_048_576, 8_192))
"""(max_model_len, max_num_batched_tokens)."""
MAX_ROWS = 256
"""vLLM's max_num_seqs."""


META, CPU = torch.device("meta"), torch.device("cpu")
MEND = Path("docs/results/mend.json")
BEFORE_MIB = 466
"""Earlier size of the arena of the default method, for the heads of an 8B model, requests of 131,072 tokens and steps
of 8,192: ``top_p`` was then sized by the portable engine and by the longest row only."""

WORKERS: tuple[tuple[int, int, int], ...] = (
    (32, 8, 128), (16, 4, 128), (8, 2, 128), (64, 8, 128), (16, 2, 128), (8, 1, 128), (40, 8, 128), (20, 4, 128),
    (10, 2, 128), (5, 1, 128), (28, 4, 128), (14, 2, 128), (7, 1, 128), (16, 1, 128), (9, 3, 64), (32, 8, 64),
    (32, 32, 128), (24, 8, 128), (8, 4, 256), (12, 2, 96),
)  # fmt: skip
"""(heads, kv heads, head_dim) of a worker, for models from 1B to 405B at tensor parallelism of 1, 2, 4 and 8."""

CHUNKS = (2_048, 4_096, 8_192, 16_384, 32_768)
"""max_num_batched_tokens."""

MAX_LEN = 131_072
THRESHOLDS = Thresholds(UNMEASURED_MIN_TOKENS, UNMEASURED_MIN_QUERY_TOKENS)


def needs_of(method: str, shape: ModelShape) -> tuple[LayerNeed, Layer]:
    """Return the memory that a model's only layer needs if all its heads run ``method``, and the layer."""
    (groups,) = Plan.build(SparsePrefillConfig(method=method), shape).layers
    assert groups is not None
    need = LayerNeed.of(groups, shape.num_kv_heads, shape.head_dim, 2, CPU)
    return need, Layer.of(groups, shape.head_dim, CPU)


def arena_bytes(method: str, max_len: int, step_tokens: int) -> int:
    """Return the arena's size for a server whose heads all run ``method``, on a device with enough memory."""
    need, _ = needs_of(method, SHAPE)
    size = ArenaSize.of([need], step_tokens, MAX_ROWS, max_len, THRESHOLDS)
    assert size is not None
    return size.num_bytes


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
        need, layer = needs_of(self.method, shape)
        size = ArenaSize.of([need], self.max_tokens, MAX_ROWS, MAX_LEN, THRESHOLDS)
        assert size is not None
        self.room = Room([need], int(size.num_bytes * self.share))
        self.layer = layer
        page = torch.empty(1, 128, num_kv_heads, 2 * self.head_dim, dtype=torch.float16, device=META)
        self.cache = PagedCache(*page.split(self.head_dim, dim=-1))
        self.engines = {group.method: group.method.select_engines for group in layer.groups}

    def run(self, rows: Sequence[SparseRow]) -> None:
        """Select with each engine and attend over the kept keys, on the host only; count tensors that do not fit."""
        tokens = rows[-1].token + rows[-1].query_len
        q = torch.empty(tokens, self.heads[0], self.head_dim, dtype=torch.float16, device=META)
        for slab in self.room.slabs(rows, table_of(rows)):
            for i_engine in range(max(map(len, self.engines.values()))):
                arena = Arena(META, torch.empty(self.room.num_bytes, dtype=torch.uint8, device=META))
                index = self.layer.allocate_index(slab.rows, arena)
                for group in self.layer.groups:
                    engines: Sequence[SelectEngine] = self.engines[group.method]
                    heads = torch.empty(len(group.heads), dtype=torch.int32, device=META)
                    with arena.frame():
                        engines[i_engine % len(engines)].select(group.method, q, self.cache, index, heads, 0.1)
                with arena.frame():
                    PORTABLE.attend(q, self.cache, index, torch.empty_like(q), 0.1, options=self.layer.options)
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


def name_of(method: str, max_len: int, step_tokens: int) -> str:
    return f"arena, {method}, requests of {max_len:,} tokens, steps of {step_tokens:,}"


def figures() -> Iterator[dict[str, Any]]:
    for method in METHODS:
        for size in SIZES:
            yield {
                "name": name_of(method, *size), "value": arena_bytes(method, *size) >> 20, "unit": "MiB", "bar": None,
                "better": "lower", "device": "none: reckoned", "command": "python -m benchmarks.arena",
            }  # fmt: skip


def mend_figures(number: int) -> Iterator[dict[str, Any]]:
    device, command = "none: reckoned", f"python -m benchmarks.arena --number {number}"
    size = arena_bytes("default", MAX_LEN, 8_192) / (BEFORE_MIB << 20)
    rows = (
        (f"arena: tensors that did not fit, {number:,} random steps of 20 shapes, both engines", count_misses(number),
         "tensors", 0),
        ("arena: memory at 32 on 8 heads of 128, 131,072 tokens, over that before", round(size, 4), "times", 1.05),
        (f"rows split differently in a batch than alone, {number:,} random batches", count_cut_differently(number),
         "rows", 0),
    )  # fmt: skip
    for name, value, unit, bar in rows:
        yield dict(zip(FIELDS, (name, value, unit, bar, "lower", device, command), strict=True))


def main(
    results: Annotated[Path, typer.Option(help="List of figures to merge the sizes into.")] = RESULTS,
    mend: Annotated[Path, typer.Option(help="List of figures to merge misses and cuts into.")] = MEND,
    number: Annotated[int, typer.Option(min=1, help="Random steps and batches.")] = 10_000,
) -> None:
    merge_figures(results, {figure["name"]: figure for figure in figures()})
    merge_figures(mend, {figure["name"]: figure for figure in mend_figures(number)})


if __name__ == "__main__":
    typer.run(main)
