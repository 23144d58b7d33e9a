# SPDX-License-Identifier: Apache-2.0
"""Levels that a request may choose: exact, the server's own level, another level of its profile, or a share p.

The choice is in the request's ``vllm_xargs`` under ``sparse_prefill``. The front process checks it and puts a mark into
the request's sampling parameters. The engine's core (for the hashes of cached blocks) and every worker read the mark.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, NamedTuple

from vllm_sparse_backend.config.errors import ConfigurationError, format_value, looks_like, not_one_of, unexpected
from vllm_sparse_backend.config.plan import DEFAULT, Plan
from vllm_sparse_backend.config.profile import EXACT, ON, SHARE
from vllm_sparse_backend.config.settings import KEY, OPTION, RequestsConfig, StreamingHeadsConfig
from vllm_sparse_backend.identity import PACKAGE, package_version
from vllm_sparse_kernels.layer import LayerPlan
from vllm_sparse_kernels.methods import name_of
from vllm_sparse_kernels.methods.base import Method

FIELD = "sparse_prefill"
MARK = "sparse_prefill_mark"
"""Key of the mark. A value that a client sends there is overwritten."""


class RequestLevel(NamedTuple):
    """The level of one request, checked by the front process. No client can send a value of this type."""

    name: str = DEFAULT
    """Name of the level in plans and counters; ``p`` for all requests that set p."""
    kept_mass: float | None = None
    """p of the request's ``top_p`` heads, between 0 and 1; None for the plan's p."""

    def __str__(self) -> str:
        """Format the level for logs: its name, or ``p`` with its value."""
        return self.name if self.kept_mass is None else f"{self.name}={self.kept_mass!r}"


SERVER_LEVEL = RequestLevel()


def refuse_typos(where: str, keys: Iterable[object]) -> None:
    """Refuse keys that look like typos of this project's keys, so that they are not silently ignored."""
    for key in keys:
        if key != FIELD and looks_like(key, FIELD):
            raise ValueError(f"{where}: {unexpected(key, f'the key {FIELD!r} in vllm_xargs')}")


@dataclass(frozen=True)
class Salt:
    """Part of the hashes of a request's cached blocks that separates levels from each other."""

    text: str
    exact_tokens: int

    def key(self, start_token_idx: int, end_token_idx: int) -> tuple[str, str] | None:
        """Return the extra key of a block's hash."""
        if not start_token_idx <= self.exact_tokens < end_token_idx:
            return None
        return FIELD, f"{FIELD}={self.text}"


@dataclass(frozen=True)
class Mark:
    """The level of a request, which the front process passes to the core and the workers.

    It is created once: where vLLM turns the request into an engine request or, if the front process is not in Python,
    where the engine core accepts the request.
    """

    level: str = DEFAULT
    kept_mass: float | None = None
    salt: Salt | None = None

    @property
    def request_level(self) -> RequestLevel:
        """The level without the salt."""
        return RequestLevel(self.level, self.kept_mass)

    @staticmethod
    def read(extra_args: object) -> "Mark | None":
        """Parse the mark in a request's ``extra_args``.

        This never raises, because it runs in the scheduler's loop, where an exception would end the engine.
        """
        if not isinstance(extra_args, dict) or MARK not in extra_args:
            return None
        data = extra_args[MARK]
        if not isinstance(data, (list, tuple)) or len(data) != 4:
            return None
        level, kept_mass, text, exact_tokens = data
        if type(level) is not bytes or not level:
            return None
        level = level.decode(errors="replace")
        # Only requests of the level ``p`` have a p.
        if (level == SHARE) != (kept_mass is not None):
            return None
        if kept_mass is not None and not (type(kept_mass) is float and 0 < kept_mass < 1):
            return None
        if text is None:
            return Mark(level, kept_mass)
        if type(text) is not str or type(exact_tokens) is not int or exact_tokens < 0:
            return None
        return Mark(level, kept_mass, Salt(text, exact_tokens))

    def write(self, extra_args: Mapping[str, Any] | None) -> dict[str, Any]:
        """Put the mark into ``extra_args``, instead of the request's choice and of any mark that a client sent.

        The mark consists of plain values, which all of vLLM's serialisers support. The level's name is bytes: clients
        send JSON, which has no bytes, so no client can send a mark through any front process. A request of the
        server's level with vLLM's own hashes needs no mark.
        """
        others = {key: value for key, value in (extra_args or {}).items() if key not in (FIELD, MARK)}
        text, exact_tokens = (None, 0) if self.salt is None else (self.salt.text, self.salt.exact_tokens)
        return {**others, MARK: [self.level.encode(), self.kept_mass, text, exact_tokens]}


