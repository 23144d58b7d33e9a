# SPDX-License-Identifier: Apache-2.0
"""What a request may ask for, and the mark that goes along with it."""

from collections.abc import Mapping
from typing import Any

import pytest

from vllm_sparse_backend.settings import requests
from vllm_sparse_backend.settings.config import SparsePrefillConfig
from vllm_sparse_backend.settings.crossover import Crossover
from vllm_sparse_backend.settings.methods import make_method
from vllm_sparse_backend.settings.model_shape import ModelShape
from vllm_sparse_backend.settings.plan import DEFAULT, Plan
from vllm_sparse_backend.settings.requests import MARK, Choices, Mark, fingerprint

SHAPE = ModelShape(architecture="LlamaForCausalLM", num_layers=4, num_heads=4, num_kv_heads=2, head_dim=32)
NOTHING = Crossover(format=1, entries=())
CHOICES = Choices(("exact", "high", "fast"), "high", 256, {"exact": "exact", "fast": "fast"})
PROFILE = """
format: 1
model: any
min_tokens: 300
level: high
default: {method: sale, tau: 0.01}
dense_layers: [0, 1]
levels:
  fast:
    default: {method: a_shape}
    dense_layers: [0, 3]
"""


@pytest.fixture
def config(tmp_path: Any) -> SparsePrefillConfig:
    (tmp_path / "levels.yaml").write_text(PROFILE)
    return SparsePrefillConfig(profile=str(tmp_path / "levels.yaml"))


@pytest.mark.parametrize(
    ("given", "level"),
    [
        (0, "exact"), (1, DEFAULT), (False, "exact"), (True, DEFAULT), (0.0, "exact"), (1.0, DEFAULT),
        ("exact", "exact"), ("high", DEFAULT), ("fast", "fast"),
    ],
)  # fmt: skip
def test_values_and_the_levels_that_they_name(given: object, level: str) -> None:
    """The level that the server has anyway is no other than its own: both read the same cache."""
    mark = CHOICES.mark({"sparse_prefill": given, "other": 3})
    assert (mark.level, mark.salt) == (level, CHOICES.salts.get(level))


@pytest.mark.parametrize("given", [2, -1, 0.5, "0", "Exact", "", "default", None, [0], {"level": 0}, float("nan")])
def test_anything_else_is_an_error_that_lists_what_is_allowed(given: object) -> None:
    with pytest.raises(
        ValueError, match=r"sparse_prefill: given .*, expected one of 0 \(exact\), 1 .*, high\)"
    ) as caught:
        CHOICES.mark({"sparse_prefill": given})
    assert "'exact', 'high', 'fast'" in str(caught.value)


def test_a_server_that_can_do_nothing_but_its_own_says_why() -> None:
    choices = Choices(("exact",), refusal="it has a store")
    assert choices.mark({"sparse_prefill": 1}).level == DEFAULT
    with pytest.raises(ValueError, match="given 0, but it has a store; leave it out, or give 1"):
        choices.mark({"sparse_prefill": 0})


@pytest.mark.parametrize(
    "extra_args", [None, {}, {"other": 1}, {MARK: ["fast", None, 0]}, {"other": 1, MARK: "forged"}]
)
def test_a_mark_goes_along_with_other_arguments(extra_args: Mapping[str, Any] | None) -> None:
    """And takes the place of one that somebody sent. The server's own level needs none."""
    others = {key: value for key, value in (extra_args or {}).items() if key != MARK}
    exact = Mark("exact", "salt", 256)
    assert Mark.of(exact.write(extra_args)) == exact
    assert exact.write(extra_args).items() >= others.items()
    assert Mark(DEFAULT).write(extra_args) == (others or None)
    assert Mark.of(Mark(DEFAULT).write(extra_args)) is None
    assert Mark.of(Mark(DEFAULT, "own", 256).write(extra_args)) == Mark(DEFAULT, "own", 256)


def test_where_nothing_goes_sparse_all_levels_share_their_blocks() -> None:
    choices = Choices(("exact",), exact_tokens=None, salts={"exact": "exact"})
    assert choices.mark({"sparse_prefill": 0}) == Mark("exact")


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
        monkeypatch.setattr(requests, "package_version", lambda name: "another")
        assert fingerprint(plans[DEFAULT]) != before
