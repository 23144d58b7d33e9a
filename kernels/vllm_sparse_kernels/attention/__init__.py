# SPDX-License-Identifier: Apache-2.0
"""Attention over a SparseIndex: one contract (``engine.py``), and the engines that fulfil it, each a file."""

from vllm_sparse_kernels.attention.engine import AttendSpec, Engine
from vllm_sparse_kernels.attention.flash import engine as flash_module
from vllm_sparse_kernels.attention.flash.engine import FlashAttention, flash_engine
from vllm_sparse_kernels.attention.hopper import engine as hopper
from vllm_sparse_kernels.attention.hopper.engine import HOPPER
from vllm_sparse_kernels.attention.portable import engine as portable
from vllm_sparse_kernels.attention.portable.engine import PORTABLE, shared_bytes, supports_bulk, widest_block
from vllm_sparse_kernels.engine_choice import Choice, choose
from vllm_sparse_kernels.index import LayerShape
from vllm_sparse_kernels.rows import Rows

__all__ = [
    "HOPPER",
    "PORTABLE",
    "AttendSpec",
    "Choice",
    "Engine",
    "FlashAttention",
    "choose",
    "engines",
    "flash_engine",
    "shared_bytes",
    "supports_bulk",
    "widest_block",
    "workspace_bytes",
]


def engines(flash: FlashAttention | None = None) -> dict[str, Engine]:
    """All engines by name, the fastest first. ``flash`` is the function that the engine of that name calls.

    Args:
        flash: FlashAttention's function, or None.
    """
    return {engine.name: engine for engine in (HOPPER, flash_engine(flash), PORTABLE)}


def workspace_bytes(
    rows: Rows, shape: LayerShape, stripe_capacity: int, longest_stripes: int, int8_scores: bool
) -> int:
    """At least what attention over these rows takes from the index's workspace, with whichever engine.

    ``stripe_capacity`` and ``longest_stripes``: positions that all lists of the index together, and the longest of
    them, have room for.

    Args:
        rows: the rows of a step.
        shape: the layer's heads and blocks.
        stripe_capacity: stripes of one head, of all tiles.
        longest_stripes: stripes that any tile may keep at most.
        int8_scores: whether any head has 8-bit scores.
    """
    by_portable = portable.workspace_bytes(rows, shape, int8_scores)
    if int8_scores:
        return by_portable
    by_hopper = hopper.workspace_bytes(rows, shape, stripe_capacity)
    return max(by_portable, by_hopper, flash_module.workspace_bytes(rows, shape, longest_stripes))
