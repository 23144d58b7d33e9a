# SPDX-License-Identifier: Apache-2.0
"""What a request may ask for: exact attention, the server's own level, or another level of its profile.

It stands in the request's ``vllm_xargs`` under ``sparse_prefill``. The front process checks it and leaves a mark in the
request's sampling parameters, which the engine's core (for the hashes of cached blocks) and every worker read.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_sparse_backend.identity import PACKAGE, package_version
from vllm_sparse_backend.settings.errors import unexpected
from vllm_sparse_backend.settings.plan import DEFAULT, Plan
from vllm_sparse_backend.settings.profile import EXACT

FIELD = "sparse_prefill"
MARK = "sparse_prefill_mark"
"""The front process writes it, over whatever a request may hold there."""


@dataclass(frozen=True)
class Mark:
    """What the front process found a request to ask for, as plain values: it travels with the sampling parameters."""

    level: str
    salt: str | None = None
    """Goes into the hash of the block that holds position ``exact_tokens``, and so into those of all later ones."""
    exact_tokens: int = 0

    def key(self, start_token_idx: int, end_token_idx: int) -> tuple[str, str] | None:
        """What goes into the hash of this block of the request; None unless it is the one that tells levels apart."""
        if self.salt is None or not start_token_idx <= self.exact_tokens < end_token_idx:
            return None
        return FIELD, f"{FIELD}={self.salt}"

    @staticmethod
    def of(extra_args: Mapping[str, Any] | None) -> "Mark | None":
        """The mark in a request's ``extra_args``; None where it has the server's own level and no salt."""
        data = extra_args.get(MARK) if extra_args else None
        return None if data is None else Mark(*data)

    def write(self, extra_args: Mapping[str, Any] | None) -> dict[str, Any] | None:
        """``extra_args`` with this mark, or without any where there is nothing to say."""
        others = {key: value for key, value in (extra_args or {}).items() if key != MARK}
        if self.level == DEFAULT and self.salt is None:
            return others or None
        return {**others, MARK: [self.level, self.salt, self.exact_tokens]}


@dataclass(frozen=True)
class Choices:
    """What requests of one server may ask for, and which of them may read each other's cached keys and values."""

    levels: tuple[str, ...]
    """``exact`` first, then those of the profile."""
    own: str | None = None
    """The level that the server has unless told, where its profile says."""
    exact_tokens: int | None = None
    """The first positions of every row, which are dense at all levels; None if nothing ever goes sparse."""
    salts: Mapping[str, str] = field(default_factory=dict)
    """By level; those without one share their blocks."""
    refusal: str | None = None
    """Why requests can have nothing but the server's own level here."""

    def mark(self, extra_args: Mapping[str, Any] | None) -> Mark:
        """What a request with these ``extra_args`` gets. Raises ValueError that lists what is allowed."""
        level = self.level(extra_args[FIELD]) if extra_args and FIELD in extra_args else DEFAULT
        salt = None if self.exact_tokens is None else self.salts.get(level)
        return Mark(level, salt, self.exact_tokens or 0)

    def level(self, given: object) -> str:
        """The level that a request's value names: ``exact``, ``default`` or another of the profile's."""
        if isinstance(given, (bool, int, float)) and given in (0, 1):
            level = DEFAULT if given else EXACT
        elif isinstance(given, str) and given in self.levels:
            level = DEFAULT if given == self.own else given
        else:
            raise ValueError(f"vllm_xargs {FIELD}: {unexpected(given, f'one of {self}')}")
        if level != DEFAULT and self.refusal is not None:
            raise ValueError(f"vllm_xargs {FIELD}: given {given!r}, but {self.refusal}; leave it out, or give 1")
        return level

    def __str__(self) -> str:
        own = f", {self.own}" if self.own is not None else ""
        names = [f"'{level}'" for level in self.levels]
        return f"0 (exact), 1 (this server's own level{own}), {', '.join(names)}"


def fingerprint(plan: Plan) -> str:
    """Tells apart what writes keys and values past the exact positions: every layer's and head's method, and when.

    The package's version, too, as another may keep other keys at the same settings.
    """
    parts = (plan.layers, plan.min_tokens, plan.min_query_tokens, plan.shape, package_version(PACKAGE))
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
