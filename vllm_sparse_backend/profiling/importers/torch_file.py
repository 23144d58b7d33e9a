# SPDX-License-Identifier: Apache-2.0
"""What torch.save wrote, read with weights-only loading, which makes tensors and containers and runs nothing else."""

import pickle
import zipfile
from pathlib import Path
from typing import Any

from vllm_sparse_backend.settings.errors import ConfigurationError

MAX_BYTES = 16 << 20
"""Hundred times what thresholds of 80 layers and 64 heads take."""

ZIP = b"PK\x03\x04"
"""Begins files of torch 1.6 and later."""
PICKLE = b"\x80"
"""Begins those of torch before 1.6, a row of pickles; no text in UTF-8 begins so."""


def begins(path: Path, magic: bytes) -> bool:
    """False where the file cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(len(magic)) == magic
    except OSError:
        return False


def read(path: Path) -> Any:
    """The object in the file, its tensors on the CPU. Raises ``ConfigurationError`` if it holds anything else."""
    import torch

    try:
        with zipfile.ZipFile(path) as archive:
            unpacked = sum(entry.file_size for entry in archive.infolist())
        if max(unpacked, path.stat().st_size) > MAX_BYTES:
            raise ConfigurationError(f"{path}: given {unpacked} bytes, expected at most {MAX_BYTES}")
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        reason = next((line for line in str(error).splitlines() if "WeightsUnpickler error" in line), "")
        raise ConfigurationError(
            f"{path}: holds more than tensors, numbers and texts, which is not loaded {reason}"
        ) from None
    except ConfigurationError:
        raise
    except Exception as error:  # torch's reader and unpickler raise whatever a damaged file leads them to
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigurationError(f"{path}: not a whole file of torch.save: {reason:.200}") from None


def table(tensor: Any, shape: tuple[int, ...], where: str) -> list[Any]:
    """The numbers of a tensor of that shape, as lists. Raises ``ConfigurationError`` naming ``where``."""
    import torch

    if not isinstance(tensor, torch.Tensor):
        raise ConfigurationError(f"{where}: given {type(tensor).__name__}, expected a tensor {list(shape)}")
    if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_quantized or tensor.is_complex():
        raise ConfigurationError(f"{where}: given a tensor that is not plain, expected numbers {list(shape)}")
    if tuple(tensor.shape) != shape:
        raise ConfigurationError(f"{where}: given a tensor {list(tensor.shape)}, expected {list(shape)}")
    numbers = tensor.detach().double()
    if not torch.isfinite(numbers).all():
        raise ConfigurationError(f"{where}: given a number that is not finite, expected finite ones")
    return numbers.tolist()


def rounded(number: float) -> float:
    """A float32 as people wrote it: seven digits are all it has."""
    return float(f"{number:.7g}")
