# SPDX-License-Identifier: Apache-2.0
"""Methods with parameters, in the syntax of the benchmarks' ``--method``, and their names in figures."""

import json
from collections.abc import Sequence

from vllm_sparse_backend.config.method_parameters import changed_fields, make_method
from vllm_sparse_backend.evaluation.report import BenchError
from vllm_sparse_kernels.methods import METHODS, name_of
from vllm_sparse_kernels.methods.base import Method


def parse_method(text: str) -> Method:
    """Parse a text such as ``anchor_attention:theta=9``, or a name. Raises BenchError for anything else."""
    name, _, fields = text.partition(":")
    pairs = [part.partition("=") for part in fields.split(",") if part]
    try:
        return make_method(name.strip(), {field.strip(): json.loads(value) for field, _, value in pairs})
    except ValueError as error:
        expected = "expected NAME or NAME:FIELD=NUMBER,FIELD=NUMBER"
        raise BenchError(f"--method: given {text!r}: {error}; {expected}") from None


def figure_name(method: Method) -> str:
    """Return a method's name with the parameters that differ from its defaults."""
    params = changed_fields(method).items()
    values = [f"{name}={f'{x:g}' if isinstance(x, float) else json.dumps(x)}" for name, x in params]
    return " ".join([name_of(method), *values])


def methods_named(texts: Sequence[str]) -> list[Method]:
    """Return the named methods; without names, all methods at their defaults."""
    if texts:
        return [parse_method(text) for text in texts]
    # share_prefill runs with a profile only.
    return [spec.parameters() for name, spec in METHODS.items() if name not in ("dense", "share_prefill")]
