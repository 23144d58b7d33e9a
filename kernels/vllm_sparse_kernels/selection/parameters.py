# SPDX-License-Identifier: Apache-2.0
"""Checks of a method's parameters on the host, and copies of several heads' parameters on the device."""

from functools import lru_cache

import torch

from vllm_sparse_kernels.rows import to_device


def require(condition: bool, field: str, value: object, expected: str) -> None:
    """Check one parameter of a method.

    Args:
        condition: Whether the value is valid.
        field: Name of the parameter.
        value: The value.
        expected: Description of valid values, for the error message.

    Raises:
        ValueError: ``condition`` is false. The message names the field, the value and the expected values.
    """
    if not condition:
        raise ValueError(f"{field}: given {value!r}, expected {expected}")


@lru_cache(maxsize=4096)
def on_device(values: tuple[float, ...], device: torch.device, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Copy parameters of heads to the device, once in a process.

    Args:
        values: One value for each head.
        device: Device of the tensors.
        dtype: Type of the result.

    Returns:
        [len(values)].
    """
    return to_device(values, dtype, device)
