# SPDX-License-Identifier: Apache-2.0
"""What a profile says, as rows of tables."""

from collections import Counter, defaultdict
from collections.abc import Sequence

from vllm_sparse_backend.settings.figures import Figures
from vllm_sparse_backend.settings.model_shape import ModelShape
from vllm_sparse_backend.settings.profile import Level
from vllm_sparse_backend.settings.ranges import format_ranges
from vllm_sparse_kernels.methods import name_of
from vllm_sparse_kernels.methods.base import Method

DENSE_LAYER = "dense layer"
"""What heads of ``dense_layers`` do: they never reach a method."""


def layer_rows(level: Level, shape: ModelShape) -> list[tuple[str, ...]]:
    """Layers, their heads by method, how many settings these have, mean density and the worst head's error.

    A row for neighbours that are alike in all of it.
    """
    figures = level.provenance.figures or Figures()
    densities, errors = (figures.rows(name, shape) for name in ("density", "error"))
    rows: list[tuple[list[int], tuple[str, ...]]] = []
    for layer, methods in enumerate(_methods(level, shape)):
        counts = Counter(_name(method) for method in methods).most_common()
        density, error = densities[layer], errors[layer]
        row = (
            ", ".join(f"{count} {name}" for name, count in counts),
            f"{len(set(methods))}",
            f"{sum(density) / len(density):.4g}" if density else "",
            f"{max(error):.4g}" if error else "",
        )
        if rows and rows[-1][1] == row:
            rows[-1][0].append(layer)
        else:
            rows.append(([layer], row))
    return [(format_ranges(layers), *row) for layers, row in rows]


def setting_rows(level: Level, shape: ModelShape) -> list[tuple[str, ...]]:
    """Heads, their setting and its layers; those of most heads first."""
    layers: dict[str, list[int]] = defaultdict(list)
    for layer, methods in enumerate(_methods(level, shape)):
        for method in methods:
            layers[_setting(method)].append(layer)
    ordered = sorted(layers.items(), key=lambda item: -len(item[1]))
    return [(f"{len(numbers)}", setting, format_ranges(numbers)) for setting, numbers in ordered]


def _methods(level: Level, shape: ModelShape) -> list[Sequence[Method | None]]:
    """By layer and head; None in layers that never reach a method."""
    return [
        [None] * shape.num_heads if layer in level.dense_layers else level.methods_of(layer, shape.num_heads)
        for layer in range(shape.num_layers)
    ]


def _name(method: Method | None) -> str:
    return name_of(method) if method else DENSE_LAYER


def _setting(method: Method | None) -> str:
    """The method, and of its parameters those that differ from its defaults."""
    if method is None:
        return DENSE_LAYER
    default = type(method)().shown_fields
    given = [f"{field}={value!r}" for field, value in method.shown_fields.items() if value != default.get(field)]
    return f"{name_of(method)}({', '.join(given)})" if given else name_of(method)
