# SPDX-License-Identifier: Apache-2.0
"""What calibration measured of each head, as a profile's ``provenance.figures`` has it.

Per figure, layers as keys and a list with one number for each query head of the model, or a single number where all
heads of those layers have it. Layers without numbers (dense ones) are left out:

    figures:
      density: {0: 1.0, 1: [0.123, 0.05, 1.0, 0.3], 2-3: [0.1, 0.1, 0.2, 0.1]}
      error: {1: [0.01, 0.02, 0.0, 0.03], 2-3: 0.004}

Numbers have four significant digits, so that a model of 32 layers and 32 heads takes some 20 kB. All that knows how
they are written is here: ``HeadFigures.of_heads`` makes them from plain lists, ``rows`` gives these back.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Annotated

from pydantic import (
    BeforeValidator,
    Field,
    PlainSerializer,
    StrictFloat,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from vllm_sparse_backend.settings.errors import Section, unexpected
from vllm_sparse_backend.settings.model_shape import ModelShape
from vllm_sparse_backend.settings.ranges import DisjointRanges, Ranges, format_ranges

logger = logging.getLogger(__name__)

PerHead = Sequence[Sequence[float] | None]
"""Per layer a number for each head; None for a layer without."""


def _as_list(given: object) -> object:
    return given if isinstance(given, list | tuple) else [given]


Written = PlainSerializer(lambda numbers: numbers[0] if len(numbers) == 1 else numbers)


def _schema(**limits: int) -> WithJsonSchema:
    number = {"type": "number", "minimum": 0, **limits}
    return WithJsonSchema({"anyOf": [number, {"type": "array", "items": number, "minItems": 1}]})


Fraction = Annotated[StrictFloat, Field(ge=0, le=1)]
Amount = Annotated[StrictFloat, Field(ge=0, allow_inf_nan=False)]
Fractions = Annotated[tuple[Fraction, ...], BeforeValidator(_as_list), Written, Field(min_length=1), _schema(maximum=1)]
Amounts = Annotated[tuple[Amount, ...], BeforeValidator(_as_list), Written, Field(min_length=1), _schema()]


RENAMED = {"worst_error": "p99_error"}
"""Names by which figures went before: they are read for one more release."""


class HeadFigures(Section):
    """Measured figures of each head, by layers; heads and layers are the whole model's."""

    density: Annotated[dict[Ranges, Fractions], DisjointRanges] = Field(default={})
    """Kept (query, key) pairs over causal pairs, mean over the prompts."""

    error: Annotated[dict[Ranges, Amounts], DisjointRanges] = Field(default={})
    """Mean over queries of ‖o − õ‖₁ / ‖o‖₁, o a query's output under dense attention; the largest of a prompt."""

    p99_error: Annotated[dict[Ranges, Amounts], DisjointRanges] = Field(default={})
    """What a hundredth of the queries has more of."""

    @model_validator(mode="before")
    @classmethod
    def _by_new_names(cls, given: object) -> object:
        if not isinstance(given, Mapping):
            return given
        old = [name for name in RENAMED if name in given and RENAMED[name] not in given]
        for name in old:
            logger.warning("figures: %s is called %s now; the next release refuses the old name", name, RENAMED[name])
        return {RENAMED[name] if name in old else name: value for name, value in given.items()}

    @field_validator("*")
    @classmethod
    def _rounded(cls, given: dict[tuple[int, ...], tuple[float, ...]]) -> dict[tuple[int, ...], tuple[float, ...]]:
        rounded = {layers: tuple(float(f"{one:.4g}") for one in numbers) for layers, numbers in given.items()}
        return {layers: numbers[:1] if len(set(numbers)) == 1 else numbers for layers, numbers in rounded.items()}

    @staticmethod
    def of_heads(**figures: PerHead) -> "HeadFigures":
        """From each figure's numbers by layer and head."""
        return HeadFigures.model_validate(
            {name: {i: of for i, of in enumerate(layers) if of is not None} for name, layers in figures.items()}
        )

    def rows(self, name: str, shape: ModelShape) -> list[list[float] | None]:
        """The numbers of one figure by layer and head; None for a layer without."""
        known = {layer: numbers for layers, numbers in getattr(self, name).items() for layer in layers}
        layers = (known.get(layer) for layer in range(shape.num_layers))
        return [None if row is None else list(row * shape.num_heads if len(row) == 1 else row) for row in layers]

    def out_of_range(self, shape: ModelShape) -> list[str]:
        """What does not fit a model of that shape: layers past its last, lists of another length than its heads."""
        problems = []
        entries = [(name, *entry) for name in HeadFigures.model_fields for entry in getattr(self, name).items()]
        for name, layers, numbers in entries:
            place = f"{name}.{format_ranges(layers)}"
            if layers and layers[-1] >= shape.num_layers:
                problems.append(f"{place}: {unexpected(layers[-1], f'at most {shape.num_layers - 1}')}")
            if len(numbers) not in (1, shape.num_heads):
                expected = f"one for each of the {shape.num_heads} heads"
                problems.append(f"{place}: given {len(numbers)} numbers, expected {expected}")
        return problems
