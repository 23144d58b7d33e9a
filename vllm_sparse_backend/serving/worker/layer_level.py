# SPDX-License-Identifier: Apache-2.0
"""A level of an attention layer: how the layer runs the rows of requests at that level."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from vllm_sparse_kernels.layer import Layer


@dataclass(frozen=True)
class LayerLevel:
    """One layer at one level."""

    layer: Layer
    stays_dense: bool = False
    streaming_layer: Layer | None = None

    @property
    def layers(self) -> tuple[Layer, ...]:
        """``layer``, and ``streaming_layer`` if there is one."""
        return (self.layer,) if self.streaming_layer is None else (self.layer, self.streaming_layer)

    def map_layers(self, function: Callable[[Layer], Layer]) -> "LayerLevel":
        """Apply a function to each of ``layers``."""
        streaming = None if self.streaming_layer is None else function(self.streaming_layer)
        return replace(self, layer=function(self.layer), streaming_layer=streaming)
