# SPDX-License-Identifier: Apache-2.0
"""The contract between a layer and what selects for it: ``queries, cache → lists of a SparseIndex``.

Most methods have one engine, their ``select``. A method with faster kernels for some card lists several
(``Method.select_engines``). They differ in speed and in rounding, in nothing else. Each says with a reason which layers
it cannot serve; one is chosen for each layer at start-up, by ``refusal`` and by a trial against the last of the list
(``trial.selection_failure``). From then on nothing is caught and nothing is exchanged: what an engine raises in a step,
out-of-memory included, surfaces.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from vllm_sparse_kernels.engine_choice import Choice, capability_of, choose
from vllm_sparse_kernels.index import SparseIndex
from vllm_sparse_kernels.paged import PagedCache

if TYPE_CHECKING:
    from vllm_sparse_kernels.methods.base import Method

PORTABLE = "portable"
"""Name of the engine that runs wherever Triton does: the last of every method."""

HOPPER = (9, 0)
"""Compute capability of H100 and H200."""


@dataclass(frozen=True)
class SelectSpec:
    """What is known of a layer's selection before the first step."""

    method: "Method"
    device: torch.device
    head_dim: int

    @property
    def capability(self) -> tuple[int, int]:
        """The device's compute capability; (0, 0) where it is no CUDA device."""
        return capability_of(self.device)


class Select(Protocol):
    """Fill the lists of ``heads`` as ``Method.select`` describes; the method comes first."""

    def __call__(
        self, method: Any, /, q: torch.Tensor, cache: PagedCache, index: SparseIndex, heads: torch.Tensor, scale: float
    ) -> None: ...


@dataclass(frozen=True)
class SelectEngine:
    """One way to run a method's selection."""

    name: str
    refusal: Callable[[SelectSpec], str | None]
    """Why the engine cannot select for a layer, in words that end a sentence; None if it can."""

    select: Select


def never_refuses(spec: SelectSpec) -> None:
    """The refusal of an engine that runs wherever Triton does."""


def choose_select_engine(
    spec: SelectSpec, trial: Callable[[SelectEngine], str | None] | None = None
) -> Choice[SelectEngine]:
    """The engine that selects for a layer of that spec.

    Args:
        spec: The layer's method, device and head dim.
        trial: What is wrong with an engine's selection, or None; without it only refusals decide.

    Returns:
        The first of ``spec.method.select_engines`` that passes, and why each one before it does not.

    Raises:
        ValueError: None is left; the message has the reason of each.
    """
    engines = {engine.name: engine for engine in spec.method.select_engines}
    return choose(engines, spec, trial=trial, work="selection")
