"""Attention over a SparseIndex: one contract (``engine.py``), and the engines that fulfil it, each a file."""

import torch

from vllm_sparse_kernels.attend import flash as flash_module
from vllm_sparse_kernels.attend import portable
from vllm_sparse_kernels.attend.engine import AttendSpec, Choice, Engine, choose
from vllm_sparse_kernels.attend.flash import FlashAttention, flash_engine
from vllm_sparse_kernels.attend.options import AttendOptions
from vllm_sparse_kernels.attend.portable import PORTABLE, shared_bytes, supports_bulk, widest_block
from vllm_sparse_kernels.index import LayerShape, SparseIndex
from vllm_sparse_kernels.paged import PagedCache
from vllm_sparse_kernels.rows import Rows

__all__ = [
    "PORTABLE",
    "AttendSpec",
    "Choice",
    "Engine",
    "FlashAttention",
    "attend",
    "choose",
    "engines",
    "flash_engine",
    "shared_bytes",
    "supports_bulk",
    "widest_block",
    "workspace_bytes",
]


def engines(flash: FlashAttention | None = None) -> dict[str, Engine]:
    """All engines by name, the fastest first. ``flash`` is the function that the engine of that name calls."""
    every = (
        flash_engine(flash),
        PORTABLE,
    )
    return {engine.name: engine for engine in every}


def attend(
    q: torch.Tensor,
    cache: PagedCache,
    index: SparseIndex,
    out: torch.Tensor,
    scale: float,
    lse: torch.Tensor | None = None,
    options: AttendOptions | None = None,
    engine: Engine = PORTABLE,
) -> None:
    """Attention over the index by one engine: see ``engine.Attend``."""
    engine.attend(q, cache, index, out, scale, lse, options)


def workspace_bytes(rows: Rows, shape: LayerShape, longest_stripes: int, int8_scores: bool) -> int:
    """At least what attention over these rows takes from the index's workspace, with whichever engine.

    ``longest_stripes``: ``SparseIndex.longest_stripes``.
    """
    by_portable = portable.workspace_bytes(rows, shape, int8_scores)
    return by_portable if int8_scores else max(by_portable, flash_module.workspace_bytes(rows, shape, longest_stripes))
