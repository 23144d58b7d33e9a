# SPDX-License-Identifier: Apache-2.0
"""What a profile says, as rows of tables."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import groupby

from vllm_sparse_backend.measure.crossover import told
from vllm_sparse_backend.settings.figures import HeadFigures
from vllm_sparse_backend.settings.model_shape import ModelShape
from vllm_sparse_backend.settings.profile import Level
from vllm_sparse_backend.settings.ranges import format_ranges
from vllm_sparse_kernels.methods import name_of
from vllm_sparse_kernels.methods.base import Method

DENSE_LAYER = "dense layer"
"""What heads of ``dense_layers`` do: they never reach a method."""


def layer_rows(level: Level, shape: ModelShape) -> list[tuple[str, ...]]:
    """Layers, their heads by method, how many settings these have, mean density and the largest error of a head.

    A row for neighbours that are alike in all of it.
    """
    figures = level.provenance.figures or HeadFigures()
    densities, errors = (figures.rows(name, shape) for name in ("density", "p99_error"))

    def row(layer: int) -> tuple[str, ...]:
        methods, density, error = _methods(level, shape, layer), densities[layer], errors[layer]
        counts = Counter(name_of(method) if method else DENSE_LAYER for method in methods).most_common()
        return (
            ", ".join(f"{count} {name}" for name, count in counts),
            f"{len(set(methods))}",
            f"{sum(density) / len(density):.4g}" if density else "",
            f"{max(error):.4g}" if error else "",
        )

    return [(format_ranges(list(layers)), *alike) for alike, layers in groupby(range(shape.num_layers), row)]


def setting_rows(level: Level, shape: ModelShape) -> list[tuple[str, ...]]:
    """Heads, their setting and its layers; those of most heads first."""
    layers: dict[str, list[int]] = defaultdict(list)
    for layer in range(shape.num_layers):
        for method in _methods(level, shape, layer):
            layers[told(method) if method else DENSE_LAYER].append(layer)
    ordered = sorted(layers.items(), key=lambda item: -len(item[1]))
    return [(f"{len(numbers)}", setting, format_ranges(numbers)) for setting, numbers in ordered]


def _methods(level: Level, shape: ModelShape, layer: int) -> Sequence[Method | None]:
    """By head; None in layers that never reach a method."""
    return [None] * shape.num_heads if layer in level.dense_layers else level.methods_of(layer, shape.num_heads)
