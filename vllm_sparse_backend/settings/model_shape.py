# SPDX-License-Identifier: Apache-2.0
"""What a profile must know of a model: its layers and heads."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from vllm_sparse_backend.settings.errors import ConfigurationError, report, unexpected
from vllm_sparse_backend.settings.ranges import MAX_NUMBER
from vllm_sparse_backend.settings.strict_yaml import read_text

Count = Annotated[int, Field(ge=1, le=MAX_NUMBER, strict=True)]

# Where a model's config.json has each number; the later names are those of older remote-code models.
_CONFIG_NAMES = {
    "num_layers": ("num_hidden_layers", "num_layers", "n_layer"),
    "num_heads": ("num_attention_heads", "n_head"),
    "num_kv_heads": ("num_key_value_heads", "multi_query_group_num"),
    "head_dim": ("head_dim", "kv_channels"),
    "hidden_size": ("hidden_size", "n_embd"),
}


@dataclass(frozen=True)
class ModelShape:
    """Layers and heads of a whole model, before tensor parallelism splits it.

    ``rope_theta`` tells models apart that share a shape and differ in context length; None where it is not known.
    ``names`` are what models of this shape are called: of several profiles that fit, ``auto`` takes the one that names
    the model. They are no part of the shape: shapes that differ only in them are equal.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    architecture: Annotated[str, Field(strict=True, min_length=1)]
    num_layers: Count
    num_heads: Count
    num_kv_heads: Count
    head_dim: Count
    rope_theta: Annotated[float, Field(gt=0, strict=True, allow_inf_nan=False)] | None = None
    names: tuple[Annotated[str, Field(strict=True, min_length=1)], ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            expected = f"a divisor of num_heads {self.num_heads}"
            raise ValueError(f"num_kv_heads: {unexpected(self.num_kv_heads, expected)}")

    def __str__(self) -> str:
        theta = f", rope_theta {self.rope_theta:g}" if self.rope_theta is not None else ""
        return (
            f"{self.architecture} with {self.num_layers} layers, {self.num_heads} heads, {self.num_kv_heads} kv heads, "
            f"head_dim {self.head_dim}{theta}"
        )

    def differences(self, other: Self) -> list[str]:
        """Names of the fields in which the two differ; a rope_theta that one does not know is no difference."""
        names = [one.name for one in fields(self) if one.compare]
        pairs = {name: (getattr(self, name), getattr(other, name)) for name in names}
        if None in pairs["rope_theta"]:
            del pairs["rope_theta"]
        return [name for name, (mine, theirs) in pairs.items() if mine != theirs]

    @staticmethod
    def from_config(config: Mapping[str, Any], source: str = "config.json") -> "ModelShape":
        """The shape that a model's config.json states; of a multimodal model, that of its text part."""
        text = text_part(config, source)
        found = {field: _first(text, names) for field, names in _CONFIG_NAMES.items()}
        hidden_size, num_heads = found.pop("hidden_size"), found["num_heads"]
        if found["num_kv_heads"] is None:
            found["num_kv_heads"] = num_heads
        if found["head_dim"] is None and isinstance(hidden_size, int) and isinstance(num_heads, int) and num_heads > 0:
            found["head_dim"] = hidden_size // num_heads
        architectures = config.get("architectures") or text.get("architectures") or []
        found["architecture"] = architectures[0] if isinstance(architectures, list) and architectures else None
        found["rope_theta"] = text.get("rope_theta") or _mapping(text, "rope_parameters", source).get("rope_theta")
        if isinstance(name := config.get("_name_or_path"), str) and name.strip("/"):
            found["names"] = (name_of_path(name),)
        try:
            return TypeAdapter(ModelShape).validate_python(found)
        except ValidationError as error:
            raise report(error, ModelShape, f"{source}: ") from None

    @staticmethod
    def from_folder(path: Path) -> "ModelShape":
        """The shape of a model folder, which names it as it does on a server, or of a config.json, which may itself."""
        named = {"_name_or_path": str(path.resolve())} if path.is_dir() else {}
        file = config_file(path)
        return ModelShape.from_config({**read_config_json(file), **named}, str(file))


def config_file(model: Path) -> Path:
    """The config.json of a model folder; a file is taken for one."""
    return model / "config.json" if model.is_dir() else model


def read_config_json(path: Path) -> dict[str, Any]:
    """What a model's config.json holds, as it stands there. Raises ``ConfigurationError`` where that is no mapping."""
    try:
        config = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path}: not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ConfigurationError(f"{path}: {unexpected(config, 'the mapping of a model configuration')}")
    return config


def text_part(config: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    """Of a multimodal model's config the text part, of any other the config itself."""
    return _mapping(config, "text_config", source) or config


def usual_numbers(text: Mapping[str, Any]) -> dict[str, Any]:
    """What a config's text part states of layers and heads, under the names that most models have."""
    found = {names[0]: _first(text, names) for names in _CONFIG_NAMES.values()}
    return {name: value for name, value in found.items() if value is not None}


def _mapping(config: Mapping[str, Any], name: str, source: str) -> Mapping[str, Any]:
    given = config.get(name) or {}
    if not isinstance(given, Mapping):
        raise ConfigurationError(f"{source}: {name}: {unexpected(given, 'a mapping of fields to values')}")
    return given


def _first(config: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    return next((config[name] for name in names if config.get(name) is not None), None)


def name_of_path(path: str) -> str:
    """What the model at a path is called: of a folder its name, of a hub's repository, cached or not, owner/name."""
    parts = [part for part in path.split("/") if part]
    cached = next((part for part in parts if part.startswith("models--")), None)
    if cached is not None:
        return cached.removeprefix("models--").replace("--", "/")
    return path if len(parts) == 2 and not path.startswith(("/", ".", "~")) else parts[-1]
