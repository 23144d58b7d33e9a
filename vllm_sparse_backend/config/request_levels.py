# SPDX-License-Identifier: Apache-2.0
"""Levels that a request may choose: exact, the server's own level, another level of its profile, or a share p.

The choice is in the request's ``vllm_xargs`` under ``sparse_prefill``, which vLLM passes on as ``extra_args``. The
front process checks it, writes it back in one canonical form, and sets the ``cache_salt`` that keeps the cached blocks
of different levels apart.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from vllm_sparse_backend.config.crossover_table import Lengths
from vllm_sparse_backend.config.errors import ConfigurationError, format_value, looks_like, not_one_of, unexpected
from vllm_sparse_backend.config.keys import SETTINGS
from vllm_sparse_backend.config.plan import Plan
from vllm_sparse_backend.config.profile import EXACT, ON, SHARE
from vllm_sparse_backend.config.settings import RequestsConfig
from vllm_sparse_backend.identity import PACKAGE, digest, package_version

FIELD = "sparse_prefill"
SALT_PREFIX = f"{FIELD}:"
"""Prefix of the cache salts that this package sets."""
DIGEST_CHARACTERS = 32
"""Length of the digest of a client's salt. LMCache refuses salts over 128 characters."""


class RequestLevel(NamedTuple):
    """The level of one request."""

    name: str = ON
    """Name of the level in plans and counters; ``p`` for all requests that set p."""
    kept_mass: float | None = None
    """p of the request's ``top_p`` heads, between 0 and 1; None for the plan's p."""

    def __str__(self) -> str:
        """Format the level for logs and salts: its name, or ``p`` with its value."""
        return self.name if self.kept_mass is None else f"{self.name}={self.kept_mass!r}"


SERVER_LEVEL = RequestLevel()


def with_level(extra_args: Mapping[str, Any] | None, level: RequestLevel) -> dict[str, Any]:
    """Return a request's ``extra_args`` with its checked level in canonical form.

    The form is bytes, which JSON cannot express, so no client can send it.
    """
    return {**(extra_args or {}), FIELD: str(level).encode()}


def level_in(extra_args: Mapping[str, Any] | None) -> RequestLevel | None:
    """Return the level in canonical form; None if there is none, as in vLLM's internal requests."""
    canonical = (extra_args or {}).get(FIELD)
    if type(canonical) is not bytes:
        return None
    name, _, kept_mass = canonical.decode().partition("=")
    return RequestLevel(name, float(kept_mass) if kept_mass else None)


@dataclass(frozen=True)
class LevelPolicy:
    """Levels that requests of a server may choose, and which of them share cached keys and values."""

    levels: tuple[str, ...]
    server_level: str | None = None
    fingerprints: Mapping[str, str] = field(default_factory=dict)
    """By level whose requests get a salt of ours: the fingerprint of its settings in that salt; empty without a store
    that other servers share."""
    refusal: str | None = None
    """Why all requests of this server must have its default level."""
    has_shares: bool = False
    default: str = ON
    allowed: frozenset[str] | None = None

    def under(self, policy: RequestsConfig) -> "LevelPolicy":
        """Restrict the levels by an operator's policy."""
        default = self._named("default", policy.default)
        allowed = None
        if policy.allow is not None:
            allowed = frozenset(self._named("allow", name, SHARE) for name in policy.allow)
        return replace(self, default=default, allowed=allowed)

    def _named(self, where: str, name: str, *more: str) -> str:
        names = (ON, *more, *self.levels)
        if name not in names:
            raise ConfigurationError(f"{SETTINGS}.requests.{where}: {not_one_of(name, names)}")
        return self._level_named(name)

    def _level_named(self, name: str) -> str:
        """Return the level with a name: the server's own level has two."""
        return ON if name == self.server_level else name

    def level_of(self, extra_args: Mapping[str, Any] | None) -> RequestLevel:
        """Return the level that a request chooses. Raises ValueError if it may not have it, or misspells the key."""
        for key in extra_args or ():
            if key != FIELD and looks_like(key, FIELD):
                raise ValueError(f"vllm_xargs: {unexpected(key, f'the key {FIELD!r}')}")
        if not extra_args or FIELD not in extra_args:
            return RequestLevel(self.default)
        value = extra_args[FIELD]
        level = self._parse(value)
        if self._may_have(level.name):
            return level
        why = self.refusal or f"this server's settings (requests.allow) permit only {self}"
        raise ValueError(f"vllm_xargs {FIELD}: given {format_value(value)}, but {why}; remove it")

    def _parse(self, value: object) -> RequestLevel:
        """Return the level that a value names, whether the request may have it or not."""
        if isinstance(value, (bool, int, float)) and value in (0, 1):
            return RequestLevel(ON if value else EXACT)
        if isinstance(value, str) and value in (ON, *self.levels):
            return RequestLevel(self._level_named(value))
        if isinstance(value, float) and 0 < value < 1:
            if self.has_shares:
                return RequestLevel(SHARE, value)
            why = "no head of this server's plan selects by attention mass (top_p), so there is no p to set"
            raise ValueError(f"vllm_xargs {FIELD}: given {format_value(value)}, but {why}; expected one of {self}")
        raise ValueError(f"vllm_xargs {FIELD}: {unexpected(value, f'one of {self}')}")

    def cache_salt(self, level: RequestLevel, client_salt: str | None) -> str | None:
        """Return the salt of a request's cached blocks. Raises ValueError if the client's salt looks like ours."""
        if client_salt and client_salt.startswith(SALT_PREFIX):
            raise ValueError(
                f"cache_salt: given {client_salt[:40]!r}, expected a salt that does not begin with {SALT_PREFIX!r}, "
                "which marks the salts of levels; choose another salt"
            )
        if level.name not in self.fingerprints:
            return client_salt
        of_client = digest(client_salt, DIGEST_CHARACTERS) if client_salt else ""
        return SALT_PREFIX + ":".join(filter(None, (str(level), self.fingerprints[level.name], of_client)))

    def _may_have(self, level: str) -> bool:
        return level == self.default or (self.refusal is None and (self.allowed is None or level in self.allowed))

    def __str__(self) -> str:
        """List the values that a request may give."""
        own_name = "" if self.server_level is None else f", {self.server_level}"
        values = [(EXACT, "0 (exact)"), (ON, f"1 (this server's own level{own_name})")]
        values += [(self._level_named(name), f"'{name}'") for name in self.levels]
        if self.has_shares:
            values.append((SHARE, "a number between 0 and 1 (p of its top_p heads)"))
        return ", ".join(value for level, value in values if self._may_have(level))


def fingerprint(plan: Plan, lengths: Mapping[str, Lengths], finds_streaming_heads: bool = False) -> str:
    """Hash the settings that decide which keys and values are written.

    These settings are the method of each layer and head, the lengths from which rows run sparse, and the version of the
    package, because another version may keep other keys with the same settings.
    """
    data = {
        "layers": [[repr(method) for method in layer.methods] if layer is not None else None for layer in plan.layers],
        "lengths": {engine: str(on_engine) for engine, on_engine in lengths.items()},
        "streaming_heads": finds_streaming_heads,
        "shape": plan.shape.model_dump(exclude={"names"}),  # servers may name the model differently
        "version": package_version(PACKAGE),
    }
    return digest(json.dumps(data, sort_keys=True, separators=(",", ":")))
