# SPDX-License-Identifier: Apache-2.0
"""What a request may ask for: exact attention, the server's own level, another level of its profile, or a share p.

It stands in the request's ``vllm_xargs`` under ``sparse_prefill``. The front process checks it and leaves a mark in the
request's sampling parameters, which the engine's core (for the hashes of cached blocks) and every worker read.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

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


class Granted(str):
    """A level that a server has found its request may have; no request can send such a value."""


def split(level: str) -> tuple[str, float | None]:
    """The name that plans and counters know a level by, and the share: of ``p=0.97``, p and 0.97."""
    name, _, share = level.partition("=")
    return name, float(share) if share else None


def refuse_slips(where: str, keys: Iterable[object]) -> None:
    """Raise ValueError where one of the keys looks like ours, and is not: it must not pass for none."""
    for key in keys:
        if key not in (FIELD, REPORT) and looks_like(key, FIELD):
            raise ValueError(f"{where}: {unexpected(key, f'the key {FIELD!r} in vllm_xargs')}")


def asks_report(given: Mapping[str, Any]) -> bool:
    """Whether the request with these ``vllm_xargs`` wants to know how it was prefilled. Raises ValueError."""
    asked = given.get(REPORT, False)
    if asked not in (True, False):
        raise ValueError(f"vllm_xargs {REPORT}: {unexpected(asked, 'true or false')}")
    return bool(asked)


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
        """``extra_args`` with this mark in place of what was asked for; without any where there is nothing to say."""
        others = {key: value for key, value in (extra_args or {}).items() if key not in (FIELD, MARK)}
        if self.level == DEFAULT and self.salt is None:
            return others or None
        return {**others, MARK: [self.level, self.salt, self.exact_tokens]}


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

    def mark(self, extra_args: Mapping[str, Any] | None) -> Mark:
        """What a request with these ``extra_args`` gets. Raises ValueError that lists what is allowed."""
        given = {key: value for key, value in (extra_args or {}).items() if key != MARK}
        refuse_slips("vllm_xargs", given)
        asks_report(given)
        level = str(self.grant(given))  # plain, as it travels to other processes
        return Mark(level, self._salt(level), self.exact_tokens or 0)

    def grant(self, asked: Mapping[str, Any], model: str | None = None) -> Granted:
        """The level of a request that asks for this one, if for any, of the served model of that name.

        Raises ValueError where it may not have it.
        """
        unasked = self.models.get(model or "", self.default)
        if FIELD not in asked:
            return Granted(unasked)
        given = asked[FIELD]
        if isinstance(given, Granted):
            return given
        level = self.level(given)
        if level != unasked and (why := self._why_not(level)) is not None:
            raise ValueError(f"vllm_xargs {FIELD}: given {given!r}, but {why}; leave it out")
        return Granted(level)

    def level(self, given: object) -> str:
        """The level that a request's value names: ``exact``, ``default``, another of the profile's, or a share's."""
        if isinstance(given, (bool, int, float)) and given in (0, 1):
            return DEFAULT if given else EXACT
        if isinstance(given, str) and given in (ON, *self.levels):
            return DEFAULT if given in (ON, self.own) else given
        if isinstance(given, float) and 0 < given < 1:
            if not self.has_shares:
                why = "no head of this server's plan chooses by mass (top_p), so that there is no p to set"
                raise ValueError(f"vllm_xargs {FIELD}: given {given!r}, but {why}; expected one of {self}")
            return f"{SHARE}={given!r}"
        raise ValueError(f"vllm_xargs {FIELD}: {unexpected(given, f'one of {self}')}")

    def _why_not(self, level: str) -> str | None:
        if self.refusal is None and self.allowed is not None and split(level)[0] not in self.allowed:
            return f"this server's settings (requests.allow) let requests have {self._allowed()}"
        return self.refusal

    def _salt(self, level: str) -> str | None:
        if self.exact_tokens is None:
            return None
        name, share = split(level)
        return self.salts.get(level) if share is None else f"{self.salts.get(name, name)}={share!r}"

    def policy(self) -> str:
        """For the log: what requests get that ask for none, and which they may ask for."""
        models = "".join(f", as model {model} {_shown(level)}" for model, level in self.models.items())
        return f"{_shown(self.default)} unasked{models}; {self._allowed()} on request"

    def _allowed(self) -> str:
        return "all" if self.allowed is None else ", ".join(sorted(map(_shown, self.allowed))) or "nothing else"

    def __str__(self) -> str:
        own = f", {self.own}" if self.own is not None else ""
        names = [f"'{level}'" for level in self.levels]
        share = ", a number between 0 and 1 (p of its top_p heads)" if self.has_shares else ""
        return f"0 (exact), 1 (this server's own level{own}), {', '.join(names)}{share}"


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
