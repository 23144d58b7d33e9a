# SPDX-License-Identifier: Apache-2.0
"""What torch.save wrote, read with weights-only loading, which makes tensors and containers and runs nothing else."""

import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch

from vllm_sparse_backend.profiling.outside import readable
from vllm_sparse_backend.settings.errors import ConfigurationError

MAX_BYTES = 16 << 20
"""Hundred times what thresholds of 80 layers and 64 heads take."""


def read(path: Path) -> Any:
    """The object in the file, its tensors on the CPU. Raises ``ConfigurationError`` if it holds anything else."""
    with readable(path, "tensors"):
        with zipfile.ZipFile(path) as archive:
            unpacked = sum(entry.file_size for entry in archive.infolist())
        if max(unpacked, path.stat().st_size) > MAX_BYTES:
            raise ConfigurationError(f"{path}: given {unpacked} bytes, expected at most {MAX_BYTES}")
        try:
            return torch.load(path, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError:  # whose message says how to load it all the same
            expected = "holds more than tensors, numbers and texts, which is not loaded"
            raise ConfigurationError(f"{path}: {expected}") from None


def table(tensor: Any, shape: tuple[int, ...], where: str) -> list[Any]:
    """The numbers of a tensor of that shape, as lists. Raises ValueError naming ``where``."""
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{where}: given {type(tensor).__name__}, expected a tensor {list(shape)}")
    if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_quantized or tensor.is_complex():
        raise ValueError(f"{where}: given a tensor that is not plain, expected numbers {list(shape)}")
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{where}: given a tensor {list(tensor.shape)}, expected {list(shape)}")
    numbers = tensor.detach().double()
    if not torch.isfinite(numbers).all():
        raise ValueError(f"{where}: given a number that is not finite, expected finite ones")
    return numbers.tolist()


def rounded(number: float) -> float:
    """A float32 as people wrote it: seven digits are all it has."""
    return float(f"{number:.7g}")
