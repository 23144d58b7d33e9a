# SPDX-License-Identifier: Apache-2.0
"""Prompt lengths from which sparse prefill is faster than dense, as measured per device, engine and method.

A table of measurements ships with the package (``_crossover/measured.json``). ``sparse-prefill bench crossover`` writes
a table for another device; the setting ``crossover`` is its path. If no entry fits, conservative defaults apply, and
the log says so.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, PlainValidator, StrictInt, StrictStr, WithJsonSchema, model_validator

from vllm_sparse_backend.config.attention_reach import Reach
from vllm_sparse_backend.config.errors import ConfigurationError, Section, unexpected
from vllm_sparse_backend.config.fallback import Fallback
from vllm_sparse_backend.config.input_files import existing_path, read_text
from vllm_sparse_backend.config.method_parameters import make_method
from vllm_sparse_backend.config.ranges import MOST_COUNT
from vllm_sparse_kernels.methods import name_of
from vllm_sparse_kernels.methods.base import Method
from vllm_sparse_kernels.methods.dense.method import Dense

AUTO: Literal["auto"] = "auto"

UNMEASURED_MIN_TOKENS = 16384
"""``min_tokens`` without measurements. For shorter prompts, typical budgets leave out too few pairs: at 16,384
tokens, A-shape's 5,120 keys leave out 0.47 of them, and the 6,096 nearest diagonals 0.39.
"""

UNMEASURED_MIN_QUERY_TOKENS = 1024
"""``min_query_tokens`` without measurements: eight tiles of 32 heads are 256 programs, about two for each SM of
an H100, and selection reads all keys even for few queries.
"""

COMMAND = "sparse-prefill bench crossover"
SHIPPED = "_crossover/measured.json"
"""Path of the bundled table within the package."""


def _to_token_count(value: object) -> object:
    if value == AUTO:
        return value
    if type(value) is not int:
        raise ValueError(unexpected(value, f"an integer, or {AUTO!r}"))
    if not 0 <= value <= MOST_COUNT:
        raise ValueError(unexpected(value, f"at least 0, and at most {MOST_COUNT}"))
    return value


_NUMBER_SCHEMA = {"type": "integer", "minimum": 0, "maximum": MOST_COUNT}
_TOKEN_COUNT_SCHEMA = WithJsonSchema({"anyOf": [_NUMBER_SCHEMA, {"const": AUTO}]})
TokenCount = Annotated[int | Literal["auto"], PlainValidator(_to_token_count), _TOKEN_COUNT_SCHEMA]
"""A number of tokens in a configuration or profile, or ``auto`` for the measured crossover."""

Count = Annotated[StrictInt, Field(ge=1)]
Tokens = Annotated[StrictInt, Field(ge=0, le=MOST_COUNT)]


class Entry(Section):
    """One measurement of the table: a method on a device with an engine, for a shape of attention layer.

    Both lengths are null if sparse prefill was slower at every measured length.
    """

    device: StrictStr
    """Name of the device, as torch reports it, such as ``NVIDIA H100 80GB HBM3``."""

    engine: StrictStr
    """Name of the attention engine."""

    method: StrictStr
    """Name of the method."""

    params: dict[str, Any] = Field(default={})
    """Parameters of the method that differ from its defaults."""

    num_heads: Count
    """Query heads of the layer."""

    num_kv_heads: Count
    """Key-value heads of the layer."""

    head_dim: Count
    """Elements of a head's query or key."""

    min_tokens: Tokens | None
    """Shortest prompt, in tokens, for which sparse prefill is faster; null if it was never faster."""

    min_query_tokens: Tokens | None
    """Fewest new tokens of a step for which sparse prefill is faster; null if it was never faster."""

    min_pairs: Tokens | None = None
    """Fewest (query, key) pairs of a step's new tokens with which sparse prefill is faster, measured after cached
    prefixes; null: the pairs of the step that measured ``min_tokens``."""

    pairs_per_token: Tokens = 0
    """Pairs as which each new token counts towards ``min_pairs``: its linear layers keep the GPU busy while the host
    launches the kernels of selection."""

    chunk_tokens: Count = 8192
    """Maximum tokens of a step in the measurement."""

    vllm: StrictStr
    """Version of vLLM."""

    triton: StrictStr
    """Version of Triton."""

    date: StrictStr
    """Date of the measurement."""

    command: StrictStr | None = None
    """Command that made the measurement."""

    @model_validator(mode="after")
    def _known(self) -> "Entry":
        make_method(self.method, self.params)
        return self

    @cached_property
    def parameters(self) -> Method:
        """The measured method."""
        return make_method(self.method, self.params)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(num_heads, num_kv_heads, head_dim) of the measured layer."""
        return self.num_heads, self.num_kv_heads, self.head_dim

    @property
    def least_pairs(self) -> int:
        """``min_pairs``, or the pairs of the tokens with which ``min_tokens`` was measured; 0 if both are null."""
        if self.min_pairs is not None:
            return self.min_pairs
        least = self.min_tokens or 0
        return Reach().pairs(least, least + timed_tokens(least, self.chunk_tokens))

    @property
    def pays(self) -> bool:
        """Whether sparse prefill was faster at any measured length."""
        return self.min_tokens is not None and self.min_query_tokens is not None


class Crossover(Section):
    """A table of measurements, as stored in its file."""

    format: Literal[1]
    """Version of the file format."""

    entries: tuple[Entry, ...]
    """The measurements."""

    def engines(self, device: str) -> list[str]:
        """List the engines that were measured on a device."""
        return sorted({entry.engine for entry in self.entries if entry.device.casefold() == device.casefold()})

    def find(self, device: str, engine: str, method: Method, shape: tuple[int, int, int]) -> tuple[Entry, ...]:
        """Find the closest measurements of a method.

        Entries with equal parameters are closer than entries with an equal shape. Among other shapes, the entry whose
        query heads have the most similar total width is closest: with fewer or narrower heads, the device needs less
        time for a layer, but the host needs as long to launch it, so sparse prefill pays off only for longer prompts.
        """
        entries = [
            entry
            for entry in self.entries
            if (entry.device.casefold(), entry.engine) == (device.casefold(), engine)
            and name_of(entry.parameters) == name_of(method)
        ]

        def distance(entry: Entry) -> tuple[bool, bool, float]:
            narrower, wider = sorted(num_heads * head_dim for num_heads, _, head_dim in (entry.shape, shape))
            return entry.parameters != method, entry.shape != shape, wider / narrower

        nearest = min(map(distance, entries), default=None)
        return tuple(entry for entry in entries if distance(entry) == nearest)


@dataclass(frozen=True)
class Thresholds:
    """Lengths from which rows run sparse."""

    min_tokens: int | None
    min_query_tokens: int
    notes: tuple[str, ...] = ()
    measured: int | None = field(default=None, compare=False)
    min_pairs: int = field(default=0, compare=False)  # 0 unless both lengths are measured
    pairs_per_token: int = field(default=0, compare=False)

    def fitted(self, chunk: int, busy: int) -> "Thresholds":
        """Lower ``min_query_tokens`` if steps are too small for it and smaller steps were measured to be faster.

        Measurements double the length each time, so the true crossover may be as low as half the measured number. This
        accepts a number that is up to an eighth lower.
        """
        if busy >= self.min_query_tokens or self.measured is None:
            return self
        fewest = max(min(self.measured, busy), self.measured - self.measured // 8)
        if not fewest < self.min_query_tokens or fewest > chunk:
            return self
        note = (
            f"min_query_tokens is {fewest} here, not {self.min_query_tokens}: a step has at most {chunk} new tokens of "
            f"a request, and {busy} next to the maximum number of decodes; sparse prefill was measured to be faster "
            f"from {self.measured} tokens"
        )
        return replace(self, min_query_tokens=fewest, notes=(*self.notes, note))

    def dense_reason(self, query_len: int, seq_len: int) -> Fallback | None:
        """Return why a row of these lengths runs dense."""
        if self.min_tokens is None:
            return Fallback.NEVER_FASTER
        if seq_len <= self.min_tokens:
            return Fallback.TOO_SHORT
        sparse_len = min(query_len, seq_len - self.min_tokens)
        if sparse_len < self.min_query_tokens:
            return Fallback.SHORT_QUERY
        return Fallback.FEW_PAIRS if self.pairs(sparse_len, seq_len) < self.min_pairs else None

    def pairs(self, query_len: int, seq_len: int) -> int:
        """Return the pairs of a row's last tokens that count towards ``min_pairs``."""
        return Reach().pairs(seq_len - query_len, seq_len) + self.pairs_per_token * query_len

    @property
    def severity(self) -> tuple[float, int, int]:
        """Sort key: larger if fewer rows run sparse."""
        return math.inf if self.min_tokens is None else self.min_tokens, self.min_query_tokens, self.min_pairs

    def __str__(self) -> str:
        """Format the thresholds for the log."""
        if self.min_tokens is None:
            return "no rows"
        pairs = f", with at least {self.min_pairs:,} pairs of these and earlier keys" if self.min_pairs else ""
        counts = f", each of which counts as {self.pairs_per_token:,} more" if self.pairs_per_token else ""
        return (
            f"rows of more than {self.min_tokens} tokens, at least {self.min_query_tokens} of them new{pairs}{counts}"
        )


