# SPDX-License-Identifier: Apache-2.0
"""Levels that a request may choose, their canonical form, and their cache salts."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.folders import profile_file
from vllm_sparse_backend.config import request_levels
from vllm_sparse_backend.config.errors import ConfigurationError
from vllm_sparse_backend.config.method_parameters import make_method
from vllm_sparse_backend.config.model_shape import ModelShape
from vllm_sparse_backend.config.plan import Plan
from vllm_sparse_backend.config.profile import ON
from vllm_sparse_backend.config.request_levels import (
    FIELD,
    SERVER_LEVEL,
    LevelPolicy,
    RequestLevel,
    fingerprint,
    level_in,
    with_level,
)
from vllm_sparse_backend.config.settings import RequestsConfig, SparsePrefillConfig

SHAPE = ModelShape(architecture="LlamaForCausalLM", num_layers=4, num_heads=4, num_kv_heads=2, head_dim=32)
POLICY = LevelPolicy(("exact", "high", "fast"), "high", {"exact": "", "fast": "", "p": ""})
WITH_SHARES = replace(POLICY, has_shares=True)
LONGEST_NAME = "l" + 39 * "x"
ALL_LEVELS = [SERVER_LEVEL, RequestLevel("exact"), RequestLevel(LONGEST_NAME), RequestLevel("p", 0.1 + 0.2)]


def level(policy: LevelPolicy, value: object) -> RequestLevel:
    return policy.level_of({FIELD: value, "other": 3})


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (0, "exact"), (1, ON), (False, "exact"), (True, ON), (0.0, "exact"), (1.0, ON),
        ("exact", "exact"), ("on", ON), ("high", ON), ("fast", "fast"),
    ],
)  # fmt: skip
def test_a_value_names_a_level(value: object, name: str) -> None:
    assert level(POLICY, value) == RequestLevel(name)


HOSTILE = [
    2, -1, 1.5, -0.5, 1e308, 2**64, float("nan"), "0", "Exact", "", "default", "p", "x" * 100_000, "\0", None, [], [0],
    ["exact"], {}, {"level": 0}, b"exact", b"fast",
]  # fmt: skip


@pytest.mark.parametrize("value", HOSTILE, ids=lambda value: repr(value)[:20])
def test_any_other_value_is_refused_with_the_list_of_levels(value: object) -> None:
    """Bytes, the canonical form, are refused too: only Python code can send them."""
    said = r"sparse_prefill: given .{1,99}, expected one of 0 \(exact\), 1 .*, high\), 'exact', 'high', 'fast'"
    for policy, more in (POLICY, "$"), (WITH_SHARES, r", a number between 0 and 1 \(p of its top_p heads\)$"):
        with pytest.raises(ValueError, match=said + more):
            level(policy, value)


@pytest.mark.parametrize(
    "key",
    [
        *("sparse-prefill", "sparse_prefil", "Sparse_Prefill", "sparsePrefill", "spase_prefill"),
        *("sparse_prefill_level", "vllm_sparse_prefill", "sparse_prefill.level"),
    ],
)
def test_a_misspelt_key_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match=f"vllm_xargs: given '{key}', expected the key 'sparse_prefill'"):
        POLICY.level_of({key: 0})
    others = {"prefill": 0, "sparse": 1, "session_id": "s", "sparse_prefill" + 40 * "x": 0}
    assert POLICY.level_of(others) == SERVER_LEVEL


def test_p_needs_heads_that_choose_by_mass() -> None:
    assert level(WITH_SHARES, 0.97) == RequestLevel("p", 0.97)
    with pytest.raises(ValueError, match=r"given 0\.97, but no head of this server's plan selects by attention mass"):
        level(POLICY, 0.97)


class TestCanonicalForm:
    @pytest.mark.parametrize("given", ALL_LEVELS, ids=str)
    def test_workers_read_the_level_that_the_front_process_writes(self, given: RequestLevel) -> None:
        extra_args = {"session_id": "s", FIELD: 0}
        written = with_level(extra_args, given)
        assert level_in(written) == given
        assert written["session_id"] == "s"
        assert extra_args[FIELD] == 0  # of the caller, who may use it for the next request

    @pytest.mark.parametrize("extra_args", [None, {}, {"other": 1}, {FIELD: 0}, {FIELD: "exact"}, {FIELD: ["exact"]}])
    def test_json_cannot_express_it(self, extra_args: Any) -> None:
        """Clients send JSON, and front processes without this package pass on what they send."""
        assert level_in(extra_args) is None
        with pytest.raises(TypeError, match="bytes is not JSON serializable"):
            json.dumps(with_level(extra_args, SERVER_LEVEL))


class TestCacheSalts:
    @pytest.mark.parametrize("given", ALL_LEVELS[1:], ids=str)
    def test_stores_take_the_longest(self, given: RequestLevel) -> None:
        """LMCache refuses salts over 128 characters and some characters. The core adds 13 for streaming heads."""
        stored = replace(POLICY, fingerprints=dict.fromkeys(("exact", LONGEST_NAME, "p"), "f" * 16))
        for client in None, "", "user", "\ud800 @/\\" + "x" * 1_000_000:
            salt = stored.cache_salt(given, client)
            assert salt is not None
            assert len(salt) + 13 <= 128
            assert not {*salt} & {*"@/\\\0"}


class TestPolicy:
    def under(self, policy: LevelPolicy = WITH_SHARES, **requests: Any) -> LevelPolicy:
        return policy.under(RequestsConfig.read(requests, ""))

    @pytest.mark.parametrize("default", ["exact", "on", "high", "fast", True, 0])
    def test_requests_without_a_level_get_the_default(self, default: Any) -> None:
        policy = self.under(default=default)
        assert policy.level_of(None).name == {"exact": "exact", 0: "exact", "fast": "fast"}.get(default, ON)
        for value, name in (1, ON), (0, "exact"), ("fast", "fast"), (0.5, "p=0.5"):
            assert str(level(policy, value)) == name

    def test_clients_are_kept_from_levels(self) -> None:
        policy = self.under(default="exact", allow=["on", "p"])
        for value, name in (0, "exact"), ("exact", "exact"), (1, ON), (0.97, "p=0.97"):
            assert str(level(policy, value)) == name
        said = r"given 'fast', but .*\(requests.allow\) permit only 0 \(exact\), 1 .*, 'high', a number"
        with pytest.raises(ValueError, match=said):
            level(policy, "fast")
        only = self.under(allow=[])
        assert level(only, "high") == SERVER_LEVEL
        for value in (0, "fast", 0.97):
            with pytest.raises(ValueError, match=r"requests\.allow"):
                level(only, value)

    @pytest.mark.parametrize(
        ("requests", "said"),
        [
            ({"default": "slow"}, "requests.default: given 'slow', expected one of exact, fast, high, on"),
            ({"default": "p"}, "requests.default: given 'p'"),
            ({"allow": ["on", "exactly"]}, "requests.allow: given 'exactly'"),
            ({"default": 0.5}, "default: given 0.5, expected a valid string"),
        ],
    )
    def test_an_unknown_level_is_an_error(self, requests: dict[str, Any], said: str) -> None:
        with pytest.raises(ConfigurationError, match=said):
            self.under(**requests)

    def test_a_server_with_a_single_level_says_why(self) -> None:
        for default, other in ("on", 0), ("exact", 1):
            policy = self.under(replace(POLICY, refusal="it has a store"), default=default)
            assert level(policy, default) == policy.level_of(None)
            with pytest.raises(ValueError, match=f"given {other}, but it has a store; remove it"):
                level(policy, other)


class TestPlans:
    @pytest.fixture
    def config(self, tmp_path: Path) -> SparsePrefillConfig:
        levels = {"fast": {"default": {"method": "a_shape"}, "dense_layers": [0, 3]}}
        sale = {"method": "sale", "tau": 0.01}
        path = profile_file(tmp_path, min_tokens=300, level="high", default=sale, dense_layers=[0, 1], levels=levels)
        return SparsePrefillConfig(profile=path)

    def test_each_level_has_one(self, config: SparsePrefillConfig) -> None:
        plans = Plan.by_level(config, SHAPE)
        assert list(plans) == [ON, "fast"]
        assert plans[ON] == Plan.by_level(config, SHAPE)[ON]
        assert plans["fast"].methods == {make_method("a_shape", {})}
        dense_layers = [[i for i, layer in enumerate(plan.layers) if layer is None] for plan in plans.values()]
        assert dense_layers == [[0, 1], [0, 3]]
        assert "at level fast" in plans["fast"].source
        assert (plans[ON].level_names, plans[ON].level) == (("exact", "high", "fast"), "high")
        plain = Plan.by_level(SparsePrefillConfig(), SHAPE)
        assert list(plain) == [ON]
        assert (plain[ON].level_names, plain[ON].level) == (("exact",), None)

    def test_a_fingerprint_covers_what_is_computed(
        self, config: SparsePrefillConfig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        plans = Plan.by_level(config, SHAPE)
        assert len({fingerprint(plan, {}) for plan in plans.values()}) == 2
        again = SparsePrefillConfig(profile=config.profile, check_index=True)
        before = fingerprint(plans[ON], {})
        assert fingerprint(Plan.by_level(again, SHAPE.model_copy(update={"names": ("Mine",)}))[ON], {}) == before
        monkeypatch.setattr(request_levels, "package_version", lambda name: "another")
        assert fingerprint(plans[ON], {}) != before
