# SPDX-License-Identifier: Apache-2.0
"""What a profile says, and where two differ, as rows of tables."""

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from typing import NamedTuple

from vllm_sparse_backend.settings.model_shape import ModelShape
from vllm_sparse_backend.settings.profile import Level, Profile
from vllm_sparse_backend.settings.ranges import format_ranges
from vllm_sparse_kernels.methods import name_of
from vllm_sparse_kernels.methods.base import Method

DENSE_LAYER = "dense layer"
"""What heads of ``dense_layers`` do: they never reach a method."""


class LayerRow(NamedTuple):
    """Layers that are alike, and what their heads do: ``{"sale": 30, "dense": 2}``."""

    layers: str
    heads: dict[str, int]
    settings: int
    density: float | None  # mean over the heads
    error: float | None  # of the worst head


class SettingRow(NamedTuple):
    """Heads with one method and its parameters."""

    setting: str
    heads: int
    layers: str


class Difference(NamedTuple):
    """What stands in one profile and in another at the same place."""

    place: str
    first: str
    second: str


def settings_by_head(shape: ModelShape, *levels: Level) -> list[list[list[str]]]:
    """Per level, by layer and head, the method and its parameters in words.

    Of the parameters those that differ from the method's default in any head of any of these levels.
    """
    methods = [
        [() if i in level.dense_layers else level.methods_of(i, shape.num_heads) for i in range(shape.num_layers)]
        for level in levels
    ]
    words = _words({method for layers in methods for layer in layers for method in layer})
    dense = [DENSE_LAYER] * shape.num_heads
    return [[[words[method] for method in layer] or dense for layer in layers] for layers in methods]


def _words(methods: Collection[Method]) -> dict[Method, str]:
    told: dict[str, set[str]] = defaultdict(set)
    for method in methods:
        default = type(method)().shown_fields
        told[name_of(method)] |= {name for name, value in method.shown_fields.items() if value != default.get(name)}
    words = {}
    for method in methods:
        name = name_of(method)
        given = ", ".join(f"{field}={value!r}" for field, value in method.shown_fields.items() if field in told[name])
        words[method] = f"{name}({given})" if given else name
    return words


def names_by_head(level: Level, shape: ModelShape) -> list[list[str]]:
    """By layer and head, the method's name alone."""
    return [
        [DENSE_LAYER] * shape.num_heads
        if layer in level.dense_layers
        else [name_of(method) for method in level.methods_of(layer, shape.num_heads)]
        for layer in range(shape.num_layers)
    ]


def layer_rows(level: Level, shape: ModelShape) -> list[LayerRow]:
    """A row for each layer; one for neighbours that are alike in everything."""
    figures = level.provenance.figures
    nothing: list[list[float] | None] = [None] * shape.num_layers
    densities = figures.rows("density", shape) if figures else nothing
    errors = figures.rows("error", shape) if figures else nothing
    found: list[tuple[list[int], tuple[object, ...]]] = []
    names, (settings,) = names_by_head(level, shape), settings_by_head(shape, level)
    for layer in range(shape.num_layers):
        density, error = densities[layer], errors[layer]
        mean = sum(density) / len(density) if density else None
        counts = tuple(Counter(names[layer]).most_common())
        row = (counts, len(set(settings[layer])), mean, max(error) if error else None)
        if found and found[-1][1] == row:
            found[-1][0].append(layer)
        else:
            found.append(([layer], row))
    return [LayerRow(format_ranges(layers), dict(row[0]), *row[1:]) for layers, row in found]  # type: ignore


def setting_rows(level: Level, shape: ModelShape) -> list[SettingRow]:
    """A row for each setting, those of most heads first."""
    layers: dict[str, list[int]] = defaultdict(list)
    for layer, heads in enumerate(settings_by_head(shape, level)[0]):
        for setting in heads:
            layers[setting].append(layer)
    rows = [SettingRow(setting, len(ids), format_ranges(ids)) for setting, ids in layers.items()]
    return sorted(rows, key=lambda row: -row.heads)


def differences(first: Profile, second: Profile, shape: ModelShape) -> list[Difference]:
    """What two profiles say otherwise for a model of that shape: fields, then heads, by what they change to."""
    found = [
        Difference(name, str(a), str(b))
        for name in ("model", "min_tokens", "min_query_tokens", "level")
        if (a := getattr(first, name)) != (b := getattr(second, name))
    ]
    known = [profile.level_names[1:] for profile in (first, second)]
    if known[0] != known[1]:
        found.append(Difference("levels", *(", ".join(names) or "none" for names in known)))
    found += _heads_that_differ("", first, second, shape)
    for name in [name for name in known[0] if name in known[1] and name != first.level]:
        found += _heads_that_differ(f"level {name}, ", first.at_level(name), second.at_level(name), shape)
    return found


def _heads_that_differ(place: str, first: Level, second: Level, shape: ModelShape) -> list[Difference]:
    changes: dict[tuple[str, str], list[int]] = defaultdict(list)
    pairs = zip(*settings_by_head(shape, first, second))
    for layer, (before, after) in enumerate(pairs):
        for change in zip(before, after):
            if change[0] != change[1]:
                changes[change].append(layer)
    ordered: Sequence[tuple[tuple[str, str], list[int]]] = sorted(changes.items(), key=lambda item: -len(item[1]))
    return [Difference(f"{place}{len(i)} heads of layers {format_ranges(i)}", *change) for change, i in ordered]
