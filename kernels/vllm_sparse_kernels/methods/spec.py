# SPDX-License-Identifier: Apache-2.0
"""``MethodSpec``: the description of a method. Everything that lists methods reads it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from vllm_sparse_kernels.call import Call
from vllm_sparse_kernels.methods.base import Method


@dataclass(frozen=True)
class MethodSpec:
    """A method and its name in configurations and profiles.

    Each method's folder has its descriptions in ``SPECS``. Other packages provide a description, or a tuple of them, as
    an entry point of the group ``vllm_sparse_backend.methods`` (docs/adding_a_method.md).

    Attributes:
        name: Name in configurations and profiles.
        parameters: Class of the method's parameters, whose ``select`` runs on a GPU.
        reference: The same selection in float32 torch, on any device.
        full: Parameters with which the method keeps every causal key of a row of any length, so that attention is
            dense.
        demo: Parameters for prompts of a few thousand tokens and small models. They are low enough that some keys are
            left out even with random weights, whose attention is spread out. They are not meant for real models.
        ladder: Parameters from the sparsest useful setting to one that is nearly lossless; searches choose from them.
            Empty for methods whose heads depend on other layers.
    """

    name: str
    parameters: type[Method]
    reference: Callable[[Call], None]
    full: Method
    demo: Mapping[str, object] = field(default_factory=dict)
    ladder: tuple[Mapping[str, object], ...] = ()
