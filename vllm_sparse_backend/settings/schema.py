# SPDX-License-Identifier: Apache-2.0
"""The JSON Schema of profiles, from the models that check them: what an editor completes and marks.

All that a server takes fits it. It says less than a server checks, though: that heads and layers are those of the
model, that ranges do not overlap, and which values a method refuses, only ``sparse-prefill profile check`` says.
"""

import dataclasses
import typing
from typing import Any

from pydantic import TypeAdapter

from vllm_sparse_backend.settings.methods import PRESETS
from vllm_sparse_backend.settings.profile import ANY_MODEL, METHOD_MARK, Profile
from vllm_sparse_backend.settings.ranges import RANGES_PATTERN
from vllm_sparse_kernels.methods import METHODS

_BY_RANGES = ("Layers", "Heads")
"""Titles of the mappings whose keys are layers or heads: pydantic says nothing of such keys."""

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def profile_schema() -> dict[str, Any]:
    """Of a profile, be it written in YAML or JSON."""
    schema = _with_references(Profile.model_json_schema())
    for section in (schema, schema["$defs"]["Level"]):
        del section["properties"]["provenance"]["default"]
    schema["properties"]["model"] = {"anyOf": [{"$ref": "#/$defs/ModelShape"}, {"const": ANY_MODEL}]}
    names = {name: name for name in METHODS} | {name: method for name, (method, _) in PRESETS.items()}
    schema["$defs"]["Method"] = {"oneOf": [_method(name, method) for name, method in names.items()]}
    return {"$schema": DIALECT, **schema}


def _with_references(part: Any) -> Any:
    if isinstance(part, list):
        return [_with_references(one) for one in part]
    if not isinstance(part, dict):
        return part
    if METHOD_MARK in part:
        return {"$ref": "#/$defs/Method"}
    keys = {"propertyNames": {"pattern": RANGES_PATTERN}} if part.get("title") in _BY_RANGES else {}
    return {name: _with_references(one) for name, one in part.items()} | keys


def _method(name: str, method: str) -> dict[str, Any]:
    parameters = METHODS[method].parameters
    hints = typing.get_type_hints(parameters)
    fields = [field for field in dataclasses.fields(parameters) if field.init]
    own = {field.name: TypeAdapter(hints[field.name]).json_schema() | {"default": field.default} for field in fields}
    properties = {"method": {"const": name}, **own}
    return {"type": "object", "properties": properties, "required": ["method"], "additionalProperties": False}
