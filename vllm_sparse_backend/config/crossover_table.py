# SPDX-License-Identifier: Apache-2.0
"""Lengths from which sparse prefill is faster than dense, as measured per device, engine, method and size of layers.

A table of measurements ships with the package (``_crossover/measured.json``). ``sparse-prefill bench crossover`` writes
a table for another device; the setting ``crossover`` is its path. If no entry fits, conservative defaults apply, and
the log says so.
"""

import math
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, PlainValidator, StrictInt, StrictStr, model_validator

from vllm_sparse_backend.config.errors import ConfigurationError, Section, unexpected
from vllm_sparse_backend.config.fallback import Fallback
from vllm_sparse_backend.config.input_files import existing_path, read_text
from vllm_sparse_backend.config.method_parameters import make_method
from vllm_sparse_backend.config.ranges import MOST_COUNT
from vllm_sparse_kernels.methods import name_of
from vllm_sparse_kernels.methods.base import Method
from vllm_sparse_kernels.methods.dense.method import Dense

AUTO: Literal["auto"] = "auto"

COMMAND = "sparse-prefill bench crossover MODEL"
SHIPPED = Path(__file__).parents[1] / "_crossover/measured.json"


def _to_token_count(value: object) -> object:
    if value == AUTO:
        return value
    if type(value) is not int:
        raise ValueError(unexpected(value, f"an integer, or {AUTO!r}"))
    if not 0 <= value <= MOST_COUNT:
        raise ValueError(unexpected(value, f"at least 0, and at most {MOST_COUNT}"))
    return value


Count = Annotated[StrictInt, Field(ge=1)]
Tokens = Annotated[StrictInt, Field(ge=0, le=MOST_COUNT)]
TokenCount = Annotated[
    int | Literal["auto"], PlainValidator(_to_token_count, json_schema_input_type=Tokens | Literal["auto"])
]
"""A number of tokens in a configuration or profile, or ``auto`` for the measured crossover."""

Pairs = Annotated[StrictInt, Field(ge=0)]


@dataclass(frozen=True)
class Lengths:
    """Lengths from which rows run sparse: all of them must be reached."""

    min_tokens: int
    """Leading positions of every request that are dense."""
    min_query_tokens: int
    """New tokens of a row in a step, past ``min_tokens``."""
    min_pairs: int = 0
    """Pairs of these new tokens with the keys before them, plus ``pairs_per_token`` for each new token."""
    pairs_per_token: int = 0
    notes: tuple[str, ...] = field(default=(), compare=False)
    """Remarks on measurements, for the log."""

    @staticmethod
    def strictest(lengths: Collection["Lengths"]) -> "Lengths":
        """Return lengths with which only those rows run sparse that do with each of these."""
        return Lengths(
            max(item.min_tokens for item in lengths),
            max(item.min_query_tokens for item in lengths),
            max(item.min_pairs for item in lengths),
            min(item.pairs_per_token for item in lengths),
            tuple(dict.fromkeys(chain.from_iterable(item.notes for item in lengths))),
        )

    def dense_reason(self, query_len: int, seq_len: int) -> Fallback | None:
        """Return why a row of these lengths runs dense."""
        if self.min_tokens == NEVER.min_tokens:
            return Fallback.NEVER_FASTER
        if seq_len <= self.min_tokens:
            return Fallback.TOO_SHORT
        sparse_len = min(query_len, seq_len - self.min_tokens)
        if sparse_len < self.min_query_tokens:
            return Fallback.SHORT_QUERY
        return Fallback.FEW_PAIRS if self.pairs(sparse_len, seq_len) < self.min_pairs else None

    def pairs(self, query_len: int, seq_len: int) -> int:
        """Return the pairs of a row's last tokens that count towards ``min_pairs``."""
        context_len = seq_len - query_len
        return query_len * context_len + query_len * (query_len + 1) // 2 + self.pairs_per_token * query_len

    def __str__(self) -> str:
        """Format the lengths for the log."""
        if self.min_tokens == NEVER.min_tokens:
            return "no rows"
        text = f"rows of more than {self.min_tokens} tokens, at least {self.min_query_tokens} of them new"
        if self.min_pairs:
            text += f", with at least {self.min_pairs:,} pairs of new tokens and the keys before them"
        if self.pairs_per_token:
            text += f", where a new token counts as {self.pairs_per_token:,} pairs more"
        return text


UNMEASURED = Lengths(min_tokens=16384, min_query_tokens=1024)
"""Lengths without measurements. For shorter prompts, typical budgets leave out too few pairs: at 16,384 tokens,
A-shape's 5,120 keys leave out 0.47 of them, and the 6,096 nearest diagonals 0.39. Eight tiles of 32 heads (1,024 new
tokens) are 256 programs, about two for each SM of an H100, and selection reads all keys even for few queries."""

NEVER = Lengths(min_tokens=MOST_COUNT + 1, min_query_tokens=UNMEASURED.min_query_tokens)
"""Lengths of a method that was measured to be slower than dense attention at every length."""


