# SPDX-License-Identifier: Apache-2.0
"""Profiles: the method and parameters with which each layer and head of a model prefills.

A profile is a YAML file; ``profiles/README.md`` describes its fields. Layers and heads are those of the whole model.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PlainSerializer, PlainValidator, field_validator, model_validator

from vllm_sparse_backend.config import input_files, strict_yaml
from vllm_sparse_backend.config.crossover_table import TokenCount
from vllm_sparse_backend.config.errors import ConfigurationError, Section, not_one_of, unexpected
from vllm_sparse_backend.config.method_parameters import make_method, method_names, parameters_of
from vllm_sparse_backend.config.model_shape import ModelShape
from vllm_sparse_backend.config.ranges import DisjointRanges, Ranges, format_ranges
from vllm_sparse_kernels.methods.base import Method

ANY_MODEL = "any"
EXACT = "exact"
BOUNDS = ("high", "fast")
"""Levels that calibration makes, with the tightest error bound first."""
ON, SHARE = "on", "p"
"""``on`` is the server's own level in settings and requests. In settings, ``p`` stands for requests that set the share
p."""
OTHERS = (EXACT, "default", ON, SHARE)
"""Reserved names of levels that every server has without a profile."""

LEVEL_NAME = "[a-z][a-z0-9_.-]{0,39}"
"""At most 40 characters: the name is part of a cache salt, which may have 128."""


def _to_level_name(value: object) -> str:
    if isinstance(value, str) and re.fullmatch(LEVEL_NAME, value) and value not in OTHERS:
        return value
    expected = f"a name of at most 40 lower-case letters, digits, '_', '.' and '-', such as {' or '.join(BOUNDS)}"
    raise ValueError(unexpected(value, f"{expected}; {', '.join(OTHERS)} are reserved"))


LevelName = Annotated[str, PlainValidator(_to_level_name)]


def _to_method(value: object) -> Method:
    if isinstance(value, Method):
        return value
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ValueError(unexpected(value, "a mapping such as {method: NAME, PARAMETER: VALUE}"))
    if "method" not in value:
        raise ValueError(f"method: missing, expected one of {', '.join(method_names())}")
    return make_method(value["method"], {name: parameter for name, parameter in value.items() if name != "method"})


MethodSpec = Annotated[Method, PlainValidator(_to_method), PlainSerializer(parameters_of)]
"""A method with its parameters: ``{method: NAME, PARAMETER: VALUE}``."""


class LayerProfile(Section):
    """Exceptions from a level's default, for one or several layers."""

    default: MethodSpec | None = None
    """Method of the heads that ``heads`` does not contain; None for the level's default."""

    heads: Annotated[dict[Ranges, MethodSpec], DisjointRanges] = Field(default={})


class Level(Section):
    """Methods of all layers and heads under one error bound."""

    dense_layers: Ranges = ()
    default: MethodSpec
    """Method of all heads without an exception in ``layers``."""
    layers: Annotated[dict[Ranges, LayerProfile], DisjointRanges] = Field(default={})
    provenance: dict[str, Any] = Field(default={})
    """Origin of the numbers, which changes nothing that runs. profiles/README.md lists what calibration writes."""

    @classmethod
    def of_heads(cls, methods: Sequence[Sequence[Method]], provenance: dict[str, Any], **fields: Any) -> Self:
        """Build the level or profile that gives each head its method. Its default is the most common method.

        Layers whose heads are all dense go into ``dense_layers``. At least one layer must have another head.
        """
        dense_layers = [i for i, heads in enumerate(methods) if set(heads) == {make_method("dense", {})}]
        sparse = {i: heads for i, heads in enumerate(methods) if i not in dense_layers}
        ((default, _),) = Counter(chain.from_iterable(sparse.values())).most_common(1)
        layers: dict[tuple[int, ...], LayerProfile] = {}
        for i, layer_methods in sparse.items():
            heads: dict[Method, list[int]] = defaultdict(list)
            for head, method in enumerate(layer_methods):
                if method != default:
                    heads[method].append(head)
            if heads:
                layers[i,] = LayerProfile(heads={tuple(ids): method for method, ids in heads.items()})
        return cls(dense_layers=tuple(dense_layers), default=default, layers=layers, provenance=provenance, **fields)

    def methods_of(self, layer: int, num_heads: int) -> tuple[Method, ...]:
        """Return the method of each head of a layer, whether or not ``dense_layers`` contains it."""
        exceptions = next((profile for numbers, profile in self.layers.items() if layer in numbers), LayerProfile())
        methods = [exceptions.default or self.default] * num_heads
        for heads, method in exceptions.heads.items():
            for head in heads:
                methods[head] = method
        return tuple(methods)

    def out_of_range(self, shape: ModelShape) -> list[str]:
        """Return errors about layers and heads that a model does not have."""
        places = [("dense_layers", self.dense_layers, shape.num_layers)]
        for layers, profile in self.layers.items():
            place = f"layers.{format_ranges(layers)}"
            places.append((place, layers, shape.num_layers))
            places += [(f"{place}.heads.{format_ranges(heads)}", heads, shape.num_heads) for heads in profile.heads]
        return [
            f"{place}: {unexpected(max(numbers), f'at most {limit - 1}')}"
            for place, numbers, limit in places
            if numbers and max(numbers) >= limit
        ]

    def objections(self, shape: ModelShape) -> list[str]:
        """Return why methods cannot run with the heads that have them."""
        methods: dict[type[Method], list[Method]] = defaultdict(list)
        for layer in set(range(shape.num_layers)) - set(self.dense_layers):
            for method in self.methods_of(layer, shape.num_heads):
                methods[type(method)].append(method)
        objections = (kind.objection(heads) for kind, heads in methods.items())
        return [objection for objection in objections if objection is not None]


