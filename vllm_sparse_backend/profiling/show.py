# SPDX-License-Identifier: Apache-2.0
"""What a profile says, as rows of tables and as a small picture."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

from vllm_sparse_backend.profiling.outside import needed
from vllm_sparse_backend.settings.errors import ConfigurationError
from vllm_sparse_backend.settings.figures import Figures
from vllm_sparse_backend.settings.model_shape import ModelShape
from vllm_sparse_backend.settings.profile import Level
from vllm_sparse_backend.settings.ranges import format_ranges
from vllm_sparse_kernels.methods import name_of
from vllm_sparse_kernels.methods.base import Method

DENSE_LAYER = "dense layer"
"""What heads of ``dense_layers`` do: they never reach a method."""

TITLES = {"density": "density", "error": "output error", "worst_error": "error, worst hundredth"}


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


def draw(level: Level, shape: ModelShape, path: Path, title: str) -> list[str]:
    """Write a map of the heads' methods, and one of each figure that calibration measured; returns what they show.

    Layers go down, heads to the right. Raises ``ConfigurationError`` if matplotlib is not installed, or the file cannot
    be written.
    """
    picture = needed("matplotlib.figure", "pictures need matplotlib (pip install matplotlib)")
    figures = level.provenance.figures or Figures()
    nothing = [float("nan")] * shape.num_heads
    maps = {TITLES[name]: figures.rows(name, shape) for name in TITLES}
    maps = {name: [row or nothing for row in rows] for name, rows in maps.items() if any(rows)}
    names = [[_name(method) for method in methods] for methods in _methods(level, shape)]
    known = sorted({name for row in names for name in row})
    page = picture.Figure(figsize=((2.2 + 0.16 * shape.num_heads) * (1 + len(maps)), 1.6 + 0.16 * shape.num_layers))
    page.set_layout_engine("constrained")
    axes = page.subplots(1, 1 + len(maps), squeeze=False)[0]
    numbers = [[known.index(name) for name in row] for row in names]
    shown = axes[0].imshow(numbers, cmap="tab10", vmin=-0.5, vmax=9.5, aspect="auto", interpolation="none")
    bar = page.colorbar(shown, ax=axes[0], ticks=range(len(known)), boundaries=[i - 0.5 for i in range(len(known) + 1)])
    bar.ax.set_yticklabels(known, fontsize="small")
    for axis, rows in zip(axes[1:], maps.values(), strict=True):
        page.colorbar(axis.imshow(rows, vmin=0, aspect="auto", interpolation="none"), ax=axis)
    for axis, name in zip(axes, ("method", *maps), strict=True):
        axis.set(title=name, xlabel="head", ylabel="layer")
    page.suptitle(title.replace("$", r"\$"), wrap=True)  # a path is no formula
    try:
        page.savefig(path, format="png", dpi=110)
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be written: {error.strerror or error}") from None
    return ["method", *maps]
