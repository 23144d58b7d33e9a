# SPDX-License-Identifier: Apache-2.0
"""The description of a method: what whoever lists methods has to know of one, said once, in the method's own folder."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from vllm_sparse_kernels.methods.base import Method


@dataclass(frozen=True)
class MethodSpec:
    """One method, under the name by which configurations and profiles call it.

    A folder holds its own in ``SPECS``. Another package gives one, or a tuple of them, as an entry point of the group
    ``vllm_sparse_backend.methods`` (docs/adding_a_method.md).
    """

    name: str

    parameters: type[Method]
    """The class of its parameters, which select on a GPU."""

    reference: Callable[..., None]
    """The same selection in float32 torch, on any device: (method, q, cache, index, heads, scale), as ``select``."""

    full: Method
    """Parameters at which it keeps every causal key, however long the row: attention is then dense."""

    demo: Mapping[str, object] = field(default_factory=dict)
    """Parameters for prompts of a few thousand tokens and small models, low enough that it leaves out some keys even
    where random weights spread attention wide. They say nothing of real models."""

    ladder: tuple[Mapping[str, object], ...] = ()
    """Parameters from the sparsest setting to one that loses next to nothing: what a search chooses from."""

    cost: float = 0.1
    """What its selection takes where nothing is measured, as a share of the time of dense attention."""
