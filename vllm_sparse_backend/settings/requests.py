# SPDX-License-Identifier: Apache-2.0
"""What a request may ask for: exact attention, the server's own level, another level of its profile, or a share p.

It stands in the request's ``vllm_xargs`` under ``sparse_prefill``. The front process checks it and leaves a mark in the
request's sampling parameters, which the engine's core (for the hashes of cached blocks) and every worker read.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, NamedTuple

from vllm_sparse_backend.identity import PACKAGE, package_version
from vllm_sparse_backend.settings.config import KEY, OPTION, RequestsConfig
from vllm_sparse_backend.settings.errors import ConfigurationError, looks_like, not_one_of, unexpected
from vllm_sparse_backend.settings.plan import DEFAULT, Plan
from vllm_sparse_backend.settings.profile import EXACT, ON, SHARE
from vllm_sparse_kernels.layer import LayerPlan, methods_by_head
from vllm_sparse_kernels.methods import name_of
from vllm_sparse_kernels.methods.base import Method

FIELD = "sparse_prefill"
REPORT = "sparse_prefill_report"
"""Beside it: true asks how the request was prefilled."""
MARK = "sparse_prefill_mark"
"""The front process writes it, over whatever a request may hold there."""


class RequestLevel(NamedTuple):
    """The level of one request, as the front process has checked it. No client can send a value of this type."""

    name: str = DEFAULT
    """As plans and counters name it; ``p`` for all requests that give a p."""
    kept_mass: float | None = None
    """p of the request's ``top_p`` heads, between 0 and 1; None: that of the plan."""

    def __str__(self) -> str:
        return self.name if self.kept_mass is None else f"{self.name}={self.kept_mass!r}"


SERVER_LEVEL = RequestLevel()


def refuse_slips(where: str, keys: Iterable[object]) -> None:
    """Raise ValueError where one of the keys looks like ours, and is not: it must not pass for none."""
    for key in keys:
        if key not in (FIELD, REPORT) and looks_like(key, FIELD):
            raise ValueError(f"{where}: {unexpected(key, f'the key {FIELD!r} in vllm_xargs')}")


class Ticket(str):
    """Random text under which workers count for one HTTP request. No client can send a value of this type."""


def asks_report(xargs: Mapping[str, Any]) -> bool:
    """Return whether a request wants to know how it was prefilled.

    Args:
        xargs: the request's ``vllm_xargs``.

    Returns:
        Whether ``sparse_prefill_report`` is true, or the server's own ticket.

    Raises:
        ValueError: it is neither true nor false.
    """
    value = xargs.get(REPORT, False)
    if isinstance(value, Ticket):
        return True
    if value not in (True, False):
        raise ValueError(f"vllm_xargs {REPORT}: {unexpected(value, 'true or false')}")
    return bool(value)


@dataclass(frozen=True)
class Salt:
    """Tells blocks of different levels apart.

    ``text`` goes into the hash of the block that holds position ``exact_tokens``, and so into those of all later ones.
    """

    text: str
    exact_tokens: int

    def key(self, start_token_idx: int, end_token_idx: int) -> tuple[str, str] | None:
        """The extra key of the block [start_token_idx, end_token_idx); None for all blocks but one of a request."""
        if not start_token_idx <= self.exact_tokens < end_token_idx:
            return None
        return FIELD, f"{FIELD}={self.text}"


