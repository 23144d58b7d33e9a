# SPDX-License-Identifier: Apache-2.0
"""``ModelShape``: the layers and heads of a model, read from its config.json, to which profiles refer."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, StrictFloat, StrictInt, StrictStr, model_validator

from vllm_sparse_backend.config.errors import ConfigurationError, Section, refusal, unexpected
from vllm_sparse_backend.config.input_files import read_text
from vllm_sparse_backend.config.ranges import MAX_NUMBER

Count = Annotated[StrictInt, Field(ge=1, le=MAX_NUMBER)]
Name = Annotated[StrictStr, Field(min_length=1)]

# Keys of each number in a model's config.json: the usual key first, then those of older remote-code models.
_CONFIG_NAMES = {
    "num_layers": ("num_hidden_layers", "num_layers", "n_layer"),
    "num_heads": ("num_attention_heads", "n_head"),
    "num_kv_heads": ("num_key_value_heads", "multi_query_group_num"),
    "head_dim": ("head_dim", "kv_channels"),
    "hidden_size": ("hidden_size", "n_embd"),
}

_PATTERN_KINDS = {"*": "full_attention", "M": "mamba", "-": "mlp", "E": "moe"}
"""Kinds of layers in the string that Nemotron-H's older configs have instead of a list."""


class ModelShape(Section):
    """Layers and heads of a whole model, before tensor parallelism splits it."""

    architecture: Name
    num_layers: Count
    num_heads: Count
    num_kv_heads: Count
    head_dim: Count
    rope_theta: Annotated[StrictFloat, Field(gt=0, allow_inf_nan=False)] | None = None
    names: tuple[Name, ...] = ()
    """Names of models with this shape. They do not decide whether a profile fits."""

    @model_validator(mode="after")
    def _heads_fit(self) -> Self:
        if self.num_heads % self.num_kv_heads:
            expected = f"a divisor of num_heads {self.num_heads}"
            raise ValueError(f"num_kv_heads: {unexpected(self.num_kv_heads, expected)}")
        return self

    def __str__(self) -> str:
        """Format the shape for messages."""
        theta = f", rope_theta {self.rope_theta:g}" if self.rope_theta is not None else ""
        return (
            f"{self.architecture} with {self.num_layers} layers, {self.num_heads} heads, {self.num_kv_heads} kv heads, "
            f"head_dim {self.head_dim}{theta}"
        )

    def differences(self, other: Self) -> list[str]:
        """List the fields in which two shapes differ."""
        without_theta = None in (self.rope_theta, other.rope_theta)
        left_out = {"names", "rope_theta"} if without_theta else {"names"}
        names = [name for name in ModelShape.model_fields if name not in left_out]
        return [name for name in names if getattr(self, name) != getattr(other, name)]

    @staticmethod
    def from_config(config: Mapping[str, Any], source: str = "config.json") -> "ModelShape":
        """Read the shape from the content of a config.json."""
        text = text_part(config, source)
        numbers = usual_numbers(text)
        values = {name: numbers.get(keys[0]) for name, keys in _CONFIG_NAMES.items()}
        hidden_size, num_heads = values.pop("hidden_size"), values["num_heads"]
        if values["num_kv_heads"] is None:
            values["num_kv_heads"] = num_heads
        if values["head_dim"] is None and isinstance(hidden_size, int) and isinstance(num_heads, int) and num_heads > 0:
            values["head_dim"] = hidden_size // num_heads
        architectures = config.get("architectures") or text.get("architectures") or []
        values["architecture"] = architectures[0] if isinstance(architectures, list) and architectures else None
        values["rope_theta"] = text.get("rope_theta") or _mapping(text, "rope_parameters", source).get("rope_theta")
        path = config.get("_name_or_path")
        if isinstance(path, str) and path.strip("/"):
            values["names"] = (name_of_path(path),)
        return ModelShape.read(values, f"{source}: ")

    @staticmethod
    def from_folder(path: Path) -> "ModelShape":
        """Read the shape of a model on disk."""
        name = {"_name_or_path": str(path.resolve())} if path.is_dir() else {}
        file = config_file(path)
        return ModelShape.from_config({**read_config_json(file), **name}, str(file))


def config_file(model: Path) -> Path:
    """Return the path of a model's config.json."""
    return model / "config.json" if model.is_dir() else model


def read_config_json(path: Path) -> dict[str, Any]:
    """Read a model's config.json."""
    try:
        config = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path}: not JSON: {error}") from None
    if not isinstance(config, dict):
        raise refusal(str(path), config, "the mapping of a model configuration")
    return config


def text_part(config: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    """Return the part of a model's config that describes its language model."""
    return _mapping(config, "text_config", source) or config


def usual_numbers(text: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of layers and heads of a config under the usual keys."""
    numbers = {}
    for keys in _CONFIG_NAMES.values():
        values = [text[key] for key in keys if text.get(key) is not None]
        if values:
            numbers[keys[0]] = values[0]
    if kinds := layer_kinds(text):
        numbers.setdefault("num_hidden_layers", len(kinds))
    return numbers


def layer_kinds(text: Mapping[str, Any]) -> list[Any] | None:
    """Return the kind of each layer, such as ``full_attention``, that a config names."""
    pattern = text.get("hybrid_override_pattern")
    if isinstance(pattern, str):
        pattern = [_PATTERN_KINDS.get(character, character) for character in pattern]
    candidates = (text.get("layer_types"), text.get("layers_block_type"), pattern)
    return next((kinds for kinds in candidates if kinds and isinstance(kinds, list)), None)


def _mapping(config: Mapping[str, Any], name: str, source: str) -> Mapping[str, Any]:
    value = config.get(name) or {}
    if not isinstance(value, Mapping):
        raise refusal(f"{source}: {name}", value, "a mapping of fields to values")
    return value


def name_of_path(path: str) -> str:
    """Return the name of the model at a path."""
    parts = [part for part in path.split("/") if part]
    cached = next((part for part in parts if part.startswith("models--")), None)
    if cached is not None:
        return cached.removeprefix("models--").replace("--", "/")
    return path if len(parts) == 2 and not path.startswith(("/", ".", "~")) else parts[-1]
