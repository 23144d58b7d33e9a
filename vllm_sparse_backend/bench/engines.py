"""The engines that attend over an index, fastest first. The one place here that knows them."""

from collections.abc import Mapping
from typing import Protocol

import torch

from vllm_sparse_kernels import AttendOptions, PagedCache, SparseIndex
from vllm_sparse_kernels.attend import attend


class Attend(Protocol):
    def __call__(
        self,
        q: torch.Tensor,
        cache: PagedCache,
        index: SparseIndex,
        out: torch.Tensor,
        scale: float,
        *,
        options: AttendOptions | None = None,
    ) -> None: ...


ENGINES: Mapping[str, Attend] = {"portable": attend}


def refusal(engine: str, cache: PagedCache, index: SparseIndex, options: AttendOptions | None = None) -> str | None:
    """Why an engine cannot attend over such an index; None if it can."""
    return None


def default_engine(cache: PagedCache, index: SparseIndex, options: AttendOptions | None = None) -> str:
    """The engine that a server takes for such an index, unless told: its figures are the project's."""
    return next(name for name in ENGINES if refusal(name, cache, index, options) is None)
