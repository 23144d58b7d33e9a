# SPDX-License-Identifier: Apache-2.0
"""Profiles: which method, with which parameters, each layer and head of a model prefills with.

A profile is a YAML file; ``profiles/README.md`` describes its fields. Layers and heads are those of the whole model.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    Field,
    PlainSerializer,
    PlainValidator,
    StrictFloat,
    StrictInt,
    StrictStr,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from vllm_sparse_backend.settings import strict_yaml
from vllm_sparse_backend.settings.crossover import OwnCrossover, TokenCount
from vllm_sparse_backend.settings.errors import ConfigurationError, Section, not_one_of, unexpected
from vllm_sparse_backend.settings.figures import HeadFigures
from vllm_sparse_backend.settings.methods import make_method, method_names, parameters_of
from vllm_sparse_backend.settings.model_shape import ModelShape
from vllm_sparse_backend.settings.ranges import DisjointRanges, Ranges, format_ranges
from vllm_sparse_kernels.methods.base import Method

ANY_MODEL = "any"
METHOD_MARK = "x-method"
"""Stands in a JSON Schema for a method with parameters, which ``schema.py`` puts in its place."""
EXACT = "exact"
BOUNDS = ("high", "fast")
"""Levels that calibration makes: bounds on the error, the closest first."""
ON, SHARE = "on", "p"
"""How settings and requests call the server's own level, and settings those of requests that give a share p."""
OTHERS = (EXACT, "default", ON, SHARE)
"""What every server has without any profile: every head dense, and the server's own level."""

LEVEL_NAME = "[a-z][a-z0-9_.-]*"


def _to_level_name(given: object) -> str:
    if isinstance(given, str) and re.fullmatch(LEVEL_NAME, given) and given not in OTHERS:
        return given
    expected = f"a name of small letters, digits, '_', '.' and '-', such as {' or '.join(BOUNDS)}"
    raise ValueError(unexpected(given, f"{expected}, other than {', '.join(OTHERS)}"))


# Within allOf, as pydantic makes of a key's pattern one that other keys need not have.
_NAME_SCHEMA = {"type": "string", "allOf": [{"pattern": f"^{LEVEL_NAME}$"}, {"not": {"enum": list(OTHERS)}}]}
LevelName = Annotated[str, PlainValidator(_to_level_name), WithJsonSchema(_NAME_SCHEMA)]


def _to_method(given: object) -> Method:
    if isinstance(given, Method):
        return given
    if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
        raise ValueError(unexpected(given, "a mapping such as {method: NAME, PARAMETER: VALUE}"))
    if "method" not in given:
        raise ValueError(f"method: missing, expected one of {', '.join(method_names())}")
    return make_method(given["method"], {name: value for name, value in given.items() if name != "method"})


MethodSpec = Annotated[
    Method, PlainValidator(_to_method), PlainSerializer(parameters_of), WithJsonSchema({METHOD_MARK: True})
]
Share = Annotated[StrictFloat, Field(ge=0, le=1)]


class LayerProfile(Section):
    """What one layer, or several alike, do otherwise than the profile's default."""

    default: MethodSpec | None = None
    """For the heads that ``heads`` does not name; None for the profile's default."""

    heads: Annotated[dict[Ranges, MethodSpec], DisjointRanges] = Field(default={})


class Provenance(Section):
    """Where a profile's or a level's numbers come from. All of it is optional, and none of it changes what runs."""

    tool_version: StrictStr | None = None
    prompts_sha256: Annotated[StrictStr, Field(pattern="^[0-9a-f]{64}$")] | None = None
    bounds: dict[StrictStr, StrictFloat] | None = None
    """Error bounds that the search kept to, by the paper's name."""
    recall: Share | None = None
    density: Share | None = None
    device: StrictStr | None = None
    source: StrictStr | None = None
    licence: StrictStr | None = None
    """Of what the numbers were taken from."""
    figures: HeadFigures | None = None
    """What calibration measured of each head."""
    held_out: dict[StrictStr, StrictFloat] | None = None
    """What the check on prompts that no search has seen found."""
    seed: StrictInt | None = None
    versions: dict[StrictStr, StrictStr] | None = None


