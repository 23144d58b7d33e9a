# SPDX-License-Identifier: Apache-2.0
"""From which lengths on sparse prefill pays: measured per device, engine and method, never guessed.

A table ships with the package (``_crossover/measured.json``); ``sparse-prefill bench crossover`` makes one for another
card, and ``crossover`` of the configuration names it. What was measured of a profile's own heads when it was made
stands in the profile, and goes before the table. Where no entry fits, cautious numbers stand in, and the log says so.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PlainValidator, StrictInt, StrictStr, WithJsonSchema, model_validator

from vllm_sparse_backend.settings.errors import ConfigurationError, Section, unexpected
from vllm_sparse_backend.settings.methods import make_method
from vllm_sparse_backend.settings.ranges import MOST_COUNT
from vllm_sparse_backend.settings.strict_yaml import file_at, read_text, why_no_file
from vllm_sparse_kernels.methods import name_of
from vllm_sparse_kernels.methods.base import Method
from vllm_sparse_kernels.methods.dense.method import Dense

AUTO: Literal["auto"] = "auto"

UNMEASURED_MIN_TOKENS = 16384
"""Below, the usual sizes leave too few pairs out: at 16,384 tokens A-shape's 5,120 keys leave out 0.47 of them, the
6,096 nearest diagonals 0.39.
"""

UNMEASURED_MIN_QUERY_TOKENS = 1024
"""Eight tiles of 32 heads are 256 programs, about two for each multiprocessor of an H100; and selecting reads all keys,
however few the queries are.
"""

COMMAND = "sparse-prefill bench crossover"
SHIPPED = "_crossover/measured.json"
"""Within the package."""


def _to_token_count(given: object) -> object:
    if given == AUTO:
        return given
    if type(given) is not int:
        raise ValueError(unexpected(given, f"an integer, or {AUTO!r}"))
    if not 0 <= given <= MOST_COUNT:
        raise ValueError(unexpected(given, f"at least 0, and at most {MOST_COUNT}"))
    return given


_NUMBER_SCHEMA = {"type": "integer", "minimum": 0, "maximum": MOST_COUNT}
_TOKEN_COUNT_SCHEMA = WithJsonSchema({"anyOf": [_NUMBER_SCHEMA, {"const": AUTO}]})
TokenCount = Annotated[int | Literal["auto"], PlainValidator(_to_token_count), _TOKEN_COUNT_SCHEMA]
"""As configurations have it: a number, or ``auto`` for what the table says."""

Count = Annotated[StrictInt, Field(ge=1)]
Tokens = Annotated[StrictInt, Field(ge=0, le=MOST_COUNT)]


class Least(Section):
    """From where on sparse pays. Either number is null where it never did, up to the longest length that was tried."""

    min_tokens: Tokens | None
    min_query_tokens: Tokens | None

    @property
    def pays(self) -> bool:
        return self.min_tokens is not None and self.min_query_tokens is not None


class OwnCrossover(Least):
    """What was measured of a level's own heads, when its profile was made, on one of the prompts."""

    method: ClassVar[str] = "the heads of this profile"

    device: StrictStr
    """As torch names it."""
    engines: tuple[StrictStr, ...]
    """Those that its layers attend with there."""
    longest_tokens: Tokens
    """The longest prompt that was tried."""

    def is_of(self, device: str, engine: str) -> bool:
        return self.device.casefold() == device.casefold() and engine in self.engines


class Entry(Least):
    """One measurement of the table."""

    device: StrictStr
    """As torch names it, such as ``NVIDIA H100 80GB HBM3``."""
    engine: StrictStr
    method: StrictStr
    params: dict[str, Any] = Field(default={})
    """Those that differ from the method's defaults."""
    num_heads: Count
    num_kv_heads: Count
    head_dim: Count
    vllm: StrictStr
    triton: StrictStr
    date: StrictStr
    command: StrictStr | None = None

    @model_validator(mode="after")
    def _known(self) -> "Entry":
        make_method(self.method, self.params)
        return self

    @cached_property
    def parameters(self) -> Method:
        return make_method(self.method, self.params)

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.num_heads, self.num_kv_heads, self.head_dim


class Crossover(Section):
    """A table of measurements, as its file has it."""

    format: Literal[1]
    entries: tuple[Entry, ...]

    def engines(self, device: str) -> list[str]:
        """Engines that were measured on this device."""
        return sorted({entry.engine for entry in self.entries if entry.device.casefold() == device.casefold()})

    def find(self, device: str, engine: str, method: Method, shape: tuple[int, int, int]) -> tuple[Entry, ...]:
        """Entries of this device, engine and kind of method, as close as there are.

        Equal parameters go before equal (num_heads, num_kv_heads, head_dim); several may be equally close.
        """
        found: dict[tuple[bool, bool], list[Entry]] = {}
        for entry in self.entries:
            if (entry.device.casefold(), entry.engine) != (device.casefold(), engine):
                continue
            if name_of(entry.parameters) == name_of(method):
                found.setdefault((entry.parameters == method, entry.shape == shape), []).append(entry)
        return tuple(found[max(found)]) if found else ()


