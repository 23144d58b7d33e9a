# SPDX-License-Identifier: Apache-2.0
"""Attention over a ``SparseIndex``: the interface (``engine.py``) and one folder for each engine."""

from vllm_sparse_kernels.attention.engine import AttendEngine, AttendSpec
from vllm_sparse_kernels.attention.flash.engine import FlashAttention, flash_engine
from vllm_sparse_kernels.attention.hopper.engine import HOPPER
from vllm_sparse_kernels.attention.portable.engine import PORTABLE, widest_block

__all__ = [
    "HOPPER",
    "PORTABLE",
    "AttendEngine",
    "AttendSpec",
    "FlashAttention",
    "engines",
    "flash_engine",
    "widest_block",
]


def engines(flash: FlashAttention | None = None) -> dict[str, AttendEngine]:
    """Return all engines by name, fastest first. ``flash`` is FlashAttention's function for this device, if any."""
    return {engine.name: engine for engine in (HOPPER, flash_engine(flash), PORTABLE)}
