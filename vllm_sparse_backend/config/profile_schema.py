# SPDX-License-Identifier: Apache-2.0
"""The JSON Schema of profiles, for completion and checks in editors.

Every valid profile fits the schema. The reverse does not hold: only ``sparse-prefill profile check`` checks that layers
and heads exist in the model, that ranges do not overlap, and that a method accepts its values.
"""

import dataclasses
import typing
from typing import Any

from pydantic import TypeAdapter

from vllm_sparse_backend.config.method_parameters import PRESETS
from vllm_sparse_backend.config.profile import ANY_MODEL, METHOD_MARK, Profile
from vllm_sparse_backend.config.ranges import RANGES_PATTERN
from vllm_sparse_kernels.methods import METHODS

_RANGE_MAPPINGS = ("Layers", "Heads")
"""Titles of the mappings whose keys are ranges of layers or heads; pydantic's schema leaves such keys open."""

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def profile_schema() -> dict[str, Any]:
    """Build the JSON Schema of a profile written in YAML or JSON."""
    schema = _with_references(Profile.model_json_schema())
    for section in (schema, schema["$defs"]["Level"]):
        del section["properties"]["provenance"]["default"]
    model = schema["properties"]["model"]
    schema["properties"]["model"] = {
        "anyOf": [{"$ref": "#/$defs/ModelShape"}, {"const": ANY_MODEL}],
        "description": model["description"],
    }
    names = {name: name for name in METHODS} | {name: method for name, (method, _) in PRESETS.items()}
    schema["$defs"]["Method"] = {"oneOf": [_method(name, method) for name, method in names.items()]}
    return {"$schema": DIALECT, **schema}


def _with_references(part: Any) -> Any:
    if isinstance(part, list):
        return [_with_references(item) for item in part]
    if not isinstance(part, dict):
        return part
    if METHOD_MARK in part:
        description = {"description": part["description"]} if "description" in part else {}
        return {"$ref": "#/$defs/Method"} | description
    keys = {"propertyNames": {"pattern": RANGES_PATTERN}} if part.get("title") in _RANGE_MAPPINGS else {}
    return {name: _with_references(value) for name, value in part.items()} | keys


def _method(name: str, method: str) -> dict[str, Any]:
    parameters = METHODS[method].parameters
    hints = typing.get_type_hints(parameters)
    fields = [field for field in dataclasses.fields(parameters) if field.init]
    values = {field.name: TypeAdapter(hints[field.name]).json_schema() | {"default": field.default} for field in fields}
    properties = {"method": {"const": name}, **values}
    return {"type": "object", "properties": properties, "required": ["method"], "additionalProperties": False}
