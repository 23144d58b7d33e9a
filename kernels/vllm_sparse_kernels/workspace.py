# SPDX-License-Identifier: Apache-2.0
"""Room for what selection and attention keep between two of their launches.

Tensors are handed out from one buffer whose size the host fixes beforehand, or, without one, from torch's allocator.
Layers run one after the other on one stream: what a layer took, the next one gets again.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

ALIGN_BYTES = 256
"""Every tensor begins at a multiple of this: bulk copies and wide loads want 16, cache lines 128."""

MOST_VIEWS = 4096
"""Tensors over a buffer that are remembered: a step's layers ask for the same ones, and a view costs the host more than
a look-up."""

SPARE_BYTES = 16 << 10
"""What bounds add to what they count, as each of a few dozen tensors is filled up to ``ALIGN_BYTES``."""


class Workspace:
    """Hands out uninitialised tensors on one device; ``frame`` takes back all that was handed out within it.

    buffer: [bytes] uint8, or None to ask torch for every tensor. ``peak_bytes`` is the most that was out at a time.
    """

    def __init__(self, device: torch.device, buffer: torch.Tensor | None = None) -> None:
        self.device = device
        self.buffer = buffer
        self.used_bytes = 0
        self.peak_bytes = 0
        self._views: dict[tuple[int, torch.dtype, tuple[int, ...]], tuple[int, torch.Tensor]] = {}
        """By where a tensor begins, of what and of which shape: where it ends, and itself."""

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """An uninitialised contiguous tensor. Raises MemoryError where the buffer has no room left for it."""
        key = (self.used_bytes, dtype, shape)
        if (known := self._views.get(key)) is None:
            known = self._made(*key)
        self.used_bytes, made = known
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        return made

    def _made(self, begin: int, dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[int, torch.Tensor]:
        num_bytes = padded_bytes(*shape, dtype=dtype)
        if self.buffer is None:
            return begin + num_bytes, torch.empty(shape, dtype=dtype, device=self.device)
        if begin + num_bytes > len(self.buffer):
            raise MemoryError(
                f"Workspace: {num_bytes} bytes for {dtype} {shape}, {begin} used, the buffer has {len(self.buffer)}"
            )
        if len(self._views) >= MOST_VIEWS:
            self._views.clear()
        count = torch.Size(shape).numel()
        with torch.inference_mode(False):  # whoever asks first, all may write
            view = self.buffer[begin : begin + count * dtype.itemsize].view(dtype).view(shape)
        self._views[begin, dtype, shape] = begin + num_bytes, view
        return self._views[begin, dtype, shape]

    @contextmanager
    def frame(self) -> Iterator[None]:
        """What is handed out within is free again after. Its tensors must not be used any more then."""
        mark = self.used_bytes
        try:
            yield
        finally:
            self.used_bytes = mark


def padded_bytes(*shape: int, dtype: torch.dtype = torch.float32) -> int:
    """What ``Workspace.empty`` of this shape takes up."""
    return -(-torch.Size(shape).numel() * dtype.itemsize // ALIGN_BYTES) * ALIGN_BYTES
