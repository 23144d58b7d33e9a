# SPDX-License-Identifier: Apache-2.0
"""A step of the engine as the metadata builder passes it to the layers: its sparse rows and its dense runs."""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from vllm_sparse_backend.config.request_levels import SERVER_LEVEL, RequestLevel
from vllm_sparse_backend.serving import compat
from vllm_sparse_kernels import Rows
from vllm_sparse_kernels.rows import ceil_div, to_device

TABLE_STEP = 16
"""Each row of a copied block table has a multiple of this number of entries."""


@dataclass(frozen=True)
class DenseRun:
    """Consecutive tokens that the dense backend runs."""

    rows: slice
    tokens: slice
    metadata: compat.DenseMetadata


class Slab(NamedTuple):
    """Sparse rows of a step that select and attend together.

    Most steps have one slab for each level. A step has more if the arena cannot hold all its rows at once, or if
    streaming heads keep fewer keys in some of its rows.
    """

    rows: Rows
    request: RequestLevel = SERVER_LEVEL
    """Level of the requests of all these rows."""
    is_long: bool = False
    """Whether all these rows have so long a context that streaming heads keep only the first and the nearest keys."""

    @property
    def level(self) -> str:
        """Name of the level."""
        return self.request.name


@dataclass
class SparseStep:
    """The sparse rows and the dense runs of a step."""

    slabs: tuple[Slab, ...]
    dense_runs: tuple[DenseRun, ...]
    is_counted: bool = True


@dataclass
class SparsePrefillMetadata(compat.DenseMetadata):
    """The dense backend's metadata of the whole batch, for layers that run dense, and the sparse part of the step."""

    sparse: SparseStep | None = None


def copy_block_table_rows(block_table: torch.Tensor, ids: list[int]) -> torch.Tensor:
    """Copy some rows of a block table. Does not wait for the device.

    Rows of the copy begin at multiples of 64 bytes, as in vLLM's block tables: Triton compiles kernels separately for
    addresses that are multiples of 16 bytes.
    """
    max_pages, device = block_table.shape[1], block_table.device
    padded = torch.empty(len(ids), ceil_div(max_pages, TABLE_STEP) * TABLE_STEP, dtype=torch.int32, device=device)
    copy = padded[:, :max_pages]
    if ids[-1] - ids[0] + 1 == len(ids):
        return copy.copy_(block_table[ids[0] : ids[-1] + 1])
    return copy.copy_(block_table.index_select(0, to_device(ids, torch.int64, device)))