@dataclass(frozen=True)
class Thresholds:
    """From where on rows go sparse; ``notes`` are lines for the log that say what was not measured."""

    min_tokens: int | None
    """The first positions of a row, which are always dense; None if no row ever goes sparse."""
    min_query_tokens: int
    """Rows with fewer new tokens past ``min_tokens`` are dense."""
    notes: tuple[str, ...] = ()
    measured: int | None = field(default=None, compare=False)
    """``min_query_tokens`` of the table; None where it has none for some method."""

    def fitted(self, chunk: int, busy: int) -> "Thresholds":
        """With fewer ``min_query_tokens``, where steps are too small for them and the table has smaller ones pay.

        chunk: most new tokens that a step has of a request; busy: of those beside as many decodes as there may be. What
        was measured lies up to half below its number, as lengths were tried by doubling: an eighth less passes for it.
        """
        if busy >= self.min_query_tokens or self.measured is None:
            return self
        fewest = max(min(self.measured, busy), self.measured - self.measured // 8)
        if not fewest < self.min_query_tokens or fewest > chunk:
            return self
        note = (
            f"min_query_tokens is {fewest} here, not {self.min_query_tokens}: a step has {chunk} new tokens of a "
            f"request at most, {busy} beside as many decodes as there may be; measured to pay from {self.measured} on"
        )
        return replace(self, min_query_tokens=fewest, notes=(*self.notes, note))

    @property
    def severity(self) -> tuple[float, int]:
        """Larger where fewer rows go sparse."""
        return math.inf if self.min_tokens is None else self.min_tokens, self.min_query_tokens

    def __str__(self) -> str:
        if self.min_tokens is None:
            return "no rows"
        return f"rows of more than {self.min_tokens} tokens, at least {self.min_query_tokens} of them new"


def resolve(
    min_tokens: TokenCount,
    min_query_tokens: TokenCount,
    methods: Iterable[Method],
    table: Crossover,
    device: str,
    engine: str,
    shape: tuple[int, int, int],
    own: OwnCrossover | None = None,
) -> Thresholds:
    """Numbers in place of ``auto``: ``own`` ones, if they are of this device and engine, else the largest that the
    table has for any of ``methods`` on this device.

    ``shape``: (num_heads, num_kv_heads, head_dim) of a layer. Heads that keep everything need no measurement beside
    others that do not: no length makes them pay.
    """
    found: dict[Method, tuple[Entry | OwnCrossover, ...]]
    if own is not None and own.is_of(device, engine):
        found = dict.fromkeys(methods, (own,))
    else:
        found = {method: table.find(device, engine, method, shape) for method in methods}
    if not all(isinstance(method, Dense) for method in found):
        found = {method: entries for method, entries in found.items() if entries or not isinstance(method, Dense)}
    entries = [entry for of_method in found.values() for entry in of_method]
    unmeasured = sorted({name_of(method) for method, of_method in found.items() if not of_method})
    never = sorted({entry.method for entry in entries if not entry.pays})
    notes = []
    where = f"on {device} with engine {engine}"
    if unmeasured:
        stand_ins = {"min_tokens": (min_tokens, UNMEASURED_MIN_TOKENS)}
        stand_ins["min_query_tokens"] = (min_query_tokens, UNMEASURED_MIN_QUERY_TOKENS)
        automatic = [f"{name} {number}" for name, (setting, number) in stand_ins.items() if setting == AUTO]
        notes.append(
            f"{', '.join(unmeasured)} not measured {where}: auto stands for {' and '.join(automatic)} there; "
            f"`{COMMAND}` measures them"
        )
    queries = [entry.min_query_tokens for entry in entries if entry.min_query_tokens is not None]
    measured = None if unmeasured or not queries else max(queries)
    if measured is None:
        queries.append(UNMEASURED_MIN_QUERY_TOKENS)
    fewest = max(queries) if min_query_tokens == "auto" else min_query_tokens
    if min_tokens != "auto":
        return Thresholds(min_tokens, fewest, tuple(notes) if min_query_tokens == "auto" else (), measured)
    if never:
        note = (
            f"{', '.join(never)} never faster than dense attention {where}, as measured: all rows run dense; "
            "choose another method or other parameters, or set min_tokens to go sparse all the same"
        )
        return Thresholds(None, fewest, (note,))
    lengths = [entry.min_tokens for entry in entries if entry.min_tokens is not None]
    return Thresholds(max(lengths + [UNMEASURED_MIN_TOKENS] * bool(unmeasured)), fewest, tuple(notes), measured)


def crossover_file(path: str | None = None) -> Path:
    """The table's file, or the one that ships. Raises ``ConfigurationError`` where there is none."""
    file = file_at(path or str(resources.files("vllm_sparse_backend") / SHIPPED))
    if file is None:
        problem = why_no_file(str(path))
        raise ConfigurationError(f"crossover: given {path!r}: {problem}; expected a file that `{COMMAND}` wrote")
    return file


def parse_crossover(text: str, source: str) -> Crossover:
    """The table that a file's text holds. Raises ``ConfigurationError`` naming ``source`` and field."""
    return Crossover.read(text, f"{source}: ")


def load_crossover(path: str | None = None) -> Crossover:
    """The table in that file, or the one that ships."""
    file = crossover_file(path)
    return parse_crossover(read_text(file), str(file))
