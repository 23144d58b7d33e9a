"""Profiles: which method, with which parameters, each layer and head of a model prefills with.

A profile is a YAML file; ``profiles/README.md`` describes its fields. Layers and heads are those of the whole model.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    StrictFloat,
    StrictStr,
    ValidationError,
    field_validator,
    model_validator,
)

from vllm_sparse_backend.settings import strict_yaml
from vllm_sparse_backend.settings.crossover import TokenCount
from vllm_sparse_backend.settings.errors import ConfigurationError, not_one_of, report, unexpected
from vllm_sparse_backend.settings.figures import Figures
from vllm_sparse_backend.settings.methods import make_method, method_names, parameters_of
from vllm_sparse_backend.settings.model_shape import ModelShape
from vllm_sparse_backend.settings.ranges import DisjointRanges, Ranges, format_ranges
from vllm_sparse_kernels.select.base import Method

ANY_MODEL = "any"
EXACT = "exact"
LevelName = Literal["high", "fast"]
"""Bounds on the error, the closest first. ``exact`` is beside them: every head dense, without any profile."""


def _to_method(given: object) -> Method:
    if isinstance(given, Method):
        return given
    if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
        raise ValueError(unexpected(given, "a mapping such as {method: NAME, PARAMETER: VALUE}"))
    if "method" not in given:
        raise ValueError(f"method: missing, expected one of {', '.join(method_names())}")
    return make_method(given["method"], {name: value for name, value in given.items() if name != "method"})


MethodSpec = Annotated[Method, PlainValidator(_to_method)]
Share = Annotated[StrictFloat, Field(ge=0, le=1)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class LayerProfile(_Section):
    """What one layer, or several alike, do otherwise than the profile's default."""

    default: MethodSpec | None = None
    """For the heads that ``heads`` does not name; None for the profile's default."""

    heads: Annotated[dict[Ranges, MethodSpec], DisjointRanges] = {}


class Provenance(_Section):
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
    figures: Figures | None = None
    """What calibration measured of each head."""


class Level(_Section):
    """What every layer and head does where one bound on the error holds, and what was measured of that."""

    dense_layers: Ranges = ()
    default: MethodSpec
    layers: Annotated[dict[Ranges, LayerProfile], DisjointRanges] = {}
    provenance: Provenance = Provenance()

    @cached_property
    def _by_layer(self) -> dict[int, LayerProfile]:
        return {layer: profile for layers, profile in self.layers.items() for layer in layers}

    def methods_of(self, layer: int, num_heads: int) -> tuple[Method, ...]:
        """The method of each of the model's ``num_heads`` query heads in one layer."""
        profile = self._by_layer.get(layer, LayerProfile())
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
                methods[type(method)].append(method.selection)
        return [why for kind, heads in methods.items() if (why := kind.objection(heads)) is not None]

    def _data(self) -> dict[str, Any]:
        """The fields here as a file has them, without those that say nothing."""
        provenance = self.provenance.model_dump(exclude_none=True, exclude={"figures"})
        if self.provenance.figures is not None:
            provenance["figures"] = self.provenance.figures.data()
        data = {
            "dense_layers": _key(self.dense_layers) if self.dense_layers else None,
            "default": _spec(self.default),
            "layers": {_key(layers): _layer_data(profile) for layers, profile in self.layers.items()},
            "provenance": provenance,
        }
        return {name: value for name, value in data.items() if value is not None and value != {}}


class Profile(Level):
    """A checked profile. ``methods_of`` answers what it is asked for; ``check_model`` comes before that."""

    format: Literal[1]
    model: ModelShape | None
    """The model that it fits; None (``any`` in the file) if it fits every one."""
    min_tokens: TokenCount | None = None
    min_query_tokens: TokenCount | None = None
    level: LevelName | None = None
    """Which bound the profile's own default, layers and dense_layers hold; None where nobody says."""
    levels: dict[LevelName, Level] = {}
    """Other bounds, and what holds them. A request may name them."""

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
            problems.append(f"level: missing, expected one of {', '.join(get_args(LevelName))}, as levels are given")
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
        """What a request may name: exact, which every server has, then the profile's levels, closest bound first."""
        return EXACT, *(name for name in get_args(LevelName) if name == self.level or name in self.levels)

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
        shape = {name: value for name, value in vars(self.model).items() if value is not None} if self.model else None
        own = self._data()
        provenance = own.pop("provenance", None)
        data = {
            "format": self.format,
            "model": shape or ANY_MODEL,
            "min_tokens": self.min_tokens,
            "min_query_tokens": self.min_query_tokens,
            "level": self.level,
            **own,
            "levels": {name: level._data() for name, level in self.levels.items()},
            "provenance": provenance,
        }
        return strict_yaml.dump({name: value for name, value in data.items() if value is not None and value != {}})


def load_profile(name_or_path: str | Path, asked_by: str = "profile") -> Profile:
    """The bundled profile of that name, or else the one in that file.

    Raises ``ConfigurationError`` naming file and field; if there is no such profile, with the bundled ones' names and
    the option that asked for it.
    """
    bundled = bundled_profiles()
    path = bundled.get(str(name_or_path)) or Path(name_or_path).expanduser()
    if not path.is_file():
        raise ConfigurationError(
            f"{asked_by}: no such file; {not_one_of(str(name_or_path), bundled)}, or a file's path"
        )
    return parse_profile(strict_yaml.read_text(path), str(path))


