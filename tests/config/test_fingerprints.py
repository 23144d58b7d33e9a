# SPDX-License-Identifier: Apache-2.0
"""Fingerprints of plans: plans that compute different keys and values have different fingerprints, so no store confuses
them."""

import itertools
import typing
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace

import pytest

from vllm_sparse_backend.config.method_parameters import make_method, parameters_of
from vllm_sparse_backend.config.model_shape import ModelShape
from vllm_sparse_backend.config.plan import Plan
from vllm_sparse_backend.config.profile import bundled_profiles, load_profile
from vllm_sparse_backend.config.request_levels import fingerprint
from vllm_sparse_backend.config.settings import SparsePrefillConfig
from vllm_sparse_kernels.layer import LayerPlan
from vllm_sparse_kernels.methods import METHODS
from vllm_sparse_kernels.methods.base import Method

SHAPE = ModelShape(architecture="LlamaForCausalLM", num_layers=3, num_heads=4, num_kv_heads=2, head_dim=64)
CANDIDATES = (True, False, -8.0, 0.03, 0.3, 0.7, 0.999, 2.0, 1, 2, 3, 16, 32, 64, 128, 256, 320, 1024, 4096, None)
"""Values that various fields may have."""

FIELDS = [
    (name, parameter.name) for name, spec in METHODS.items() for parameter in fields(spec.parameters) if parameter.init
]  # fmt: skip


def changed(method: Method, name: str, field: str) -> Iterator[Method]:
    """Yield the method with other values that the field accepts."""
    hint = typing.get_type_hints(type(method))[field]
    texts = [value for part in (hint, *typing.get_args(hint)) for value in typing.get_args(part)]
    for value in (*CANDIDATES, *(text for text in texts if isinstance(text, str))):
        params = {key: old for key, old in parameters_of(method).items() if key != "method"}
        try:
            other = make_method(name, {**params, field: value})
        except ValueError:
            continue
        if other != method:
            yield other


def plan_of(heads: Sequence[Sequence[Method]]) -> Plan:
    """Return a plan with these methods for its heads, layer by layer."""
    plan = Plan.build(SparsePrefillConfig(method="dense", min_tokens=128, min_query_tokens=1), SHAPE)
    counts = Counter(method.sharing for method in itertools.chain.from_iterable(heads))
    return replace(plan, layers=tuple(LayerPlan.of(layer, counts) for layer in heads))


@pytest.mark.parametrize(("name", "field"), FIELDS)
def test_any_field_of_any_head_makes_another(name: str, field: str) -> None:
    """For a single head, and for a head that is selected together with others and has different numbers."""
    default = make_method(name, {})
    others = [next(changed(default, name, parameter.name), default) for parameter in fields(default) if parameter.init]
    variants = list(itertools.islice(changed(default, name, field), 3))
    assert variants, f"{name}.{field}: no other value is taken; add one to CANDIDATES"
    alike = [[(default, *others)[(layer + head) % (1 + len(others))] for head in range(4)] for layer in range(3)]
    plans = [plan_of(alike)]
    for variant, layer, head in itertools.product(variants, range(3), range(4)):
        heads = [list(methods) for methods in alike]
        heads[layer][head] = variant
        plans.append(plan_of(heads))
    # The number of a cluster with a single member does not matter.
    computed = {plan.layers for plan in plans}
    assert len({fingerprint(plan) for plan in plans}) == len(computed) > 4


def test_heads_in_another_order_make_another() -> None:
    method, other = (make_method("sale", {"tau": tau}) for tau in (0.01, 0.02))
    orders = set(itertools.permutations((method, method, other, other)))
    assert len({fingerprint(plan_of([order] * 3)) for order in orders}) == len(orders)


def test_what_auto_stands_for_makes_another() -> None:
    plan = Plan.build(SparsePrefillConfig(), SHAPE)
    numbers = [{"hopper": [tokens, 1024]} for tokens in (8192, 16384)]
    assert len({fingerprint(plan), *(fingerprint(plan, auto_numbers) for auto_numbers in numbers)}) == 3


def scaled(method: Method, name: str) -> Method:
    """Return the method with every number changed that may differ between heads selected together; otherwise all
    numbers."""
    names = getattr(method, "differing", None) or [parameter.name for parameter in fields(method) if parameter.init]
    for field in names:
        method = next(changed(method, name, field), method)
    return method


@pytest.mark.parametrize("name", sorted(bundled_profiles()))
def test_a_bundled_profile_with_all_numbers_changed_has_another(name: str) -> None:
    profile = load_profile(name)
    if profile.model is None:
        pytest.skip("is of no model")
    plan = Plan.build(SparsePrefillConfig(profile=name), profile.model)
    heads = range(profile.model.num_layers), range(profile.model.num_heads)
    methods = [profile.methods_of(layer, len(heads[1])) for layer in heads[0]]
    known: dict[Method, Method] = {}
    for method in itertools.chain.from_iterable(methods):
        if method not in known:
            known[method] = scaled(method, parameters_of(method)["method"])
    counts = Counter(known[method].sharing for method in itertools.chain.from_iterable(methods))
    layers = [
        None if layer is None else LayerPlan.of([known[method] for method in layer_methods], counts)
        for layer, layer_methods in zip(plan.layers, methods, strict=True)
    ]
    assert fingerprint(replace(plan, layers=tuple(layers))) != fingerprint(plan)


def test_bundled_profiles_of_one_model_have_different_ones() -> None:
    by_shape: dict[ModelShape, dict[str, str]] = {}
    for name in bundled_profiles():
        profile = load_profile(name)
        if profile.model is not None:
            plan = Plan.build(SparsePrefillConfig(profile=name), profile.model)
            by_shape.setdefault(profile.model, {})[name] = fingerprint(plan)
    assert any(len(fingerprints) > 1 for fingerprints in by_shape.values())
    for fingerprints in by_shape.values():
        assert len({*fingerprints.values()}) == len(fingerprints), fingerprints
