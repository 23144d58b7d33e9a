# SPDX-License-Identifier: Apache-2.0
"""What one step of the engine is to this backend: its sparse rows, and the runs of rows that run dense."""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from vllm_sparse_backend.config.request_levels import SERVER_LEVEL, RequestLevel
from vllm_sparse_backend.serving import compat
from vllm_sparse_backend.serving.worker.request_tallies import Spans
from vllm_sparse_kernels import Rows
from vllm_sparse_kernels.rows import ceil_div, to_device

TABLE_STEP = 16
"""Entries of a block table's row are filled up to a multiple of this."""


@dataclass(frozen=True)
class DenseRun:
    """Neighbouring rows that the dense backend runs: their tokens, and metadata as if they were the whole batch.

    Of the last row these may be the first tokens alone.
    """

    rows: slice
    tokens: slice
    metadata: compat.DenseMetadata


class Slab(NamedTuple):
    """Sparse rows of a step that select and attend together.

    Most steps are one slab; where the arena has no room for all rows at a time, they are several.
    """

    rows: Rows
    request: RequestLevel = SERVER_LEVEL
    """The level of the requests of all these rows."""

    @property
    def level(self) -> str:
        """The name of that level."""
        return self.request.name


@dataclass(frozen=True)
class Probe:
    """Queries of a sparse row of a level for which some layers of the step are compared with the dense backend.

    ``run``: these queries as if they were the whole batch, over all keys that they may see.
    """

    level: str
    run: DenseRun
    layers: frozenset[int]


@dataclass
class SparseStep:
    """The part of a step that prefills sparsely.

    ``held``: layers and levels that the guard keeps dense by now; these rows run on the whole batch's metadata.
    """

    slabs: tuple[Slab, ...]
    dense_runs: tuple[DenseRun, ...]
    held: frozenset[tuple[int, str]] = frozenset()
    probes: tuple[Probe, ...] = ()
    spans: Spans = ()
    """Sparse tokens of requests that asked for a report."""


@dataclass
class SparsePrefillMetadata(compat.DenseMetadata):
    """The dense backend's metadata of the whole batch, for layers that stay dense, and the sparse part of the step."""

    sparse: SparseStep | None = None


def copy_block_table_rows(block_table: torch.Tensor, ids: list[int]) -> torch.Tensor:
    """Some rows of a block table, [len(ids), max_pages], in a copy of their own.

    Its rows begin at multiples of 64 bytes wherever vLLM's do: kernels are compiled for such addresses apart.
    """
    max_pages, device = block_table.shape[1], block_table.device
    own = torch.empty(len(ids), ceil_div(max_pages, TABLE_STEP) * TABLE_STEP, dtype=torch.int32, device=device)
    own = own[:, :max_pages]
    if ids[-1] - ids[0] + 1 == len(ids):
        return own.copy_(block_table[ids[0] : ids[-1] + 1])
    chosen = to_device(ids, torch.int64, device)
    return own.copy_(block_table.index_select(0, chosen))
