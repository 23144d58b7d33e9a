# SPDX-License-Identifier: Apache-2.0
"""Workers of many shapes with the arena that serving gives them, and random steps."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from benchmarks.arena import UNLIMITED, layer_memory, step_limits
from benchmarks.attention_prompts import Heads
from vllm_sparse_backend.config.crossover_table import UNMEASURED
from vllm_sparse_backend.serving.worker.arena import LayerMemory, Room, SparseRow

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
        most = min(left, max_len - UNMEASURED.min_tokens)
        if most < 1:
            break
        query_len = most if number == num_rows - 1 and generator.random() < 0.5 else generator.randint(1, most)
        longest = max_len - query_len
        context_len = generator.choice((longest, generator.randint(UNMEASURED.min_tokens, longest)))
        rows.append(SparseRow(number, max_tokens - left, query_len, context_len))
        left -= query_len
    return rows


def slabs_of(room: Room, rows: Sequence[SparseRow]) -> list[list[SparseRow]]:
    """Return the rows of each slab as they were cut, identified by the block table."""
    slabs = room.slabs(rows, torch.arange(len(rows), dtype=torch.int32)[:, None])
    parts = [
        (slab.rows.block_table[:, 0].tolist(), slab.rows.query_starts, slab.rows.query_lens, slab.rows.context_lens)
        for slab in slabs
    ]
    return [[SparseRow(*fields) for fields in zip(*part, strict=True)] for part in parts]


@dataclass(frozen=True)
class ArenaSize:
    """A worker's layers and the size of its arena."""

    memory: LayerMemory
    num_bytes: int
    room: Room

    @staticmethod
    def of(
        heads: tuple[int, int, int], max_tokens: int, method: str = "default", max_bytes: int = UNLIMITED
    ) -> "ArenaSize":
        memory = layer_memory(method, Heads(*heads))
        return ArenaSize(memory, *memory.arena(step_limits(MAX_LEN, max_tokens), max_bytes))

    def count_misses(self, rows: Sequence[SparseRow]) -> int:
        """Return the number of slabs that need more than the arena."""
        return sum(self.memory.needed(slab) > self.num_bytes for slab in slabs_of(self.room, rows))


def count_misses(number: int) -> int:
    """Return the number of slabs that need more than the arena, over random steps of all workers."""
    generator = random.Random(1)
    misses = 0
    for i, heads in enumerate(WORKERS):
        max_tokens = CHUNKS[i % len(CHUNKS)]
        arena = ArenaSize.of(heads, max_tokens)
        for _ in range(number * i // len(WORKERS), number * (i + 1) // len(WORKERS)):
            misses += arena.count_misses(random_step(generator, max_tokens))
    return misses
