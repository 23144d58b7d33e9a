# SPDX-License-Identifier: Apache-2.0
"""The one error that a wrong configuration ends in, and how it is worded."""

import difflib
import reprlib
from collections.abc import Iterable, Iterator
from dataclasses import is_dataclass
from typing import Any, Self, get_args, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 80
_short.maxlist = _short.maxdict = 20


class ConfigurationError(RuntimeError):
    """What was given, what was expected and where (file, field), on one line.

    Not a ValueError: inside vLLM's own configuration classes pydantic would catch it and wrap it in a page of text.
    """

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


def unexpected(given: object, expected: str) -> str:
    """ "given …, expected …", with a long value cut short."""
    shown = _short.repr(given) if isinstance(given, (dict, list)) else repr(given)
    return f"given {shown if len(shown) <= 80 else shown[:77] + '...'}, expected {expected}"


def not_one_of(given: object, allowed: Iterable[str]) -> str:
    """ "given …, expected one of …", and the closest of them if ``given`` looks like a slip."""
    names = sorted(allowed)
    close = difflib.get_close_matches(str(given), names, n=1)
    return unexpected(given, f"one of {', '.join(names)}" + (f" (did you mean {close[0]!r}?)" if close else ""))


LONGEST_SLIP = 40
"""Characters. A longer key is nobody's slip of ours, and comparing it would take time that grows with its length."""
SLIP_PARTS = ("spars", "prefil")
"""A slip of ``sparse_prefill`` has one of them, whatever else is wrong with it: what has none is not compared."""


def looks_like(key: object, ours: str) -> bool:
    """Whether a key may be a slip of ours: however it is cut up, with letters missing, or with more at its ends."""
    if not isinstance(key, str) or len(key) > LONGEST_SLIP:
        return False
    if not any(part in key.lower() for part in SLIP_PARTS):
        return False
    plain = "".join(filter(str.isalnum, key.lower()))
    name = "".join(filter(str.isalnum, ours.lower()))
    return name in plain or difflib.SequenceMatcher(None, plain, name).ratio() >= 0.85


MAPPINGS = ("dict_type", "model_type", "dataclass_type")
"""Kinds of pydantic's errors that it words by the names of Python's classes."""


def reason_of(detail: ErrorDetails) -> str:
    """What is wrong with one value, without saying where it stands."""
    kind, given = detail["type"], detail["input"]
    if kind == "value_error":  # raised by this project's own validators
        return str(detail["ctx"]["error"])
    if kind == "missing":
        return "missing"
    if kind == "json_invalid":  # whatever file it is, its content is nobody's business
        return f"not JSON: {detail['ctx']['error']}"
    said = detail["msg"].removeprefix("Input should be ")
    return unexpected(given, "a mapping of fields to values" if kind in MAPPINGS else said)


def report(error: ValidationError, model: type, source: str, root: str = "") -> ConfigurationError:
    """All that pydantic found wrong with the fields of ``model``, in one line.

    ``source`` says where they were given (a file, an option), ``root`` under which field there.
    """
    return ConfigurationError(f"{source}{'; '.join(_problem(detail, model, root) for detail in error.errors())}")


def _problem(detail: ErrorDetails, model: type, root: str) -> str:
    path = [str(key) for key in detail["loc"] if key != "[key]"]
    place = ".".join([root, *path] if root else path)
    if detail["type"] not in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"{place}: {reason_of(detail)}" if place else reason_of(detail)
    for key in path[:-1]:
        model = _part(model, key)
    return f"{place}: unknown field: {not_one_of(path[-1], _annotations(model))}"


def _part(model: type, key: str) -> type:
    """The model or dataclass that holds what stands under ``key``; the same one for the keys of a mapping in it."""
    return next(_models_in(_annotations(model).get(key)), model)


def _annotations(model: type) -> dict[str, Any]:
    """The fields of a model or dataclass."""
    if issubclass(model, BaseModel):
        return {name: field.annotation for name, field in model.model_fields.items()}
    return get_type_hints(model)


def _models_in(annotation: Any) -> Iterator[type]:
    if isinstance(annotation, type) and (issubclass(annotation, BaseModel) or is_dataclass(annotation)):
        yield annotation
    for part in get_args(annotation):
        yield from _models_in(part)


class Section(BaseModel):
    """A part of what people write; a field that it does not know is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @classmethod
    def read(cls, given: object, source: str, root: str = "") -> Self:
        """From plain values, or JSON's text. Raises ``ConfigurationError`` as ``report`` words it."""
        try:
            return cls.model_validate_json(given) if isinstance(given, str) else cls.model_validate(given)
        except ValidationError as error:
            raise report(error, cls, source, root) from None
