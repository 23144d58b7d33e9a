# SPDX-License-Identifier: Apache-2.0
"""Methods with parameters, in the syntax of the benchmarks' ``--method``, and their plans."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm_sparse_backend.config.errors import ConfigurationError
from vllm_sparse_backend.config.method_parameters import changed_fields, make_method
from vllm_sparse_backend.config.model_shape import ModelShape
from vllm_sparse_backend.config.plan import Plan, layer_plans
from vllm_sparse_backend.config.settings import SparsePrefillConfig
from vllm_sparse_backend.evaluation.report import BenchError
from vllm_sparse_kernels.methods import METHODS, name_of
from vllm_sparse_kernels.methods.base import Method


@dataclass(frozen=True)
class MethodSpec:
    """A method and the parameters that differ from its defaults."""

    method: str
    params: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        values = {name: f"{value:g}" if isinstance(value, float) else json.dumps(value) for name, value in self.params}
        return " ".join([self.method, *(f"{name}={value}" for name, value in values.items())])

    @staticmethod
    def parse(text: str) -> "MethodSpec":
        """Parse a text such as ``anchor_attention:theta=9``, or a name. Raises BenchError for anything else."""
        name, _, fields = text.partition(":")
        params = {}
        for part in fields.split(",") if fields else ():
            field, equals, value = part.partition("=")
            try:
                params[field.strip()] = json.loads(value)
            except ValueError:
                equals = ""
            if not equals:
                raise BenchError(f"--method: given {text!r}, expected NAME or NAME:FIELD=NUMBER,FIELD=NUMBER")
        try:
            return MethodSpec.of(make_method(name.strip(), params))
        except ValueError as error:
            raise BenchError(f"--method {text!r}: {error}") from None

    @staticmethod
    def of(method: Method) -> "MethodSpec":
        return MethodSpec(name_of(method), tuple(changed_fields(method).items()))

    def plan(self, shape: ModelShape) -> Plan:
        """Return a server's plan for a model of this shape. Raises BenchError."""
        try:
            return Plan.build(SparsePrefillConfig(method=self.method, params=dict(self.params)), shape)
        except (ConfigurationError, ValueError) as error:
            raise BenchError(f"{self}: {error}") from None


def plan_of_heads(heads: Sequence[Sequence[Method]], shape: ModelShape, source: str) -> Plan:
    """Return a plan without thresholds, from the method of each head of each layer."""
    return Plan(layer_plans(heads), 0, 1, source, shape)


def methods_named(texts: Sequence[str]) -> list[MethodSpec]:
    """Return the named methods; without names, all methods at their defaults and the server's default."""
    specs = [MethodSpec.parse(text) for text in texts]
    names = [name for name in METHODS if name not in ("dense", "share_prefill")]  # the latter runs with a profile only
    every = [*map(MethodSpec, names), MethodSpec.of(make_method("default", {}))]
    return specs or list(dict.fromkeys(every))
