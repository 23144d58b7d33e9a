# SPDX-License-Identifier: Apache-2.0
"""Checks of a method's parameters on the host, and copies of several heads' parameters on the device."""

from functools import lru_cache

import torch

from vllm_sparse_kernels.rows import to_device


def require(condition: bool, field: str, value: object, expected: str) -> None:
    """Raise ValueError, which names the field, the value and the expected values, unless ``condition`` is true."""
    if not condition:
        raise ValueError(f"{field}: given {value!r}, expected {expected}")


def require_blocks(field: str, value: object, block_tokens: int, least: int) -> None:
    """Raise ValueError unless a number of tokens is a whole number of blocks, of ``least`` tokens or more."""
    is_whole = isinstance(value, int) and value >= least and value % block_tokens == 0
    require(is_whole, field, value, f"a multiple of {block_tokens} >= {least}")


@lru_cache(maxsize=4096)
def on_device(values: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Copy parameters of heads to a tensor [len(values)] on the device, once in a process."""
    return to_device(values, torch.int32, device)