@dataclass(frozen=True)
class Mark:
    """What a request gets: made once, where vLLM turns it into an engine request; read by core and workers."""

    level: str = DEFAULT
    kept_mass: float | None = None
    salt: Salt | None = None
    """None where the request's blocks have vLLM's own hashes."""

    @property
    def request_level(self) -> RequestLevel:
        return RequestLevel(self.level, self.kept_mass)

    @staticmethod
    def read(extra_args: object) -> "Mark | None":
        """The mark in a request's ``extra_args``; None without one, and where it is not such as ``write`` writes.

        It runs in the scheduler's loop, where an exception would end the engine: it raises nothing.
        """
        if not isinstance(extra_args, dict) or MARK not in extra_args:
            return None
        data = extra_args[MARK]
        if not isinstance(data, (list, tuple)) or len(data) != 4:
            return None
        level, kept_mass, text, exact_tokens = data
        if type(level) is not str or not level:
            return None
        # p belongs to requests of the level ``p``, and to no others.
        if (level == SHARE) != (kept_mass is not None):
            return None
        if kept_mass is not None and not (type(kept_mass) is float and 0 < kept_mass < 1):
            return None
        if text is None:
            return Mark(level, kept_mass)
        if type(text) is not str or type(exact_tokens) is not int or exact_tokens < 0:
            return None
        return Mark(level, kept_mass, Salt(text, exact_tokens))

    def write(self, extra_args: Mapping[str, Any] | None) -> dict[str, Any] | None:
        """``extra_args`` with this mark in place of what was asked for, and of any mark that was sent.

        As plain values, which every serialiser of vLLM's knows. A request of the server's level with vLLM's own hashes
        needs none.
        """
        others = {key: value for key, value in (extra_args or {}).items() if key not in (FIELD, MARK)}
        if self.request_level == SERVER_LEVEL and self.salt is None:
            return others or None
        text, exact_tokens = (None, 0) if self.salt is None else (self.salt.text, self.salt.exact_tokens)
        return {**others, MARK: [self.level, self.kept_mass, text, exact_tokens]}


