# SPDX-License-Identifier: Apache-2.0
"""Heat maps of a profile as a PNG file: each head's method, and the density and errors that calibration measured."""

from collections import Counter
from pathlib import Path
from typing import Any

from vllm_sparse_backend.profiling.profile_tables import DENSE_LAYER, names_by_head, settings_by_head
from vllm_sparse_backend.settings.errors import ConfigurationError
from vllm_sparse_backend.settings.figures import Figures
from vllm_sparse_backend.settings.model_shape import ModelShape
from vllm_sparse_backend.settings.profile import Level
from vllm_sparse_kernels.methods import sparse_names

NAMES = [DENSE_LAYER, "dense", *sparse_names()]
"""Methods in the order of their colours, which are the same in every picture that shows methods alone."""

MOST_SETTINGS = 10
"""Methods are told apart by their parameters too while there are no more of these."""

TITLES = {"density": "density", "error": "output error", "worst_error": "output error, worst hundredth of queries"}


def draw(level: Level, shape: ModelShape, path: Path, title: str) -> list[str]:
    """Write the maps, one beside the other, and return what they show; layers go down, heads to the right.

    Raises ``ConfigurationError`` if matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        reason = "pictures are drawn with matplotlib, which is not installed: pip install matplotlib"
        raise ConfigurationError(reason) from None
    figures = level.provenance.figures or Figures()
    measured = {name: rows for name in TITLES if any(rows := figures.rows(name, shape))}
    panels = 1 + len(measured)
    height = 1.6 + 0.16 * shape.num_layers
    page = Figure(figsize=((2.2 + 0.16 * shape.num_heads) * panels, height), layout="constrained")
    FigureCanvasAgg(page)
    axes = page.subplots(1, panels, squeeze=False)[0]
    _draw_methods(axes[0], page, level, shape)
    for axis, (name, rows) in zip(axes[1:], measured.items()):
        _draw_figures(axis, page, [row or [float("nan")] * shape.num_heads for row in rows], TITLES[name])
    for axis in axes:
        axis.set_xlabel("head")
        axis.set_ylabel("layer")
    page.suptitle(title.replace("$", r"\$"), wrap=True)  # a path is no formula
    try:
        page.savefig(path, format="png", dpi=110)
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be written: {error.strerror or error}") from None
    return ["method", *(TITLES[name] for name in measured)]


def _draw_methods(axis: Any, page: Any, level: Level, shape: ModelShape) -> None:
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap

    (settings,) = settings_by_head(shape, level)
    known = Counter(setting for row in settings for setting in row)
    if len(known) <= MOST_SETTINGS:
        told, present = settings, sorted(known, key=lambda one: -known[one])
        colours = ListedColormap([colormaps["tab10"](i) for i in range(len(present))])
    else:
        told = names_by_head(level, shape)
        present = [name for name in NAMES if any(name in row for row in told)]
        colours = ListedColormap([colormaps["tab20"](NAMES.index(name) % 20) for name in present])
    numbers = [[present.index(one) for one in row] for row in told]
    shown = axis.imshow(numbers, cmap=colours, vmin=-0.5, vmax=len(present) - 0.5, aspect="auto", interpolation="none")
    bar = page.colorbar(shown, ax=axis, ticks=range(len(present)))
    bar.ax.set_yticklabels([one.replace("(", "(\n  ").replace(", ", ",\n  ") for one in present], fontsize="small")
    axis.set_title("method")


def _draw_figures(axis: Any, page: Any, rows: list[list[float]], title: str) -> None:
    most = max((number for row in rows for number in row if number == number), default=0)
    shown = axis.imshow(rows, cmap="viridis", vmin=0, vmax=most or 1, aspect="auto", interpolation="none")
    page.colorbar(shown, ax=axis)
    axis.set_title(title)
