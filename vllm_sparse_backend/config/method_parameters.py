# SPDX-License-Identifier: Apache-2.0
"""Conversion between methods and their names and parameters in configurations and profiles.

Methods and their fields come from the registry of the kernels package, so a method that is added there can be
configured without further code.
"""

import dataclasses
import json
import typing
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from pydantic import TypeAdapter, ValidationError

from vllm_sparse_backend.config.errors import format_value, not_one_of, reason_of, unexpected
from vllm_sparse_backend.config.ranges import MOST_COUNT
from vllm_sparse_kernels.methods import METHODS, name_of
from vllm_sparse_kernels.methods.base import Method

PRESETS = {"default": "top_p", "minference": "vertical_slash", "streaming": "a_shape"}
"""Other names of methods.

``default`` is the cheapest method that keeps nearly all answers of dense attention on third-party models (table in
docs/research/quality.md). ``minference`` is MInference's pattern without a profile, ``streaming`` is
StreamingLLM's pattern.
"""


def method_names() -> list[str]:
    """List every name that ``make_method`` accepts."""
    return sorted({*METHODS, *PRESETS})


def make_method(name: object, params: Mapping[str, Any]) -> Method:
    """Build a method from its name and parameters."""
    if not isinstance(name, str) or name not in method_names():
        raise ValueError(f"method: {not_one_of(name, method_names())}")
    method = PRESETS.get(name, name)
    parameters = METHODS[method].parameters
    adapters = _adapters(parameters)
    problems, values = [], {}
    for field, value in params.items():
        if field not in adapters:
            fields = not_one_of(field, adapters) if adapters else f"given, but {name} has no parameters"
            problems.append(f"{field}: unknown parameter of {name}: {fields}; leave it out")
            continue
        try:
            # Validation of JSON accepts a list for a tuple even with strict types.
            values[field] = adapters[field].validate_json(json.dumps(value), strict=True)
            # Methods check their own minimum. The maximum is the largest count that kernels support.
            if isinstance(values[field], int) and values[field] > MOST_COUNT:
                problems.append(f"{field}: {unexpected(value, f'at most {MOST_COUNT}')}")
        except ValidationError as error:
            problems.append(f"{field}: {reason_of(error.errors()[0])}")
        except (TypeError, ValueError):
            problems.append(f"{field}: {unexpected(value, 'a number, a text, true or false')}")
    if problems:
        raise ValueError("; ".join(problems))
    return parameters(**values)


def parameters_of(method: Method) -> dict[str, Any]:
    """Convert a method to the mapping that profiles contain."""
    return {"method": name_of(method), **method.shown_fields}


def describe(method: Method) -> str:
    """Format a method with all of its fields."""
    return format_call(name_of(method), method.shown_fields)


def summarize(methods: Sequence[Method]) -> str:
    """Format the methods of many heads as one, with the fields that they share."""
    return format_call(name_of(methods[0]), methods[0].summary(methods))


def changed_fields(method: Method) -> dict[str, Any]:
    """Return the parameters that differ from the method's defaults."""
    default = METHODS[name_of(method)].parameters()
    return {name: value for name, value in method.shown_fields.items() if value != getattr(default, name)}


def format_call(name: str, values: Mapping[str, object]) -> str:
    """Format a method's name with the given fields."""
    return f"{name}({', '.join(f'{field}={format_value(value)}' for field, value in values.items())})"


@cache
def _adapters(parameters: type[Method]) -> dict[str, TypeAdapter[Any]]:
    hints = typing.get_type_hints(parameters)
    return {field.name: TypeAdapter(hints[field.name]) for field in dataclasses.fields(parameters) if field.init}
