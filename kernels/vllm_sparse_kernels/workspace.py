# SPDX-License-Identifier: Apache-2.0
"""``Workspace``: memory for intermediate tensors of selection and attention.

Tensors come from one buffer, whose size the host fixes beforehand, or from torch's allocator if there is no buffer.
Layers run one after the other on one stream, so each layer reuses the memory of the previous layer.
"""

from types import TracebackType

import torch

from vllm_sparse_kernels.rows import round_up

ALIGN_BYTES = 256
"""Alignment of every tensor: bulk copies and wide loads need 16 bytes, cache lines have 128."""

MAX_VIEWS = 4096
"""Maximum number of cached tensors of a buffer. All layers of a step request the same tensors, and the host looks a
tensor up faster than it creates a view."""


class Workspace:
    """An allocator of uninitialised tensors on one device. ``frame`` releases everything allocated inside of it.

    Attributes:
        device: Device of the tensors.
        buffer: [bytes] uint8, or None if torch allocates every tensor.
        used_bytes: Bytes that are allocated now.
        peak_bytes: Maximum of ``used_bytes`` so far.
    """

    def __init__(self, device: torch.device, buffer: torch.Tensor | None = None) -> None:
        self.device = device
        self.buffer = buffer
        self.used_bytes = 0
        self.peak_bytes = 0
        self._views: dict[tuple[int, torch.dtype, tuple[int, ...]], tuple[int, torch.Tensor]] = {}
        """Cached (end offset, tensor) by (begin offset, dtype, shape)."""

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Allocate a tensor. Raises MemoryError if the buffer has no room for it."""
        key = (self.used_bytes, dtype, shape)
        entry = self._views.get(key)
        if entry is None:
            entry = self._create(*key)
        self.used_bytes, tensor = entry
        if self.used_bytes > self.peak_bytes:
            self.peak_bytes = self.used_bytes
        return tensor

    def _create(self, begin: int, dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[int, torch.Tensor]:
        count = torch.Size(shape).numel()
        num_bytes = round_up(count * dtype.itemsize, ALIGN_BYTES)
        if self.buffer is None:
            return begin + num_bytes, torch.empty(shape, dtype=dtype, device=self.device)
        if begin + num_bytes > len(self.buffer):
            raise MemoryError(
                f"Workspace: given {dtype} {shape} of {num_bytes} bytes with {begin} bytes in use, expected at most "
                f"{len(self.buffer)} bytes in total"
            )
        if len(self._views) >= MAX_VIEWS:
            self._views.clear()
        with torch.inference_mode(False):  # a cached inference tensor could not be written outside of inference mode
            view = self.buffer[begin : begin + count * dtype.itemsize].view(dtype).view(shape)
        entry = begin + num_bytes, view
        self._views[begin, dtype, shape] = entry
        return entry

    def expect(self, num_bytes: int) -> None:
        """Count at least this much memory on top of what is in use.

        Work is divided into parts up to a size, and a part of these rows may be smaller than a part of shorter rows.
        """
        self.peak_bytes = max(self.peak_bytes, self.used_bytes + num_bytes)

    def frame(self) -> "Frame":
        """At the end of the ``with`` block, release all tensors allocated inside it; they become invalid."""
        return Frame(self)


class Frame:
    """Context of ``Workspace.frame``. Each layer enters several frames; a class takes half of a generator's time."""

    __slots__ = ("_used_bytes", "_workspace")

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace

    def __enter__(self) -> None:
        self._used_bytes = self._workspace.used_bytes

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._workspace.used_bytes = self._used_bytes
