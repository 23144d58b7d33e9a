# SPDX-License-Identifier: Apache-2.0
"""From a method's name and parameters, as configurations and profiles write them, to the method itself.

Methods and their fields are read from the kernels' table: one that is added there can be configured at once.
"""

import dataclasses
import json
import typing
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from pydantic import TypeAdapter, ValidationError

from vllm_sparse_backend.settings.errors import not_one_of, reason_of, unexpected
from vllm_sparse_backend.settings.ranges import MOST_COUNT
from vllm_sparse_kernels.methods import METHODS, name_of
from vllm_sparse_kernels.methods.base import Method

PRESETS: dict[str, tuple[str, dict[str, Any]]] = {
    "default": ("top_p", {}),
    "minference": ("vertical_slash", {}),
    "streaming": ("a_shape", {}),
}
"""Names that stand for a method and parameters. ``default`` is what a server does that is told nothing: the cheapest
that keeps what dense attention answers on models that others trained (docs/quality.md has the table). MInference
without a profile is vertical-slash, StreamingLLM's pattern is A-shape.
"""


def method_names() -> list[str]:
    """Every name that ``make_method`` takes."""
    return sorted({*METHODS, *(name for name, (method, _) in PRESETS.items() if method in METHODS)})


def make_method(name: object, params: Mapping[str, Any]) -> Method:
    """The method called ``name``; ``params`` replace the defaults of its fields, or what a preset says of them.

    Raises ValueError naming what is wrong: the name, every unknown field, every value of the wrong type, or the value
    that the method itself refuses.
    """
    if not isinstance(name, str) or name not in method_names():
        raise ValueError(f"method: {not_one_of(name, method_names())}")
    method, preset = PRESETS.get(name, (name, {}))
    parameters = METHODS[method].parameters
    adapters = _adapters(parameters)
    problems, values = [], {}
    for field, given in {**preset, **params}.items():
        if field not in adapters:
            fields = not_one_of(field, adapters) if adapters else f"given, but {name} has no parameters"
            problems.append(f"{field}: unknown parameter of {name}: {fields}")
            continue
        try:
            # Through JSON, as strict types then still let a list be a tuple.
            values[field] = adapters[field].validate_json(json.dumps(given), strict=True)
            # Methods state their own lowest values; none has a use for more than kernels can count.
            if isinstance(values[field], int) and values[field] > MOST_COUNT:
                problems.append(f"{field}: {unexpected(given, f'at most {MOST_COUNT}')}")
        except ValidationError as error:
            problems.append(f"{field}: {reason_of(error.errors()[0])}")
        except (TypeError, ValueError):
            problems.append(f"{field}: {unexpected(given, 'a number, a text, true or false')}")
    if problems:
        raise ValueError("; ".join(problems))
    return parameters(**values)


def parameters_of(method: Method) -> dict[str, Any]:
    """A method as profiles write it: its name under ``method``, then all of its fields, and what it asks for beside."""
    return {"method": name_of(method), **method.shown_fields}


def describe(method: Method) -> str:
    """``vertical_slash(vertical_tokens=1000, slash_tokens=6096)``: the name and every field."""
    return _call(name_of(method), method.shown_fields)


def summarize(methods: Sequence[Method]) -> str:
    """Many heads in as few words: the name of their methods, which are alike, and what those say of themselves."""
    return _call(name_of(methods[0]), methods[0].summary(methods))


def _call(name: str, values: Mapping[str, object]) -> str:
    return f"{name}({', '.join(f'{field}={value!r}' for field, value in values.items())})"


@cache
def _adapters(parameters: type[Method]) -> dict[str, TypeAdapter[Any]]:
    hints = typing.get_type_hints(parameters)
    return {field.name: TypeAdapter(hints[field.name]) for field in dataclasses.fields(parameters) if field.init}
