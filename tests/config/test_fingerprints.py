# SPDX-License-Identifier: Apache-2.0
"""Fingerprints of plans: plans that compute different keys and values have different fingerprints, so no store confuses
them."""

from dataclasses import fields, replace
from itertools import product

import pytest

from vllm_sparse_backend.config.crossover_table import Lengths
from vllm_sparse_backend.config.method_parameters import make_method
from vllm_sparse_backend.config.model_shape import ModelShape
from vllm_sparse_backend.config.plan import Plan
from vllm_sparse_backend.config.profile import ON
from vllm_sparse_backend.config.request_levels import fingerprint
from vllm_sparse_backend.config.settings import SparsePrefillConfig
from vllm_sparse_kernels.layer import LayerPlan
from vllm_sparse_kernels.methods import METHODS

SHAPE = ModelShape(architecture="LlamaForCausalLM", num_layers=3, num_heads=4, num_kv_heads=2, head_dim=64)
PLAN = Plan.by_level(SparsePrefillConfig(method="dense", min_tokens=128, min_query_tokens=1), SHAPE)[ON]


def test_another_method_of_any_head_makes_another() -> None:
    plans = [PLAN]
    for layer, head in product(range(3), range(4)):
        heads = [[*PLAN.layer(i).methods] for i in range(3)]
        heads[layer][head] = make_method("a_shape", {})
        plans.append(replace(PLAN, layers=tuple(LayerPlan(tuple(methods)) for methods in heads)))
    assert len({fingerprint(plan, {}) for plan in plans}) == 13


@pytest.mark.parametrize("name", METHODS)
def test_all_parameters_count(name: str) -> None:
    """A fingerprint hashes the text of each method."""
    method = METHODS[name].parameters()
    assert all(f"{field.name}={getattr(method, field.name)!r}" in repr(method) for field in fields(method))


def test_what_auto_stands_for_makes_another() -> None:
    plan = Plan.by_level(SparsePrefillConfig(), SHAPE)[ON]
    lengths = [
        Lengths(8192, 1024),
        Lengths(16384, 1024),
        Lengths(8192, 1024, 36_000_000),
        Lengths(8192, 1024, 36_000_000, 1),
    ]
    assert len({fingerprint(plan, {"hopper": of_engine}) for of_engine in lengths}) == len(lengths)
