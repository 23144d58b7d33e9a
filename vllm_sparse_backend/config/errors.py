# SPDX-License-Identifier: Apache-2.0
"""``ConfigurationError``, the wording of its messages, and ``Section``, the base class of everything that users write.

Every message says what was given, what was expected and where: ``dense_layers: given 9, expected at most 5``.
"""

import difflib
import reprlib
from collections.abc import Iterable, Iterator
from typing import Any, Self, get_args

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails


class _JsonRepr(reprlib.Repr):
    """Shows null, true and false as JSON and YAML have them, also within lists and mappings."""

    def repr_NoneType(self, value: None, level: int) -> str:  # noqa: N802
        return "null"

    def repr_bool(self, value: bool, level: int) -> str:
        return str(value).lower()


_short = _JsonRepr()
_short.maxstring = _short.maxother = 80
_short.maxlist = _short.maxdict = 20


class ConfigurationError(RuntimeError):
    """Invalid settings, as one line: what was given, what was expected and where (file, field).

    Not a ValueError, because pydantic would catch that inside vLLM's own configuration classes and wrap it in a page
    of text.
    """

    def __init__(self, message: str) -> None:
        """Join the lines of a message."""
        super().__init__(" ".join(message.split()))


def format_value(value: object) -> str:
    """Format a value for a message."""
    # The full repr of a large mapping or list would take long and then be cut.
    text = _short.repr(value) if value is None or isinstance(value, (dict, list, bool)) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def unexpected(value: object, expected: str) -> str:
    """Format an error about a value."""
    return f"given {format_value(value)}, expected {expected}"


def refusal(place: str, value: object, expected: str) -> ConfigurationError:
    """Return the error about a value at a place."""
    return ConfigurationError(f"{place}: {unexpected(value, expected)}")


def not_one_of(value: object, allowed: Iterable[str]) -> str:
    """Format an error about a name that does not exist."""
    names = sorted(allowed)
    close = difflib.get_close_matches(str(value), names, n=1)
    return unexpected(value, f"one of {', '.join(names)}" + (f" (did you mean {close[0]!r}?)" if close else ""))


def looks_like(key: str, known_key: str) -> bool:
    """Return whether a key may be a typo of a known key. Keys over 40 characters are none, and slow to compare."""
    written, known = ("".join(filter(str.isalnum, text.lower())) for text in (key[:41], known_key))
    return len(key) <= 40 and (known in written or bool(difflib.get_close_matches(written, [known], cutoff=0.85)))


def reason_of(detail: ErrorDetails) -> str:
    """Format one error of pydantic, without its place."""
    kind = detail["type"]
    if kind == "value_error":  # raised by a validator of this project, which wrote the message
        return str(detail["ctx"]["error"])
    if kind == "missing":
        return "missing"
    if kind == "json_invalid":  # does not quote the input: any file of the machine may have been named
        return f"not JSON: {detail['ctx']['error']}"
    if kind in ("dict_type", "model_type"):  # pydantic's messages name Python classes, which users do not know
        return unexpected(detail["input"], "a mapping of fields to values")
    expected = detail["msg"].removeprefix("Input should be ").removeprefix("String should have ")
    for python, written in (("True", "true"), ("False", "false"), ("tuple", "list")):  # as YAML and JSON write them
        expected = expected.replace(python, written)
    return unexpected(detail["input"], expected)


class Section(BaseModel):
    """Base class of everything that users write. Instances are immutable; an unknown field is an error.

    The text under a field is its description, from which tables in the documentation are generated.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    @classmethod
    def read(cls, value: object, source: str, root: str = "") -> Self:
        """Validate plain values or a JSON text."""
        try:
            return cls.model_validate_json(value) if isinstance(value, str) else cls.model_validate(value)
        except ValidationError as error:
            problems = "; ".join(_problem(detail, cls, root) for detail in error.errors())
            raise ConfigurationError(f"{source}{problems}") from None


def _problem(detail: ErrorDetails, section: type[Section], root: str) -> str:
    path = [str(key) for key in detail["loc"] if key != "[key]"]
    place = ".".join([root, *path] if root else path)
    if detail["type"] != "extra_forbidden":
        return f"{place}: {reason_of(detail)}" if place else reason_of(detail)
    for key in path[:-1]:  # fields of sections, and keys of mappings, which may be named like fields of other types
        if key in section.model_fields:
            section = next(_sections_in(section.model_fields[key].annotation), section)
    return f"{place}: unknown field: {not_one_of(path[-1], section.model_fields)}"


def _sections_in(annotation: Any) -> Iterator[type[Section]]:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    for part in get_args(annotation):
        yield from _sections_in(part)
