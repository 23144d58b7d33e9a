# SPDX-License-Identifier: Apache-2.0
"""Numbers, tensors in registers, and places in memory, as the functions of a kernel have them."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tests.kernels.warps.schedule import Scheduler, Warp

COLUMNS = 64
"""Of a part of a matrix in shared memory: parts lie one after the other, as swizzles of 128 bytes have it."""


class Value:
    """A number, or a warp's part of a tensor."""

    def __init__(self, data: Any) -> None:
        self.data = data.data if isinstance(data, Value) else data

    def to(self, dtype: Any) -> "Value":
        return Value(np.asarray(self.data).astype(dtype))

    def __getitem__(self, places: Any) -> "Value":
        return Value(self.data[places])

    def __index__(self) -> int:
        return int(self.data)

    def __bool__(self) -> bool:
        return bool(self.data)

    @property
    def type(self) -> SimpleNamespace:
        return SimpleNamespace(layout=Layout())


def bare(x: Any) -> Any:
    return x.data if isinstance(x, Value) else x


def _add_operators() -> None:
    arithmetic, comparisons = ("add", "sub", "mul", "truediv", "floordiv", "mod"), ("lt", "le", "gt", "ge", "eq", "ne")
    for name in (*arithmetic, *comparisons, "and_", "or_", "xor"):
        of = getattr(operator, name)
        python = name.rstrip("_")
        setattr(Value, f"__{python}__", lambda a, b, of=of: Value(of(np.asarray(a.data), bare(b))))
        setattr(Value, f"__r{python}__", lambda a, b, of=of: Value(of(bare(b), np.asarray(a.data))))


_add_operators()


class Layout:
    """Any; ``dim`` is the dimension that a slice leaves out."""

    def __init__(self, *_: Any) -> None:
        self.parent = self

    @staticmethod
    def get_default_for(*_: Any) -> "Layout":
        return Layout()


class SliceLayout(Layout):
    def __init__(self, dim: int, parent: Layout) -> None:
        super().__init__()
        self.dim = dim


class Pointer:
    """Places in a tensor's memory."""

    def __init__(self, memory: np.ndarray, places: Any = 0) -> None:
        self.memory, self.places = memory, Value(places)
        self.dtype = SimpleNamespace(element_ty=memory.dtype)

    @staticmethod
    def to(tensor: torch.Tensor) -> "Pointer":
        whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
        return Pointer(whole.numpy(), tensor.storage_offset())

    def __add__(self, more: Any) -> "Pointer":
        return Pointer(self.memory, self.places + more)

    def read(self, mask: Any = True, other: Any = 0) -> np.ndarray:
        places, wanted = np.broadcast_arrays(self.places.data, bare(mask))
        assert (places[wanted] >= 0).all()
        assert (places[wanted] < len(self.memory)).all()
        return np.where(wanted, self.memory[np.where(wanted, places, 0)], bare(other))


@dataclass
class Matrix:
    """A tensor descriptor: boxes of a matrix in memory, zero where they reach past its end."""

    base: torch.Tensor
    shape: list[int]
    strides: list[int]
    box: list[int]
    layout: object = None

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(np.float16)

    def read(self, row: int, column: int) -> np.ndarray:
        matrix = torch.as_strided(self.base, self.shape, self.strides).numpy()
        assert row >= 0
        assert 0 <= column <= self.shape[1] - self.box[1]
        found = np.zeros(self.box, matrix.dtype)
        inside = matrix[row : row + self.box[0], column : column + self.box[1]]
        found[: len(inside)] = inside
        return found


class Shared:
    """Shared memory seen as tensors, one after the other; of matrices each 64 columns lie together."""

    def __init__(self, scheduler: Scheduler, memory: np.ndarray, shape: Sequence[int], is_turned: bool = False) -> None:
        self.scheduler, self.memory, self.shape, self.is_turned = scheduler, memory, tuple(shape), is_turned
        self.dtype = memory.dtype

    def index(self, i: Any) -> "Shared":
        size, i = int(np.prod(self.shape[1:])), operator.index(i)
        assert 0 <= i < self.shape[0]
        return self.seen_as(self.shape[1:], self.memory[i * size : (i + 1) * size])

    def permute(self, order: tuple[int, int]) -> "Shared":
        assert order == (1, 0)
        return Shared(self.scheduler, self.memory, self.shape, is_turned=True)

    def seen_as(self, shape: Sequence[int], memory: np.ndarray | None = None) -> "Shared":
        return Shared(self.scheduler, self.memory if memory is None else memory, shape)

    def parts(self) -> np.ndarray:
        """[rows, parts, columns of a part], a view."""
        rows, columns = self.shape
        return self.memory.reshape(columns // COLUMNS, rows, COLUMNS).transpose(1, 0, 2)

    def matrix(self) -> np.ndarray:
        found = self.parts().reshape(self.shape)
        return found.T if self.is_turned else found

    def load(self, layout: Layout) -> Value:
        """By warps: of a matrix each its rows."""
        warp = self._warp()
        return Value(self.memory.copy() if len(self.shape) == 1 else self.matrix()[warp.part(self.shape[0])])

    def store(self, value: Value) -> None:
        warp = self._warp()
        if len(self.shape) == 1:
            self.memory[...] = value.data
        else:
            self.fill(warp.part(self.shape[0]), value.data)

    def _warp(self) -> Warp:
        warp = self.scheduler.running
        assert warp is not None
        warp.pause()
        return warp

    def fill(self, rows: slice, data: Any) -> None:
        parts = self.parts()[rows]
        parts[...] = data if np.ndim(data) == 0 else np.reshape(data, parts.shape)