class Profile(Level):
    """A checked profile. Call ``check_model`` before ``methods_of``."""

    format: Literal[1]
    model: ModelShape | None
    """Shape of the model that the profile fits; `any` if it fits every model."""
    min_tokens: TokenCount | None = None
    """Number of leading positions of every request that are computed densely, or `auto`."""
    min_query_tokens: TokenCount | None = None
    """Minimum number of new tokens past `min_tokens` for a request to run sparse in a step, or `auto`."""
    lengths_of: MethodSpec | None = None
    """Method whose measured lengths `auto` stands for; by default, the strictest lengths of all methods of the
    profile."""
    level: LevelName | None = None
    """Name of the level that the profile's own default, layers and dense_layers form; required with `levels`."""
    levels: dict[LevelName, Level] = Field(default={})
    """Further levels, which requests may choose by name."""

    @field_validator("model", mode="before")
    @classmethod
    def _any_model(cls, value: object) -> object:
        if value is None or (isinstance(value, str) and value != ANY_MODEL):
            raise ValueError(
                unexpected(value, f"a mapping with the model's architecture, layers and heads, or {ANY_MODEL}")
            )
        return None if value == ANY_MODEL else value

    @model_validator(mode="after")
    def _consistent(self) -> "Profile":
        problems = [] if self.model is None else self._of_levels(Level.out_of_range, self.model)
        if self.level in self.levels:
            problems.append(f"levels.{self.level}: given the name of the profile's own level, expected another name")
        if self.levels and self.level is None:
            problems.append(
                f"level: missing, expected a name for the profile's own level, such as {BOUNDS[0]}, next to levels"
            )
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def _of_levels(self, check: Callable[[Level, ModelShape], list[str]], shape: ModelShape) -> list[str]:
        """Return the problems of all levels, with their places."""
        problems = check(self, shape)
        for name, level in self.levels.items():
            problems += [f"levels.{name}.{problem}" for problem in check(level, shape)]
        return problems

    @property
    def level_names(self) -> tuple[str, ...]:
        """Levels that requests may choose: ``exact``, then the bounds of calibration in order, then all others."""
        names = [name for name in (self.level, *self.levels) if name is not None]
        return EXACT, *(name for name in BOUNDS if name in names), *(name for name in names if name not in BOUNDS)

    def at_level(self, name: str) -> "Profile":
        """Return a profile whose only level is one of this profile's levels, except ``exact``, which needs none."""
        level = self if name == self.level else self.levels[name]
        fields = {field: getattr(level, field) for field in Level.model_fields}
        return self.model_copy(update={**fields, "level": name, "levels": {}})

    def check_model(self, shape: ModelShape, source: str = "profile") -> None:
        """Check that the profile fits a model."""
        if self.model is not None and (names := self.model.differences(shape)):
            raise ConfigurationError(
                f"{source}: the profile is for {self.model}, but the model is {shape}: they differ in "
                f"{', '.join(names)}; use a profile made for this model"
            )
        if problems := self._of_levels(Level.out_of_range, shape):
            raise ConfigurationError(f"{source}: {'; '.join(problems)}; the model is {shape}")
        if objections := self._of_levels(Level.objections, shape):
            raise ConfigurationError(f"{source}: {'; '.join(objections)}")

    def to_yaml(self) -> str:
        """Format the profile as a file."""
        data = self.model_dump(exclude_defaults=True)
        data["model"] = data["model"] or ANY_MODEL
        for name in (*Level.model_fields, "levels"):  # after the fields that only a profile has
            if name in data:
                data[name] = data.pop(name)
        return strict_yaml.dump(data)


def profile_file(name_or_path: str, option: str = "profile") -> Path:
    """Find a profile's file."""
    bundled = bundled_profiles()
    path = bundled.get(name_or_path) or input_files.existing_path(name_or_path)
    if path is None:
        raise ConfigurationError(f"{option}: no such file; {not_one_of(name_or_path, bundled)}, or a file's path")
    return path


def load_profile(name_or_path: str, option: str = "profile") -> Profile:
    """Read a profile from its file."""
    path = profile_file(name_or_path, option)
    return parse_profile(input_files.read_text(path), str(path))


def parse_profile(text: str, source: str) -> Profile:
    """Parse a profile."""
    return Profile.read(strict_yaml.parse(text, source), f"{source}: ")


def bundled_profiles() -> dict[str, Path]:
    """List the profiles that come with this package."""
    package = Path(__file__).parents[1]
    # A wheel has them inside the package, and an editable checkout has them next to it.
    in_wheel = package / "_profiles"
    folder = in_wheel if in_wheel.is_dir() else package.parent / "profiles"
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def name_of_profile(name_or_path: str) -> str:
    """Return the name of a profile for tables of results."""
    return Path(name_or_path).name.removesuffix(".yaml")