class Level(Section):
    """What every layer and head does where one bound on the error holds, and what was measured of that."""

    dense_layers: Ranges = ()
    default: MethodSpec
    layers: Annotated[dict[Ranges, LayerProfile], DisjointRanges] = Field(default={})
    crossover: OwnCrossover | None = None
    """From which lengths on it pays, as measured: what ``auto`` stands for on that device and with those engines."""
    provenance: Provenance = Provenance()

    @staticmethod
    def of_heads(
        methods: Sequence[Sequence[Method]], provenance: Provenance, crossover: OwnCrossover | None = None
    ) -> "Level":
        """What says of each layer's heads that they have these methods, in as few words as there are.

        Layers all of whose heads are plainly dense become ``dense_layers``, where there are others too.
        """
        given = [tuple(layer) for layer in methods]
        dense = [i for i, layer in enumerate(given) if set(layer) == {make_method("dense", {})}]
        dense = dense if len(dense) < len(given) else []
        sparse = {i: layer for i, layer in enumerate(given) if i not in dense}
        default = _commonest([method for layer in sparse.values() for method in layer])
        alike: dict[tuple[Method, ...], list[int]] = defaultdict(list)
        for i, layer in sparse.items():
            alike[layer].append(i)
        layers = {tuple(i): _layer_of(layer, default) for layer, i in alike.items() if set(layer) != {default}}
        return Level(
            dense_layers=tuple(dense), default=default, layers=layers, crossover=crossover, provenance=provenance
        )

    def methods_of(self, layer: int, num_heads: int) -> tuple[Method, ...]:
        """The method of each of the model's ``num_heads`` query heads in one layer."""
        profile = next((one for layers, one in self.layers.items() if layer in layers), LayerProfile())
        methods = [profile.default or self.default] * num_heads
        for heads, method in profile.heads.items():
            for head in heads:
                methods[head] = method
        return tuple(methods)

    def _out_of_range(self, shape: ModelShape) -> list[str]:
        places = [("dense_layers", self.dense_layers, shape.num_layers)]
        for layers, profile in self.layers.items():
            place = f"layers.{format_ranges(layers)}"
            places.append((place, layers, shape.num_layers))
            places += [(f"{place}.heads.{format_ranges(heads)}", heads, shape.num_heads) for heads in profile.heads]
        problems = [
            f"{place}: {unexpected(max(numbers), f'at most {limit - 1}')}"
            for place, numbers, limit in places
            if numbers and max(numbers) >= limit
        ]
        figures = self.provenance.figures
        return problems + [f"provenance.figures.{one}" for one in (figures.out_of_range(shape) if figures else ())]

    def _objections(self, shape: ModelShape) -> list[str]:
        methods: dict[type[Method], list[Method]] = defaultdict(list)
        for layer in set(range(shape.num_layers)) - set(self.dense_layers):
            for method in self.methods_of(layer, shape.num_heads):
                methods[type(method)].append(method)
        return [why for kind, heads in methods.items() if (why := kind.objection(heads)) is not None]


