# SPDX-License-Identifier: Apache-2.0
"""A level of an attention layer: how the layer runs the rows of requests at that level."""

from dataclasses import dataclass

from vllm_sparse_kernels.layer import Layer


@dataclass(frozen=True)
class LayerLevel:
    """One layer at one level.

    Attributes:
        layer: Methods of the heads at this level, and the engines that they run on.
        stays_dense: Whether the plan of this level leaves the layer dense. ``layer`` then keeps all pairs. It runs only
            in steps that also have rows of another level at which the layer runs sparse.
    """

    layer: Layer
    stays_dense: bool = False