class Place(NamedTuple):
    """The device, engine and layer shape for which thresholds are looked up."""

    device: str
    engine: str
    shape: tuple[int, int, int]


def resolve_thresholds(
    min_tokens: TokenCount, min_query_tokens: TokenCount, methods: Collection[Method], table: Crossover, place: Place
) -> Thresholds:
    """Replace ``auto`` by the largest measured numbers of any method.

    Dense heads need no measurement if other methods are present, because no length makes them faster.
    """
    selecting = [method for method in methods if not isinstance(method, Dense)]
    measurements = {
        method: table.find(place.device, place.engine, method, place.shape) for method in selecting or methods
    }
    entries = [entry for method_entries in measurements.values() for entry in method_entries]
    unmeasured = sorted({name_of(method) for method, method_entries in measurements.items() if not method_entries})
    never_faster = sorted({entry.method for entry in entries if not entry.pays})
    where = f"on {place.device} with engine {place.engine}"
    notes = []
    if unmeasured:
        stand_ins = {"min_tokens": (min_tokens, UNMEASURED_MIN_TOKENS)}
        stand_ins["min_query_tokens"] = (min_query_tokens, UNMEASURED_MIN_QUERY_TOKENS)
        automatic = [f"{name} {number}" for name, (setting, number) in stand_ins.items() if setting == AUTO]
        notes.append(
            f"{', '.join(unmeasured)} not measured {where}: auto uses the conservative defaults "
            f"{' and '.join(automatic)}; run `{COMMAND}` to measure this device"
        )
    query_lengths = [entry.min_query_tokens for entry in entries if entry.min_query_tokens is not None]
    measured = None if unmeasured or not query_lengths else max(query_lengths)
    if measured is None:
        query_lengths.append(UNMEASURED_MIN_QUERY_TOKENS)
    fewest = max(query_lengths) if min_query_tokens == "auto" else min_query_tokens
    if min_tokens != "auto":
        return Thresholds(min_tokens, fewest, tuple(notes) if min_query_tokens == "auto" else (), measured)
    if never_faster:
        note = (
            f"{', '.join(never_faster)} never faster than dense attention {where}, as measured: all rows run dense; "
            "choose another method or other parameters, or set min_tokens to run sparse anyway"
        )
        return Thresholds(None, fewest, (note,))
    lengths = [entry.min_tokens for entry in entries if entry.min_tokens is not None]
    if unmeasured:
        lengths.append(UNMEASURED_MIN_TOKENS)
    is_measured = measured is not None and min_query_tokens == "auto"
    strictest = max(entries, key=lambda entry: entry.least_pairs) if is_measured else None
    pairs = (0, 0) if strictest is None else (strictest.least_pairs, strictest.pairs_per_token)
    return Thresholds(max(lengths), fewest, tuple(notes), measured, *pairs)


def timed_tokens(min_tokens: int, chunk_tokens: int) -> int:
    """Return the number of new tokens after ``min_tokens`` with which ``bench crossover`` measures this length."""
    return min(min_tokens, chunk_tokens // 2)


def crossover_file(path: str | None = None, option: str = "crossover") -> Path:
    """Find a table's file."""
    file = existing_path(path or str(resources.files("vllm_sparse_backend") / SHIPPED))
    if file is None:
        raise ConfigurationError(f"{option}: given {path!r}: no such file; expected a file that `{COMMAND}` wrote")
    return file


def parse_crossover(text: str, source: str) -> Crossover:
    """Parse a table."""
    return Crossover.read(text, f"{source}: ")


def load_crossover(path: str | None = None) -> Crossover:
    """Read a table from its file."""
    file = crossover_file(path)
    return parse_crossover(read_text(file), str(file))
