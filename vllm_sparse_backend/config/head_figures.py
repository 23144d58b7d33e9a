# SPDX-License-Identifier: Apache-2.0
"""Measured figures of each head, as stored in a profile's ``provenance.figures``.

Each figure maps a layer to one number per query head of the model. Dense layers, which have no numbers, are left
out:

    figures:
      density: {1: [0.123, 0.05, 1.0, 0.3], 2: [0.1, 0.1, 0.2, 0.1]}
      error: {1: [0.01, 0.02, 0.0, 0.03], 2: [0.0, 0.0, 0.0, 0.0]}

Numbers have four significant digits: those of a model with 32 layers and 32 heads take about 20 kB.
"""

from collections.abc import Sequence
from typing import Annotated

from pydantic import AfterValidator, Field, StrictFloat

from vllm_sparse_backend.config.errors import Section
from vllm_sparse_backend.config.model_shape import ModelShape

PerHead = Sequence[Sequence[float] | None]
"""Per layer, one number for each head, or None for a layer without numbers."""

LayerNumber = Annotated[int, Field(strict=False, ge=0)]  # a key of JSON is a text
Rounded = AfterValidator(lambda number: float(f"{number:.4g}"))
Fraction = Annotated[StrictFloat, Field(ge=0, le=1), Rounded]
Amount = Annotated[StrictFloat, Field(ge=0, allow_inf_nan=False), Rounded]


class HeadFigures(Section):
    """Measured figures of each head, by layer. Layers and heads are those of the whole model."""

    density: dict[LayerNumber, tuple[Fraction, ...]] = Field(default={})
    """Kept (query, key) pairs over causal pairs, mean over the prompts."""

    error: dict[LayerNumber, tuple[Amount, ...]] = Field(default={})
    """Mean over queries of ‖o − õ‖₁ / ‖o‖₁, where o is a query's output under dense attention; maximum over the
    prompts."""

    p99_error: dict[LayerNumber, tuple[Amount, ...]] = Field(default={})
    """99th percentile over queries of the same error."""

    @staticmethod
    def of_heads(**figures: PerHead) -> "HeadFigures":
        """Build the figures from lists by layer and head."""
        return HeadFigures.model_validate(
            {
                name: {layer: numbers for layer, numbers in enumerate(layers) if numbers is not None}
                for name, layers in figures.items()
            }
        )

    def rows(self, name: str, shape: ModelShape) -> list[tuple[float, ...] | None]:
        """Return the numbers of one figure as a list by layer."""
        return [getattr(self, name).get(layer) for layer in range(shape.num_layers)]