class Entry(Section):
    """One measurement of the table: a method on a device with an engine, for a shape of attention layer.

    Both lengths are null if sparse prefill was slower at every measured length.
    """

    device: StrictStr
    """Name of the device, as torch reports it, such as ``NVIDIA H100 80GB HBM3``."""

    engine: StrictStr
    method: StrictStr

    params: dict[str, Any] = Field(default={})
    """Parameters of the method that differ from its defaults."""

    num_heads: Count
    num_kv_heads: Count

    head_dim: Count
    """Elements of a head's query or key."""

    layer_weights: Count
    """Weights of the linear layers that apply to each token, mean over the model's layers."""

    min_tokens: Tokens | None
    """Leading positions of a request that are dense; null if sparse prefill was never faster."""

    min_query_tokens: Tokens | None
    """Fewest new tokens of a step for which sparse prefill is faster; null if it was never faster."""

    min_pairs: Pairs
    """Fewest (query, key) pairs of a step's new tokens with which sparse prefill is faster."""

    pairs_per_token: Pairs
    """Pairs as which each new token counts towards ``min_pairs``: its linear layers keep the GPU busy while the host
    launches the kernels of selection."""

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
        """The measured method."""
        return make_method(self.method, self.params)

    @property
    def layer_size(self) -> "LayerSize":
        """The size of the measured layers."""
        return LayerSize(self.num_heads * self.head_dim, self.layer_weights)

    @property
    def lengths(self) -> Lengths:
        """The measured lengths."""
        if self.min_tokens is None or self.min_query_tokens is None:
            return NEVER
        return Lengths(self.min_tokens, self.min_query_tokens, self.min_pairs, self.pairs_per_token)


class LayerSize(NamedTuple):
    """What decides how long a layer keeps the device busy."""

    query_width: int
    """Query heads times head_dim: the time of attention for each pair of tokens."""
    weights: int | None
    """Weights of its linear layers for each token; None if the model's config does not tell."""

    def distance(self, other: "LayerSize") -> float:
        """Return by which factors two layers differ, as the sum of their logarithms."""
        factors = [self.query_width / other.query_width]
        if self.weights is not None and other.weights is not None:
            factors.append(self.weights / other.weights)
        return sum(abs(math.log(factor)) for factor in factors)


class Place(NamedTuple):
    """The device, engine and size of layers for which lengths are looked up."""

    device: str
    engine: str
    size: LayerSize


class CrossoverTable(Section):
    """A table of measurements, as stored in its file."""

    format: Literal[1]
    entries: tuple[Entry, ...]

    def engines(self, device: str) -> list[str]:
        """List the engines that were measured on a device."""
        return sorted({entry.engine for entry in self.entries if entry.device.casefold() == device.casefold()})

    def find(self, place: Place, method: Method) -> list[Lengths]:
        """Find the closest measurements of a method.

        Entries with equal parameters are closer than others. Among these, those of the most similar layers are closest:
        in smaller layers the device needs less time, but the host needs as long to launch selection, so sparse prefill
        pays off only for longer prompts.
        """
        by_distance: dict[tuple[bool, float], list[Lengths]] = defaultdict(list)
        for entry in self.entries:
            is_there = (entry.device.casefold(), entry.engine) == (place.device.casefold(), place.engine)
            if is_there and name_of(entry.parameters) == name_of(method):
                distance = entry.parameters != method, entry.layer_size.distance(place.size)
                by_distance[distance].append(entry.lengths)
        return by_distance[min(by_distance)] if by_distance else []


def resolve_lengths(
    min_tokens: TokenCount,
    min_query_tokens: TokenCount,
    methods: Collection[Method],
    table: CrossoverTable,
    place: Place,
) -> Lengths:
    """Replace ``auto`` by the strictest lengths that were measured for any of the methods.

    Dense heads need no measurement if other methods are present, because no length makes them faster.
    """
    selecting = [method for method in methods if not isinstance(method, Dense)]
    measurements = {method: table.find(place, method) for method in selecting or methods}
    unmeasured = sorted({name_of(method) for method, lengths in measurements.items() if not lengths})
    never_faster = sorted({name_of(method) for method, lengths in measurements.items() if NEVER in lengths})
    measured = Lengths.strictest([*chain.from_iterable(lengths or [UNMEASURED] for lengths in measurements.values())])
    settings = {"min_tokens": min_tokens, "min_query_tokens": min_query_tokens}
    fixed: dict[str, Any] = {name: setting for name, setting in settings.items() if setting != AUTO}
    automatic = [name for name in settings if name not in fixed]
    where, notes = f"on {place.device} with engine {place.engine}", []
    if unmeasured and automatic:
        numbers = " and ".join(f"{name} {getattr(UNMEASURED, name)}" for name in automatic)
        notes.append(
            f"{', '.join(unmeasured)} not measured {where}: auto uses the conservative defaults {numbers}; run "
            f"`{COMMAND}` to measure this device"
        )
    if never_faster and min_tokens == AUTO:
        notes.append(
            f"{', '.join(never_faster)} never faster than dense attention {where}, as measured: all rows run dense; "
            "choose another method or other parameters, or set min_tokens to run sparse anyway"
        )
    if fixed:  # the operator's numbers apply as they are
        fixed |= {"min_pairs": 0, "pairs_per_token": 0}
    return replace(measured, **fixed, notes=tuple(notes))


def crossover_file(path: str | None = None, option: str = "crossover") -> Path:
    """Find a table's file."""
    name = path or str(SHIPPED)
    file = existing_path(name)
    if file is None:
        raise ConfigurationError(f"{option}: given {name!r}: no such file; expected a file that `{COMMAND}` wrote")
    return file


def load_crossover(path: str | None = None) -> CrossoverTable:
    """Read a table from its file."""
    file = crossover_file(path)
    return CrossoverTable.read(read_text(file), f"{file}: ")
