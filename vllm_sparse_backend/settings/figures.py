# SPDX-License-Identifier: Apache-2.0
"""What calibration measured of each head, as a profile's ``provenance.figures`` has it.

Per figure and layer one number for each query head of the model; layers without numbers (dense ones) are left out:

    figures:
      density: {1: [0.123, 0.05, 1.0, 0.3], 2: [0.1, 0.1, 0.2, 0.1]}
      error: {1: [0.01, 0.02, 0.0, 0.03], 2: [0.0, 0.0, 0.0, 0.0]}

Numbers have four significant digits, so that a model of 32 layers and 32 heads takes some 20 kB.
"""

from collections.abc import Sequence
from typing import Annotated

from pydantic import AfterValidator, Field, StrictFloat, StrictInt

from vllm_sparse_backend.settings.errors import Section, unexpected
from vllm_sparse_backend.settings.model_shape import ModelShape

PerHead = Sequence[Sequence[float] | None]
"""Per layer a number for each head; None for a layer without."""

Layer = Annotated[StrictInt, Field(ge=0)]
Rounded = AfterValidator(lambda number: float(f"{number:.4g}"))
Fraction = Annotated[StrictFloat, Field(ge=0, le=1), Rounded]
Amount = Annotated[StrictFloat, Field(ge=0, allow_inf_nan=False), Rounded]


class HeadFigures(Section):
    """Measured figures of each head, by layer; heads and layers are the whole model's."""

    density: dict[Layer, tuple[Fraction, ...]] = Field(default={})
    """Kept (query, key) pairs over causal pairs, mean over the prompts."""

    error: dict[Layer, tuple[Amount, ...]] = Field(default={})
    """Mean over queries of ‖o − õ‖₁ / ‖o‖₁, o a query's output under dense attention; the largest of a prompt."""

    p99_error: dict[Layer, tuple[Amount, ...]] = Field(default={})
    """What a hundredth of the queries has more of."""

    @staticmethod
    def of_heads(**figures: PerHead) -> "HeadFigures":
        """From each figure's numbers by layer and head."""
        return HeadFigures.model_validate(
            {name: {i: of for i, of in enumerate(layers) if of is not None} for name, layers in figures.items()}
        )

    def rows(self, name: str, shape: ModelShape) -> list[tuple[float, ...] | None]:
        """The numbers of one figure by layer and head; None for a layer without."""
        return [getattr(self, name).get(layer) for layer in range(shape.num_layers)]

    def out_of_range(self, shape: ModelShape) -> list[str]:
        """What does not fit a model of that shape: layers past its last, lists of another length than its heads."""
        problems = []
        for name, layer, numbers in [(name, *of) for name, layers in self for of in layers.items()]:
            if layer >= shape.num_layers:
                problems.append(f"{name}.{layer}: {unexpected(layer, f'at most {shape.num_layers - 1}')}")
            if len(numbers) != shape.num_heads:
                expected = f"one for each of the {shape.num_heads} heads"
                problems.append(f"{name}.{layer}: given {len(numbers)} numbers, expected {expected}")
        return problems
