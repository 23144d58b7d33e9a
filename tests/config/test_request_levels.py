# SPDX-License-Identifier: Apache-2.0
"""Levels that a request may choose, and the mark that travels with the request."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.folders import profile_file
from vllm_sparse_backend.config import request_levels
from vllm_sparse_backend.config.errors import ConfigurationError
from vllm_sparse_backend.config.method_parameters import make_method
from vllm_sparse_backend.config.model_shape import ModelShape
from vllm_sparse_backend.config.plan import DEFAULT, Plan
from vllm_sparse_backend.config.request_levels import (
    FIELD,
    MARK,
    SERVER_LEVEL,
    Choices,
    Mark,
    RequestLevel,
    Salt,
    fingerprint,
)
from vllm_sparse_backend.config.settings import RequestsConfig, SparsePrefillConfig

SHAPE = ModelShape(architecture="LlamaForCausalLM", num_layers=4, num_heads=4, num_kv_heads=2, head_dim=32)
CHOICES = Choices(("exact", "high", "fast"), "high", 256, {"exact": "exact", "fast": "fast"})
BY_MASS = replace(CHOICES, has_shares=True)
SALTED = Mark("exact", None, Salt("salt", 256))


def marked(choices: Choices, extra_args: Mapping[str, Any] | None) -> Mark:
    """Return the mark of a request with these ``extra_args``."""
    return choices.mark(choices.level_of(extra_args))


@pytest.fixture
def config(tmp_path: Path) -> SparsePrefillConfig:
    levels = {"fast": {"default": {"method": "a_shape"}, "dense_layers": [0, 3]}}
    sale = {"method": "sale", "tau": 0.01}
    path = profile_file(tmp_path, min_tokens=300, level="high", default=sale, dense_layers=[0, 1], levels=levels)
    return SparsePrefillConfig(profile=path)


@pytest.mark.parametrize(
    ("value", "level"),
    [
        (0, "exact"), (1, DEFAULT), (False, "exact"), (True, DEFAULT), (0.0, "exact"), (1.0, DEFAULT),
        ("exact", "exact"), ("on", DEFAULT), ("high", DEFAULT), ("fast", "fast"),
    ],
)  # fmt: skip
def test_values_and_the_levels_that_they_name(value: object, level: str) -> None:
    """The name of the server's default level gives the same cache as the default itself."""
    salt = {"exact": Salt("exact", 256), "fast": Salt("fast", 256)}.get(level)
    assert marked(CHOICES, {"sparse_prefill": value, "other": 3}) == Mark(level, None, salt)


@pytest.mark.parametrize("value", [2, -1, 1.5, "0", "Exact", "", "default", None, [0], {"level": 0}, float("nan")])
def test_anything_else_is_an_error_that_lists_what_is_allowed(value: object) -> None:
    said = r"sparse_prefill: given .*, expected one of 0 \(exact\), 1 .*, high\), 'exact', 'high', 'fast'"
    for choices, more in (CHOICES, "$"), (BY_MASS, r", a number between 0 and 1 \(p of its top_p heads\)$"):
        with pytest.raises(ValueError, match=said + more):
            choices.level_of({"sparse_prefill": value})


@pytest.mark.parametrize(
    "key",
    ["sparse-prefill", "sparse_prefil", "Sparse_Prefill", "sparsePrefill", "sparse_prefill_level", "spase_prefill"],
)
def test_a_key_that_looks_like_ours_is_no_key_to_ignore(key: str) -> None:
    with pytest.raises(ValueError, match=f"given '{key}', expected the key 'sparse_prefill'"):
        CHOICES.level_of({key: 0})
    others = {"prefill": 0, "sparse": 1, "session_id": "s", MARK: 0, "sparse_prefill" + 40 * "x": 0}
    assert CHOICES.level_of(others) == SERVER_LEVEL


class TestShares:
    """A number between 0 and 1 sets p for the heads that choose by mass."""

    def test_each_has_blocks_of_its_own(self) -> None:
        marks = [marked(BY_MASS, {"sparse_prefill": share}) for share in (0.5, 0.97, 0.975)]
        assert marks == [Mark("p", share, Salt(f"p={share}", 256)) for share in (0.5, 0.97, 0.975)]
        stored = replace(BY_MASS, salts={DEFAULT: "default:print", "p": "p:print"})
        assert marked(stored, {"sparse_prefill": 0.97}).salt == Salt("p:print=0.97", 256)

    def test_without_such_heads_it_is_refused_and_said_why(self) -> None:
        said = r"given 0\.97, but no head of this server's plan selects by attention mass \(top_p\)"
        with pytest.raises(ValueError, match=said):
            CHOICES.level_of({"sparse_prefill": 0.97})


