# SPDX-License-Identifier: Apache-2.0
"""Fingerprints of plans: plans that compute different keys and values have different fingerprints, so no store confuses
them."""

import itertools
import typing
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields, replace

import pytest

from vllm_sparse_backend.config.crossover_table import Lengths
from vllm_sparse_backend.config.method_parameters import make_method, parameters_of
from vllm_sparse_backend.config.model_shape import ModelShape
from vllm_sparse_backend.config.plan import Plan
from vllm_sparse_backend.config.request_levels import fingerprint
from vllm_sparse_backend.config.settings import SparsePrefillConfig
from vllm_sparse_kernels.layer import LayerPlan
from vllm_sparse_kernels.methods import METHODS
from vllm_sparse_kernels.methods.base import Method

SHAPE = ModelShape(architecture="LlamaForCausalLM", num_layers=3, num_heads=4, num_kv_heads=2, head_dim=64)
CANDIDATES = (True, False, -8.0, 0.03, 0.3, 0.7, 0.999, 2.0, 1, 2, 3, 16, 32, 64, 128, 256, 320, 1024, 4096, None)
"""Values that various fields may have."""


def changed(method: Method, name: str, field: str) -> Method:
    """Return the method with another value that the field accepts."""
    hint = typing.get_type_hints(type(method))[field]
    texts = [value for part in (hint, *typing.get_args(hint)) for value in typing.get_args(part)]
    params = {key: old for key, old in parameters_of(method).items() if key != "method"}
    for value in (*CANDIDATES, *(text for text in texts if isinstance(text, str))):
        try:
            other = make_method(name, {**params, field: value})
        except ValueError:
            continue
        if other != method:
            return other
    raise AssertionError(f"{name}.{field}: no other value is taken; add one to CANDIDATES")


def plan_of(heads: Sequence[Sequence[Method]]) -> Plan:
    """Return a plan with these methods for its heads, layer by layer."""
    plan = Plan.build(SparsePrefillConfig(method="dense", min_tokens=128, min_query_tokens=1), SHAPE)
    counts = Counter(method.sharing for method in itertools.chain.from_iterable(heads))
    return replace(plan, layers=tuple(LayerPlan.of(layer, counts) for layer in heads))


@pytest.mark.parametrize("name", METHODS)
def test_any_field_of_any_head_makes_another(name: str) -> None:
    default = make_method(name, {})
    plans = [plan_of([[default] * 4] * 3)]
    names = [parameter.name for parameter in fields(default) if parameter.init]
    for field in names:
        for layer, head in (0, 0), (2, 3):
            heads = [[default] * 4 for _ in range(3)]
            heads[layer][head] = changed(default, name, field)
            plans.append(plan_of(heads))
    # The number of a cluster with a single member does not matter.
    without_effect = 2 * ("cluster" in names)
    assert len({fingerprint(plan, {}) for plan in plans}) == len(plans) - without_effect


def test_what_auto_stands_for_makes_another() -> None:
    plan = Plan.build(SparsePrefillConfig(), SHAPE)
    lengths = [
        Lengths(8192, 1024),
        Lengths(16384, 1024),
        Lengths(8192, 1024, 36_000_000),
        Lengths(8192, 1024, 36_000_000, 1),
    ]
    assert len({fingerprint(plan, {"hopper": of_engine}) for of_engine in lengths}) == len(lengths)