@dataclass(frozen=True)
class Choices:
    """Levels that requests of a server may choose, and which requests may share cached keys and values."""

    levels: tuple[str, ...]
    server_level: str | None = None
    exact_tokens: int | None = None
    salts: Mapping[str, str] = field(default_factory=dict)
    refusal: str | None = None
    has_shares: bool = False
    default: str = DEFAULT
    models: Mapping[str, str] = field(default_factory=dict)
    allowed: frozenset[str] | None = None

    def under(self, policy: RequestsConfig) -> "Choices":
        """Restrict the choices by an operator's policy."""
        default = DEFAULT if policy.default is None else self._named("default", policy.default)
        models = {model: self._named(f"models.{model}", name) for model, name in policy.models.items()}
        allowed = None
        if policy.allow is not None:
            allowed = frozenset(self._named("allow", name, SHARE) for name in policy.allow)
        return replace(self, default=default, models=models, allowed=allowed)

    def _named(self, where: str, name: str, *more: str) -> str:
        names = (ON, *more, *self.levels)
        if name not in names:
            raise ConfigurationError(f"{OPTION} {KEY}.requests.{where}: {not_one_of(name, names)}")
        return DEFAULT if name in (ON, self.server_level) else name

    def level_of(self, vllm_xargs: Mapping[str, Any] | None) -> RequestLevel:
        """Check all keys of a request, and return its level."""
        values = {key: value for key, value in (vllm_xargs or {}).items() if key != MARK}
        refuse_typos("vllm_xargs", values)
        return self.permit(values[FIELD]) if FIELD in values else self.unasked()

    def unasked(self, model: str | None = None) -> RequestLevel:
        """Return the level of requests that do not choose a level."""
        return RequestLevel(self.models.get(model or "", self.default))

    def permit(self, value: object, model: str | None = None) -> RequestLevel:
        """Return the level that a request chooses."""
        if isinstance(value, RequestLevel):  # checked before
            return value
        default_level = self.unasked(model).name
        level = self.named_by(value, default_level)
        if self._may_have(level.name, default_level):
            return level
        why = self.refusal
        if why is None:
            why = f"this server's settings (requests.allow) permit only {self.offers(default_level)}"
        raise ValueError(f"vllm_xargs {FIELD}: given {format_value(value)}, but {why}; remove it")

    def named_by(self, value: object, default_level: str = DEFAULT) -> RequestLevel:
        """Return the level that a value names, whether the request may have it or not."""
        if isinstance(value, (bool, int, float)) and value in (0, 1):
            return RequestLevel(DEFAULT if value else EXACT)
        if isinstance(value, str) and value in (ON, *self.levels):
            return RequestLevel(DEFAULT if value in (ON, self.server_level) else value)
        if isinstance(value, float) and 0 < value < 1:
            if self.has_shares:
                return RequestLevel(SHARE, value)
            why = "no head of this server's plan selects by attention mass (top_p), so there is no p to set"
            expected = f"expected one of {self.offers(default_level)}"
            raise ValueError(f"vllm_xargs {FIELD}: given {format_value(value)}, but {why}; {expected}")
        raise ValueError(f"vllm_xargs {FIELD}: {unexpected(value, f'one of {self.offers(default_level)}')}")

    def mark(self, level: RequestLevel) -> Mark:
        """Return the mark of requests of a level."""
        text = self.salts.get(level.name)
        if level.kept_mass is not None:
            text = f"{text or level.name}={level.kept_mass!r}"
        salt = None if text is None or self.exact_tokens is None else Salt(text, self.exact_tokens)
        return Mark(level.name, level.kept_mass, salt)

    def _may_have(self, level: str, default_level: str) -> bool:
        if level == default_level:
            return True
        return self.refusal is None and (self.allowed is None or level in self.allowed)

    def policy(self) -> str:
        """Describe the policy for the log."""
        models = "".join(f", for model {model} {_shown(level)}" for model, level in self.models.items())
        allowed = "all levels" if self.allowed is None else ", ".join(sorted(map(_shown, self.allowed))) or "none"
        return f"default {_shown(self.default)}{models}; on request {allowed}"

    def offers(self, default_level: str) -> str:
        """List the values that a request may give."""
        values = []
        if self._may_have(EXACT, default_level):
            values.append("0 (exact)")
        if self._may_have(DEFAULT, default_level):
            values.append(f"1 (this server's own level{'' if self.server_level is None else f', {self.server_level}'})")
        for name in self.levels:
            if self._may_have(DEFAULT if name == self.server_level else name, default_level):
                values.append(f"'{name}'")
        if self.has_shares and self._may_have(SHARE, default_level):
            values.append("a number between 0 and 1 (p of its top_p heads)")
        return ", ".join(values)

    def __str__(self) -> str:
        """List the values that requests with the default level may give."""
        return self.offers(self.default)


def _shown(level: str) -> str:
    return ON if level == DEFAULT else level


def fingerprint(
    plan: Plan, numbers: Mapping[str, object] | None = None, streaming_heads: StreamingHeadsConfig | None = None
) -> str:
    """Hash the settings that decide which keys and values are written past the exact positions.

    These settings are the method of each layer and head, the lengths from which rows run sparse, and the version of the
    package, because another version may keep other keys with the same settings.
    """
    data = {
        "layers": [None if groups is None else _heads_of(groups) for groups in plan.layers],
        "min_tokens": plan.min_tokens,
        "min_query_tokens": plan.min_query_tokens,
        "numbers": numbers,
        "streaming_heads": None if streaming_heads is None else streaming_heads.model_dump(),
        "shape": asdict(plan.shape),
        "version": package_version(PACKAGE),
    }
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _heads_of(plan: LayerPlan) -> list[dict[str, Any]]:
    """Return each head's method by name and fields."""
    return [_canonical(method) for method in plan.methods]


def _canonical(method: Method) -> dict[str, Any]:
    values = {item.name: getattr(method, item.name) for item in fields(method) if item.init}
    return {"method": name_of(method), "fields": values}