class TestPolicy:
    def under(self, choices: Choices = BY_MASS, **policy: Any) -> Choices:
        return choices.under(RequestsConfig.read(policy, ""))

    @pytest.mark.parametrize("default", ["exact", "on", "high", "fast", True, 0])
    def test_requests_that_ask_for_none(self, default: Any) -> None:
        choices = self.under(default=default)
        assert choices.level_of(None).name == {"exact": "exact", 0: "exact", "fast": "fast"}.get(default, DEFAULT)
        for value, level in (1, DEFAULT), (0, "exact"), ("fast", "fast"), (0.5, "p=0.5"):
            assert str(choices.level_of({"sparse_prefill": value})) == level

    def test_by_the_name_that_a_model_is_served_by(self) -> None:
        choices = self.under(models={"a": "exact", "b": "on"}, default="fast")
        assert choices.policy() == "default fast, for model a exact, for model b on; on request all levels"
        levels = [choices.unasked(model).name for model in ("a", "b", "c", None)]
        assert levels == ["exact", DEFAULT, "fast", "fast"]
        assert choices.permit(1, "a") == SERVER_LEVEL

    def test_clients_are_kept_from_levels(self) -> None:
        choices = self.under(default="exact", allow=["on", "p"])
        for value, level in (0, "exact"), ("exact", "exact"), (1, DEFAULT), (0.97, "p=0.97"):
            assert str(choices.level_of({"sparse_prefill": value})) == level
        said = r"given 'fast', but .*\(requests.allow\) permit only 0 \(exact\), 1 .*, 'high', a number"
        with pytest.raises(ValueError, match=said):
            choices.level_of({"sparse_prefill": "fast"})
        only = self.under(allow=[])
        assert only.level_of({"sparse_prefill": "high"}) == SERVER_LEVEL
        for value in (0, "fast", 0.97):
            with pytest.raises(ValueError, match=r"requests\.allow"):
                only.level_of({"sparse_prefill": value})

    @pytest.mark.parametrize("allow", [None, [], ["on"], ["exact", "p"], ["fast"], ["p"]])
    @pytest.mark.parametrize("default", ["on", "exact", "fast"])
    @pytest.mark.parametrize("refusal", [None, "it has a store"])
    @pytest.mark.parametrize("known", [CHOICES, BY_MASS])
    @pytest.mark.parametrize("refused", ["zzz", 0.5, 0, "fast", "high"])
    def test_a_refusal_lists_nothing_that_is_refused_next(
        self, known: Choices, refusal: str | None, default: str, allow: Any, refused: Any
    ) -> None:
        policy = {"default": default} | ({} if allow is None else {"allow": allow})
        choices = self.under(replace(known, refusal=refusal), **policy)
        try:
            choices.permit(refused)
        except ValueError as error:
            said = str(error).partition("but" if refusal is None else "expected")[2]
            values = {"0 (exact)": 0, "1 (this": 1, "'exact'": "exact", "'high'": "high", "'fast'": "fast"}
            values["a number between"] = 0.25
            for text in [text for text in values if text in said]:
                choices.permit(values[text])

    @pytest.mark.parametrize(
        ("policy", "said"),
        [
            ({"default": "slow"}, "requests.default: given 'slow', expected one of exact, fast, high, on"),
            ({"default": "p"}, "requests.default: given 'p'"),
            ({"models": {"a": "fats"}}, r"requests.models.a: given 'fats', .*did you mean 'fast'"),
            ({"allow": ["on", "exactly"]}, "requests.allow: given 'exactly'"),
            ({"default": 0.5}, "default: given 0.5, expected a valid string"),
        ],
    )
    def test_what_no_level_is_called_is_an_error(self, policy: dict[str, Any], said: str) -> None:
        with pytest.raises(ConfigurationError, match=said):
            self.under(**policy)

    def test_a_server_that_can_do_nothing_but_its_own_says_why(self) -> None:
        for default, other in ("on", 0), ("exact", 1):
            choices = self.under(replace(CHOICES, refusal="it has a store"), default=default)
            assert choices.level_of({"sparse_prefill": default}) == choices.level_of(None)
            with pytest.raises(ValueError, match=f"given {other}, but it has a store; remove it"):
                choices.level_of({"sparse_prefill": other})