@dataclass(frozen=True)
class Choices:
    """What requests of one server may ask for, and which of them may read each other's cached keys and values."""

    levels: tuple[str, ...]
    """``exact`` first, then those of the profile."""
    own: str | None = None
    """The name of the server's own level, where its profile says."""
    exact_tokens: int | None = None
    """The first positions of every row, which are dense at all levels; None if nothing ever goes sparse."""
    salts: Mapping[str, str] = field(default_factory=dict)
    """By level; one without has the hashes of vLLM."""
    refusal: str | None = None
    """Why requests can have nothing here but what they get unasked."""
    has_shares: bool = False
    """Whether some head chooses by mass, so that requests may set its p."""
    default: str = DEFAULT
    """The level of requests that ask for none."""
    models: Mapping[str, str] = field(default_factory=dict)
    """The same, by the served name that requests give as their model."""
    allowed: frozenset[str] | None = None
    """Levels that requests may have beside what they get unasked; None: all."""

    def under(self, policy: RequestsConfig) -> "Choices":
        """These choices, as an operator's policy has them. Raises ConfigurationError that names the field."""
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
        return DEFAULT if name in (ON, self.own) else name

    def level_of(self, vllm_xargs: Mapping[str, Any] | None) -> RequestLevel:
        """The level of a request with these ``vllm_xargs``, all keys of which are looked at.

        Raises:
            ValueError: the level may not be had here, or a key only looks like ours.
        """
        given = {key: value for key, value in (vllm_xargs or {}).items() if key != MARK}
        refuse_slips("vllm_xargs", given)
        asks_report(given)
        return self.permit(given[FIELD]) if FIELD in given else self.unasked()

    def unasked(self, model: str | None = None) -> RequestLevel:
        """The level of requests that ask for none, of the served model of that name."""
        return RequestLevel(self.models.get(model or "", self.default))

    def permit(self, given: object, model: str | None = None) -> RequestLevel:
        """The level that a request asks for by the value ``given``, of the served model of that name.

        Raises:
            ValueError: it is no level, or the request may not have it; the message lists those that it may have.
        """
        if isinstance(given, RequestLevel):  # checked before
            return given
        unasked = self.unasked(model).name
        level = self.named_by(given, unasked)
        if self._may_have(level.name, unasked):
            return level
        why = self.refusal
        if why is None:
            why = f"this server's settings (requests.allow) let the request have {self.offers(unasked)}"
        raise ValueError(f"vllm_xargs {FIELD}: given {given!r}, but {why}; leave it out")

    def named_by(self, given: object, unasked: str = DEFAULT) -> RequestLevel:
        """The level that a request's value names, whether the request may have it or not.

        Raises:
            ValueError: it names none; the message lists those that a request may have that gets ``unasked`` anyway.
        """
        if isinstance(given, (bool, int, float)) and given in (0, 1):
            return RequestLevel(DEFAULT if given else EXACT)
        if isinstance(given, str) and given in (ON, *self.levels):
            return RequestLevel(DEFAULT if given in (ON, self.own) else given)
        if isinstance(given, float) and 0 < given < 1:
            if self.has_shares:
                return RequestLevel(SHARE, given)
            why = "no head of this server's plan chooses by mass (top_p), so that there is no p to set"
            expected = f"expected one of {self.offers(unasked)}"
            raise ValueError(f"vllm_xargs {FIELD}: given {given!r}, but {why}; {expected}")
        raise ValueError(f"vllm_xargs {FIELD}: {unexpected(given, f'one of {self.offers(unasked)}')}")

    def mark(self, level: RequestLevel) -> Mark:
        """The mark of a request of that level."""
        text = self.salts.get(level.name)
        if level.kept_mass is not None:
            text = f"{text or level.name}={level.kept_mass!r}"
        salt = None if text is None or self.exact_tokens is None else Salt(text, self.exact_tokens)
        return Mark(level.name, level.kept_mass, salt)

    def _may_have(self, level: str, unasked: str) -> bool:
        if level == unasked:
            return True
        return self.refusal is None and (self.allowed is None or level in self.allowed)

    def policy(self) -> str:
        """For the log: what requests get that ask for none, and which they may ask for."""
        models = "".join(f", as model {model} {_shown(level)}" for model, level in self.models.items())
        allowed = "all" if self.allowed is None else ", ".join(sorted(map(_shown, self.allowed))) or "nothing else"
        return f"{_shown(self.default)} unasked{models}; {allowed} on request"

    def offers(self, unasked: str) -> str:
        """All values that a request may give which gets the level ``unasked`` anyway: none of them is refused."""
        values = []
        if self._may_have(EXACT, unasked):
            values.append("0 (exact)")
        if self._may_have(DEFAULT, unasked):
            values.append(f"1 (this server's own level{'' if self.own is None else f', {self.own}'})")
        for name in self.levels:
            if self._may_have(DEFAULT if name == self.own else name, unasked):
                values.append(f"'{name}'")
        if self.has_shares and self._may_have(SHARE, unasked):
            values.append("a number between 0 and 1 (p of its top_p heads)")
        return ", ".join(values)

    def __str__(self) -> str:
        return self.offers(self.default)


def _shown(level: str) -> str:
    return ON if level == DEFAULT else level


def fingerprint(plan: Plan, numbers: Mapping[str, object] | None = None) -> str:
    """Tell apart what writes keys and values past the exact positions: each layer's and head's method, and when.

    The package's version, too, as another may keep other keys at the same settings.

    Args:
        plan: Of the whole model at one level.
        numbers: What ``auto`` stands for on the server's device (``Plan.numbers``); None where nothing is looked up.

    Returns:
        16 hexadecimal digits, equal for equal settings in every process.
    """
    data = {
        "layers": [None if groups is None else _heads_of(groups) for groups in plan.layers],
        "min_tokens": plan.min_tokens,
        "min_query_tokens": plan.min_query_tokens,
        "numbers": numbers,
        "shape": asdict(plan.shape),
        "version": package_version(PACKAGE),
    }
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _heads_of(groups: LayerPlan) -> list[dict[str, Any]]:
    """The method of each head, in their order, by its name and all fields: a merged method shows those of no head."""
    return [_canonical(method) for method in methods_by_head(groups)]


def _canonical(method: Method) -> dict[str, Any]:
    values = {one.name: getattr(method, one.name) for one in fields(method) if one.init}
    return {"method": name_of(method), "fields": values}
