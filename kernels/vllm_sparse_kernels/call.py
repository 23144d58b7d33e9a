# SPDX-License-Identifier: Apache-2.0
"""``Call``: the arguments of selection and attention of a layer in a step. ``HeadGroup``: heads and their methods."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

import torch

from vllm_sparse_kernels.compile_time import LOG2_E
from vllm_sparse_kernels.index import SparseIndex
from vllm_sparse_kernels.paged import KeyArgs, PagedCache, key_args
from vllm_sparse_kernels.rows import Rows, to_device
from vllm_sparse_kernels.workspace import Workspace

MOST = 1 << 24
"""Maximum of whole numbers among parameters on the device. They are float32, which represents all integers up to it."""

MethodT = TypeVar("MethodT", covariant=True)
T = TypeVar("T")


@dataclass(frozen=True)
class HeadGroup(Generic[MethodT]):
    """Query heads of this rank that are selected together, and the method of each.

    The methods differ at most in the fields that their class lists in ``differing``.
    """

    heads: tuple[int, ...]
    methods: tuple[MethodT, ...]

    def __len__(self) -> int:
        return len(self.heads)

    @property
    def method(self) -> MethodT:
        """The first head's method, for the parameters that all heads share."""
        return self.methods[0]

    @property
    def pairs(self) -> Iterator[tuple[int, MethodT]]:
        """Each head with its method."""
        return zip(self.heads, self.methods, strict=True)

    def ids(self, device: torch.device) -> torch.Tensor:
        """Return the numbers of the heads, [n] int32 on the device."""
        return self._once(device, lambda: to_device(self.heads, torch.int32, device))

    def parameters(self, names: tuple[str, ...], device: torch.device) -> torch.Tensor:
        """Return attributes of each head's method, [len(names) · n] float32 on the device, attribute by attribute."""

        def make() -> torch.Tensor:
            values = (getattr(method, name) for name in names for method in self.methods)
            limited = [min(value, MOST) if isinstance(value, int) else value for value in values]
            return to_device(limited, torch.float32, device)

        return self._once((names, device), make)

    def derived(self, name: str) -> "HeadGroup[Any]":
        """Return the same heads with methods that are an attribute of these methods."""
        return self._once(name, lambda: HeadGroup(self.heads, tuple(getattr(m, name) for m in self.methods)))

    @cached_property
    def _results(self) -> dict[Any, Any]:
        return {}

    def _once(self, key: Any, make: Callable[[], T]) -> T:
        """Return what ``make`` has returned for this key. Each tensor is copied to the device once."""
        if key not in self._results:
            self._results[key] = make()
        return self._results[key]


NO_HEADS: HeadGroup[Any] = HeadGroup((), ())


@dataclass(frozen=True, eq=False)
class Call:
    """Arguments of selection or attention of a layer in a step.

    Attributes:
        q: [num_tokens, num_heads, head_dim] queries of the step, in the cache's dtype.
        index: The layer's index. Selection fills the lists of ``heads``, and attention reads all lists. A
            new index has no stripes, and methods that keep only blocks rely on that.
        scale: Factor from q·k to scores: the softmax's scale times ``cache.score_scale``. Usually 1/√head_dim.
        heads: The heads to select. Attention covers all heads, and does not read it.
    """

    q: torch.Tensor
    cache: PagedCache
    index: SparseIndex
    scale: float
    heads: HeadGroup[Any] = NO_HEADS

    @property
    def rows(self) -> Rows:
        return self.index.rows

    @property
    def workspace(self) -> Workspace:
        return self.index.workspace

    @property
    def key_args(self) -> KeyArgs:
        """Keys as arguments of kernels."""
        return key_args(self.cache, self.rows.block_table)

    @property
    def scale_in_base_2(self) -> float:
        """Factor from q·k to scores as logarithms to base 2."""
        return self.scale * LOG2_E.value

    @property
    def num_selected(self) -> int:
        """Number of ``heads``, n in shapes of kernels."""
        return len(self.heads)

    @property
    def method(self) -> Any:
        """Method of the first head, for the parameters that all ``heads`` share."""
        return self.heads.method

    @property
    def head_ids(self) -> torch.Tensor:
        """[n] int32 on the device: numbers of ``heads``."""
        return self.heads.ids(self.q.device)

    @property
    def group(self) -> int:
        """Query heads that share a kv head."""
        return self.q.shape[1] // self.cache.num_kv_heads

    def parameters(self, *names: str) -> torch.Tensor:
        """Return attributes of the methods of ``heads``: see ``HeadGroup.parameters``."""
        return self.heads.parameters(names, self.q.device)