class Profile(Level):
    """A checked profile. ``methods_of`` answers what it is asked for; ``check_model`` comes before that."""

    format: Literal[1]
    model: ModelShape | None
    """The model that it fits; None (``any`` in the file) if it fits every one."""
    min_tokens: TokenCount | None = None
    min_query_tokens: TokenCount | None = None
    level: LevelName | None = None
    """Which bound the profile's own default, layers and dense_layers hold; None where nobody says."""
    levels: dict[LevelName, Level] = Field(default={})
    """Other bounds, and what holds them, or other settings to compare. A request may name them."""

    @field_validator("model", mode="before")
    @classmethod
    def _any_model(cls, given: object) -> object:
        if given is None or (isinstance(given, str) and given != ANY_MODEL):
            raise ValueError(unexpected(given, f"the model's shape, or {ANY_MODEL}"))
        return None if given == ANY_MODEL else given

    @model_validator(mode="after")
    def _consistent(self) -> "Profile":
        problems = [] if self.model is None else self._out_of_range(self.model)
        if self.level in self.levels:
            problems.append(
                f"levels.{self.level}: given, but {self.level} is the profile's own level, expected another"
            )
        if self.levels and self.level is None:
            problems.append(f"level: missing, expected a name such as {BOUNDS[0]}, as levels are given")
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def _out_of_range(self, shape: ModelShape) -> list[str]:
        others = [f"levels.{name}.{one}" for name, level in self.levels.items() for one in level._out_of_range(shape)]
        return super()._out_of_range(shape) + others

    def _objections(self, shape: ModelShape) -> list[str]:
        others = [f"levels.{name}: {one}" for name, level in self.levels.items() for one in level._objections(shape)]
        return super()._objections(shape) + others

    @property
    def level_names(self) -> tuple[str, ...]:
        """What a request may name: exact, which every server has, bounds, the closest first, then other levels."""
        own = [name for name in (self.level, *self.levels) if name is not None]
        return EXACT, *(name for name in BOUNDS if name in own), *(name for name in own if name not in BOUNDS)

    def at_level(self, name: str) -> "Profile":
        """A profile that has the named level as its own, and no other. ``exact``: every head dense.

        Raises ValueError if there is no such level.
        """
        if name not in self.level_names:
            raise ValueError(f"level: {not_one_of(name, self.level_names)}")
        given = next((level for known, level in self.levels.items() if known == name), self)
        level = Level(default=make_method("dense", {})) if name == EXACT else given
        own = {field: getattr(level, field) for field in Level.model_fields}
        return self.model_copy(update={**own, "level": None if name == EXACT else name, "levels": {}})

    def check_model(self, shape: ModelShape, source: str = "profile") -> None:
        """Raise ``ConfigurationError`` naming ``source`` if this is no profile for a model of that shape.

        It is none if it was made for another model (the error names both shapes), names layers or heads past the
        model's, or has a method do nothing of what it is for.
        """
        if self.model is not None and (names := self.model.differences(shape)):
            raise ConfigurationError(
                f"{source}: the profile is for {self.model}, but the model is {shape}: they differ in "
                f"{', '.join(names)}; use a profile made for this model"
            )
        if problems := self._out_of_range(shape):
            raise ConfigurationError(f"{source}: {'; '.join(problems)}; the model is {shape}")
        if objections := self._objections(shape):
            raise ConfigurationError(f"{source}: {'; '.join(objections)}")

    def to_yaml(self) -> str:
        """The profile as a file; loading that gives an equal one."""
        data = self.model_dump(exclude_defaults=True)
        data["model"] = data["model"] or ANY_MODEL
        own = [name for name in Profile.model_fields if name not in (*Level.model_fields, "levels")]
        return strict_yaml.dump({name: data[name] for name in (*own, *Level.model_fields, "levels") if name in data})


def profile_file(name_or_path: str | Path, asked_by: str = "profile") -> Path:
    """The bundled profile of that name, or else that file.

    Raises ``ConfigurationError`` with the bundled ones' names and the option that asked for it if there is neither.
    """
    bundled = bundled_profiles()
    path = bundled.get(str(name_or_path)) or strict_yaml.file_at(str(name_or_path))
    if path is None:
        problem = strict_yaml.why_no_file(str(name_or_path))
        raise ConfigurationError(f"{asked_by}: {problem}; {not_one_of(str(name_or_path), bundled)}, or a file's path")
    return path


def load_profile(name_or_path: str | Path, asked_by: str = "profile") -> Profile:
    """The profile in ``profile_file``. Raises ``ConfigurationError`` naming file and field."""
    path = profile_file(name_or_path, asked_by)
    return parse_profile(strict_yaml.read_text(path), str(path))


def parse_profile(text: str, source: str) -> Profile:
    """The profile that a YAML text holds; errors name ``source``."""
    return Profile.read(strict_yaml.parse(text, source), f"{source}: ")


def bundled_profiles() -> dict[str, Path]:
    """Paths of the profiles that come with this package, by name."""
    package = Path(str(resources.files("vllm_sparse_backend")))
    # A wheel carries them inside the package, an editable checkout beside it.
    folder = next((path for path in (package / "_profiles", package.parent / "profiles") if path.is_dir()), None)
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))} if folder else {}


def name_of_profile(given: str) -> str:
    """What results call a profile that is given by its name, which may have dots, or by its path."""
    return Path(given).name.removesuffix(".yaml")


def _commonest(methods: Sequence[Method]) -> Method:
    """Of equally common ones the first."""
    return Counter(methods).most_common(1)[0][0]


def _layer_of(methods: Sequence[Method], default: Method) -> LayerProfile:
    own = None if default in methods else _commonest(methods)
    heads: dict[Method, list[int]] = defaultdict(list)
    for head, method in enumerate(methods):
        if method != (own or default):
            heads[method].append(head)
    return LayerProfile(default=own, heads={tuple(ids): method for method, ids in heads.items()})