@pytest.mark.parametrize(
    "extra_args",
    [None, {}, {"other": 1}, {MARK: ["fast", None, None, 0]}, {"other": 1, MARK: "forged", "sparse_prefill": 0}],
)
def test_a_mark_goes_along_with_other_arguments(extra_args: Mapping[str, Any] | None) -> None:
    """The mark replaces the request's level and any mark that a client sent."""
    others = {key: value for key, value in (extra_args or {}).items() if key == "other"}
    salted = Mark(salt=Salt("own", 256))
    for mark in SALTED, salted, Mark("p", 0.97, Salt("p=0.97", 0)), Mark("fast"), Mark("größer"), Mark():
        written = mark.write(extra_args)
        assert Mark.read(written) == mark
        assert written.items() >= others.items()
        assert FIELD not in written


def test_a_mark_cannot_come_from_json() -> None:
    """Clients send JSON, and front processes without this plugin forward its content unchanged."""
    for mark in SALTED, Mark("fast"), Mark():
        (level, *others) = mark.write(None)[MARK]
        with pytest.raises(TypeError, match="bytes is not JSON serializable"):
            json.dumps([level, *others])
        assert Mark.read({MARK: [level.decode(), *others]}) is None


FORGED: list[object] = [
    5, None, "exact", [], {}, [b"exact"], [b"exact", None, None], [b"exact", None, None, 0, 1], [None, None, None, 0],
    [b"", None, None, 0], ["exact", None, None, 0], [[b"exact"], None, None, 0], [b"exact", 0.5, None, 0],
    [b"p", None, None, 0], [b"p", 0, None, 0], [b"p", 1.0, None, 0], [b"p", True, None, 0], [b"p", "0.5", None, 0],
    [b"p", float("nan"), None, 0], [b"exact", None, 7, 0], [b"exact", None, "salt", -1], [b"exact", None, "salt", 1.5],
    [b"exact", None, "salt", True], [b"exact", None, "salt", None], [b"exact", None, ["salt"], 0], {"level": b"exact"},
]  # fmt: skip


@pytest.mark.parametrize("forged", FORGED)
def test_what_is_no_mark_counts_as_none(forged: object) -> None:
    """This holds in the core and in workers, where an exception would end the engine."""
    assert Mark.read({MARK: forged}) is None


@pytest.mark.parametrize("extra_args", [None, {}, 5, [MARK], "sparse_prefill_mark"])
def test_extra_args_without_a_mark_have_none(extra_args: object) -> None:
    assert Mark.read(extra_args) is None


def test_where_nothing_goes_sparse_all_levels_share_their_blocks() -> None:
    choices = Choices(("exact",), exact_tokens=None, salts={"exact": "exact"})
    assert choices.mark(RequestLevel("exact")) == Mark("exact")


class TestPlans:
    def test_each_level_has_one(self, config: SparsePrefillConfig) -> None:
        plans = Plan.by_level(config, SHAPE)
        assert list(plans) == [DEFAULT, "fast"]
        assert plans[DEFAULT] == Plan.build(config, SHAPE)
        assert plans["fast"].methods == {make_method("a_shape", {})}
        assert [plan.dense_layers for plan in plans.values()] == [(0, 1), (0, 3)]
        assert "at level fast" in plans["fast"].source
        assert (plans[DEFAULT].level_names, plans[DEFAULT].level) == (("exact", "high", "fast"), "high")
        plain = Plan.by_level(SparsePrefillConfig(), SHAPE)
        assert list(plain) == [DEFAULT]
        assert (plain[DEFAULT].level_names, plain[DEFAULT].level) == (("exact",), None)

    def test_a_fingerprint_is_that_of_what_is_computed(
        self, config: SparsePrefillConfig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        plans = Plan.by_level(config, SHAPE)
        assert len({fingerprint(plan) for plan in plans.values()}) == 2
        again = SparsePrefillConfig(profile=config.profile, check_index=True)
        assert fingerprint(Plan.build(again, SHAPE)) == fingerprint(plans[DEFAULT])
        later = SparsePrefillConfig(profile=config.profile, min_tokens=512)
        before = fingerprint(plans[DEFAULT])
        assert fingerprint(Plan.build(later, SHAPE)) != before
        monkeypatch.setattr(request_levels, "package_version", lambda name: "another")
        assert fingerprint(plans[DEFAULT]) != before
