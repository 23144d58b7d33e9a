# SPDX-License-Identifier: Apache-2.0
"""What a benchmark is asked to measure: methods with parameters, as the command line writes them, and their plans."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import chain
from typing import Any

from vllm_sparse_backend.measure.report import BenchError
from vllm_sparse_backend.settings.config import SparsePrefillConfig
from vllm_sparse_backend.settings.errors import ConfigurationError
from vllm_sparse_backend.settings.methods import make_method
from vllm_sparse_backend.settings.model_shape import ModelShape
from vllm_sparse_backend.settings.plan import Plan
from vllm_sparse_backend.settings.profile import Profile, load_profile
from vllm_sparse_kernels.layer import layer_plan
from vllm_sparse_kernels.methods import METHODS, name_of, sparse_names
from vllm_sparse_kernels.methods.base import Method
from vllm_sparse_kernels.methods.dense.method import Dense
from vllm_sparse_kernels.methods.share_prefill.method import NOISE, SharePrefill

Clusters = Sequence[Sequence[int]]
"""Of each layer's heads: those of one number share what they find."""

FURTHEST_CLUSTER = 10_000
"""More than a model has heads."""


@dataclass(frozen=True)
class Asked:
    """A method and the parameters that differ from its defaults."""

    method: str
    params: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        return " ".join([self.method, *(f"{name}={_written(value)}" for name, value in self.params)])

    @staticmethod
    def parse(text: str) -> "Asked":
        """``anchor_attention:theta=9``, or a name alone. Raises BenchError naming what is wrong."""
        name, _, rest = text.partition(":")
        params = {}
        for part in rest.split(",") if rest else ():
            field, equals, value = part.partition("=")
            try:
                params[field.strip()] = json.loads(value)
            except ValueError:
                equals = ""
            if not equals:
                raise BenchError(f"--method: given {text!r}, expected NAME or NAME:FIELD=NUMBER,FIELD=NUMBER")
        try:
            return Asked.of(make_method(name.strip(), params))
        except ValueError as error:
            raise BenchError(f"--method {text!r}: {error}") from None

    @staticmethod
    def of(method: Method) -> "Asked":
        name = name_of(method)
        default, given = METHODS[name].parameters(), asdict(method)
        names = (field.name for field in fields(default) if field.init)
        return Asked(name, tuple((n, given[n]) for n in names if given[n] != getattr(default, n)))

    def plan(self, shape: ModelShape, clusters: Clusters | None = None) -> Plan:
        """What a server would run with it on a model of that shape.

        ``clusters``: of each layer's heads, for methods whose heads share what they find. Raises BenchError.
        """
        try:
            method = make_method(self.method, dict(self.params))
            if clusters is None or not hasattr(method, "cluster"):
                return Plan.build(SparsePrefillConfig(method=self.method, params=dict(self.params)), shape)
            params = dict(self.params)
            heads = [[make_method(self.method, params | {"cluster": c}) for c in layer] for layer in clusters]
            return plan_of_heads(heads, shape, str(self))
        except (ConfigurationError, ValueError) as error:
            raise BenchError(f"{self}: {error}") from None


def plan_of_heads(heads: Sequence[Sequence[Method]], shape: ModelShape, source: str) -> Plan:
    """A plan without thresholds, from the method of each head of each layer."""
    layers = [layer_plan(of, chain.from_iterable([*heads[:i], *heads[i + 1 :]])) for i, of in enumerate(heads)]
    return Plan(tuple(layers), 0, 1, source, shape)


def _written(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else json.dumps(value)


def methods_of_profile(name_or_path: str, shape: ModelShape) -> list[Asked]:
    """Each kind of method in a profile, with the parameters that most of its heads have."""
    try:
        profile: Profile = load_profile(name_or_path, "--profile")
    except ConfigurationError as error:
        raise BenchError(str(error)) from None
    own = profile.model or shape
    layers = set(range(own.num_layers)) - set(profile.dense_layers)
    counted = Counter(method for layer in sorted(layers) for method in profile.methods_of(layer, own.num_heads))
    chosen: dict[str, Asked] = {}
    for method, _ in counted.most_common():
        if (name := name_of(method)) != "dense":
            chosen.setdefault(name, Asked.of(method))
    return list(chosen.values())


def plan_of_profile(name_or_path: str, shape: ModelShape, copies: int, captured: Sequence[int] | None = None) -> Plan:
    """What a profile has each head of such a model do, heads ``copies`` times over; layers it leaves dense are so by
    the method that keeps all. Clusters of SharePrefill are each copy's own.

    ``captured``: the layers that the plan is of, all of them unless given.
    """
    profile = load_profile(name_or_path, "--profile")
    profile.check_model(shape, f"--profile {name_or_path}")
    every: list[list[Method]] = []
    numbers = range(shape.num_layers) if captured is None else captured
    for layer in numbers:
        dense = layer in profile.dense_layers
        own = [Dense()] * shape.num_heads if dense else list(profile.methods_of(layer, shape.num_heads))
        every.append([_of_copy(method, copy) for copy in range(copies) for method in own])
    layers = [layer_plan(of, chain.from_iterable(every[:i] + every[i + 1 :])) for i, of in enumerate(every)]
    num_heads, num_kv_heads = copies * shape.num_heads, copies * shape.num_kv_heads
    whole = replace(shape, num_layers=len(numbers), num_heads=num_heads, num_kv_heads=num_kv_heads)
    return Plan(tuple(layers), 0, 1, f"profile {name_or_path}", whole)


def _of_copy(method: Method, copy: int) -> Method:
    if isinstance(method, SharePrefill) and method.cluster != NOISE:
        return replace(method, cluster=method.cluster + copy * FURTHEST_CLUSTER)
    return method


def methods_asked(texts: Sequence[str], profiles: Sequence[str], shape: ModelShape) -> list[Asked]:
    """Those named, those of profiles, or all at their defaults and what a server does that is told nothing."""
    asked = [Asked.parse(text) for text in texts]
    for profile in profiles:
        asked += methods_of_profile(profile, shape)
    every = [*(Asked(name) for name in sparse_names()), Asked.of(make_method("default", {}))]
    return asked or list(dict.fromkeys(every))
