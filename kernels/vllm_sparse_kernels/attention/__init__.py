# SPDX-License-Identifier: Apache-2.0
"""Attention over a ``SparseIndex``: the interface (``engine.py``) and one folder for each engine."""

from vllm_sparse_kernels.attention.engine import AttendEngine, AttendSpec
from vllm_sparse_kernels.attention.flash import engine as flash_module
from vllm_sparse_kernels.attention.flash.engine import FlashAttention, flash_engine
from vllm_sparse_kernels.attention.hopper import engine as hopper
from vllm_sparse_kernels.attention.hopper.engine import HOPPER
from vllm_sparse_kernels.attention.portable import engine as portable
from vllm_sparse_kernels.attention.portable.engine import PORTABLE, supports_bulk, widest_block
from vllm_sparse_kernels.cards import shared_bytes
from vllm_sparse_kernels.engine_choice import EngineChoice, choose_engine
from vllm_sparse_kernels.index import LayerShape
from vllm_sparse_kernels.rows import Rows

__all__ = [
    "HOPPER",
    "PORTABLE",
    "AttendEngine",
    "AttendSpec",
    "EngineChoice",
    "FlashAttention",
    "choose_engine",
    "engines",
    "flash_engine",
    "shared_bytes",
    "supports_bulk",
    "widest_block",
    "workspace_bytes",
]


def engines(flash: FlashAttention | None = None) -> dict[str, AttendEngine]:
    """Return all engines by name, fastest first.

    Args:
        flash: FlashAttention's function for this device, which the engine ``flash`` calls; None if there is none.
    """
    return {engine.name: engine for engine in (HOPPER, flash_engine(flash), PORTABLE)}


def workspace_bytes(
    rows: Rows, shape: LayerShape, stripe_capacity: int, longest_stripes: int, int8_scores: bool
) -> int:
    """Return an upper bound of the workspace memory that attention over these rows needs, with any engine.

    Args:
        rows: The rows of a step.
        shape: Sizes of the layer.
        stripe_capacity: Positions of all lists of stripes of all heads.
        longest_stripes: Capacity of the longest list of stripes, in positions.
        int8_scores: Whether any head has 8-bit scores.
    """
    by_portable = portable.workspace_bytes(rows, shape, int8_scores)
    if int8_scores:
        return by_portable
    by_hopper = hopper.workspace_bytes(rows, shape, stripe_capacity)
    return max(by_portable, by_hopper, flash_module.workspace_bytes(rows, shape, longest_stripes))