def parse_profile(text: str, source: str) -> Profile:
    """The profile that a YAML text holds; errors name ``source``."""
    try:
        return Profile.model_validate(strict_yaml.parse(text, source))
    except ValidationError as error:
        raise report(error, Profile, f"{source}: ") from None


def bundled_profiles() -> dict[str, Path]:
    """Paths of the profiles that come with this package, by name."""
    package = Path(str(resources.files("vllm_sparse_backend")))
    # A wheel carries them inside the package, an editable checkout beside it.
    folder = next((path for path in (package / "_profiles", package.parent / "profiles") if path.is_dir()), None)
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))} if folder else {}


# Pattern names of the files in MInference's repository (minference/configs/*.json, as of August 2025).
_MINFERENCE_PATTERNS: dict[str, Callable[[int, int], dict[str, Any]]] = {
    "vertical_and_slash": lambda a, b: {"method": "vertical_slash", "vertical_tokens": a, "slash_tokens": b},
    "stream_llm": lambda a, b: {"method": "a_shape", "sink_tokens": a, "local_tokens": b},
    "block_sparse": lambda a, b: {"method": "block_sparse", "top_blocks": 100},
}


def import_minference(json_path: str | Path, model_config_path: str | Path) -> Profile:
    """The profile that says the same as a file of MInference's offline search.

    Such a file is a list with one object for each layer, ``{"HEAD": [pattern, a, b, score]}``, heads counted over the
    whole model:

    * ``vertical_and_slash``: keep the ``a`` heaviest columns (tokens) and the ``b`` heaviest diagonals;
    * ``stream_llm``: keep the first ``a`` tokens (sink) and a window of ``b`` tokens (local);
    * ``block_sparse``: the authors' code keeps 100 blocks of 64 keys for each block of queries that it computes at a
      time, whatever ``a`` and ``b`` say (in their search ``a`` was a ratio, not a count), and so does the profile;
    * ``score`` is the search's own measure, which changed between its versions: recall in some files, a count of
      differing outputs in others. It is not kept.

    ``model_config_path`` is the model's folder or config.json: the file itself does not name its model. Raises
    ``ConfigurationError`` naming file, layer and head where either is not of that form or they do not fit each other.
    """
    path = Path(json_path)
    shape = ModelShape.from_folder(Path(model_config_path))
    try:
        layers = json.loads(strict_yaml.read_text(path), object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path}: not JSON: {error}") from None
    if not isinstance(layers, list) or len(layers) != shape.num_layers:
        given = f"{len(layers)} layers" if isinstance(layers, list) else type(layers).__name__
        raise ConfigurationError(f"{path}: given {given}, expected a list of {shape.num_layers} for {shape}")
    default = make_method("minference", {})
    profiles: dict[tuple[int, ...], LayerProfile] = {}
    for layer, heads in enumerate(layers):
        methods = _minference_layer(heads, shape, f"{path}: layer {layer}")
        if others := {method: ids for method, ids in methods.items() if method != default}:
            profiles[layer,] = LayerProfile(heads={tuple(ids): method for method, ids in others.items()})
    source = Provenance(source=f"imported from MInference's {path.name}")
    return Profile(format=1, model=shape, default=default, layers=profiles, provenance=source)


def _minference_layer(heads: object, shape: ModelShape, where: str) -> dict[Method, list[int]]:
    if not isinstance(heads, dict) or set(heads) != {str(head) for head in range(shape.num_heads)}:
        given = f"heads {', '.join(heads) or 'none'}" if isinstance(heads, dict) else repr(heads)
        expected = f"an object with the heads 0 to {shape.num_heads - 1} for {shape}"
        raise ConfigurationError(f"{where}: given {given:.80}, expected {expected}")
    methods: dict[Method, list[int]] = {}
    for head in range(shape.num_heads):
        methods.setdefault(_minference_method(heads[str(head)], f"{where}, head {head}"), []).append(head)
    return methods


def _minference_method(entry: object, where: str) -> Method:
    match entry:
        case [str(pattern), int(a), int(b), int() | float()]:
            if pattern not in _MINFERENCE_PATTERNS:
                raise ConfigurationError(f"{where}: pattern: {not_one_of(pattern, _MINFERENCE_PATTERNS)}")
        case _:
            raise ConfigurationError(f"{where}: {unexpected(entry, '[pattern, integer, integer, score]')}")
    try:
        return _to_method(_MINFERENCE_PATTERNS[pattern](a, b))
    except ValueError as error:
        raise ConfigurationError(f"{where}: {error}") from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(mapping := dict(pairs)) != len(pairs):
        raise ValueError("an object has a key twice")
    return mapping


def _key(numbers: tuple[int, ...]) -> int | str:
    return numbers[0] if len(numbers) == 1 else format_ranges(numbers)


def _spec(method: Method) -> dict[str, Any]:
    return strict_yaml.FlowDict(parameters_of(method))


def _layer_data(profile: LayerProfile) -> dict[str, Any]:
    default = {} if profile.default is None else {"default": _spec(profile.default)}
    heads = {_key(heads): _spec(method) for heads, method in profile.heads.items()}
    return default | ({"heads": heads} if heads else {})
