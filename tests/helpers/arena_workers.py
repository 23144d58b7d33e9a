# SPDX-License-Identifier: Apache-2.0
"""Workers of many shapes with the arena that serving gives them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from benchmarks.arena import UNLIMITED, layer_memory, step_limits
from benchmarks.attention_prompts import Heads
from vllm_sparse_backend.serving.worker.arena import LayerMemory, Room, SparseRow

WORKERS: tuple[tuple[int, int, int], ...] = (
    (32, 8, 128), (16, 4, 128), (8, 2, 128), (64, 8, 128), (16, 2, 128), (8, 1, 128), (40, 8, 128), (20, 4, 128),
    (10, 2, 128), (5, 1, 128), (28, 4, 128), (14, 2, 128), (7, 1, 128), (16, 1, 128), (9, 3, 64), (32, 8, 64),
    (32, 32, 128), (24, 8, 128), (8, 4, 256), (12, 2, 96),
)  # fmt: skip
"""(heads, kv heads, head_dim) of a worker, for models from 1B to 405B at tensor parallelism of 1, 2, 4 and 8."""

MAX_LEN = 131_072


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
