# SPDX-License-Identifier: Apache-2.0
"""Settings for multi-head latent attention (MLA): the methods that exist for it, and settings that it cannot honour.

Every setting without a meaning for MLA is refused: none is ignored silently.
"""

from collections.abc import Iterator

from vllm_sparse_backend.config.crossover_table import AUTO
from vllm_sparse_backend.config.errors import format_value
from vllm_sparse_backend.config.keys import SETTINGS
from vllm_sparse_backend.config.method_parameters import PRESETS, format_call
from vllm_sparse_backend.config.settings import SparsePrefillConfig
from vllm_sparse_kernels.methods import name_of
from vllm_sparse_kernels.mla import MlaMethod

ENGINE = "mla"
"""Name of the attention engine in the metric ``layers``, and in tables of crossovers. It has not been measured, so
``auto`` is conservative."""

PARAMETERS = {"a_shape": ("sink_tokens", "local_tokens"), "top_p": ("kept_mass", "most_tokens")}
"""The methods that exist for MLA, with the parameters that they have there."""

METHOD_NAMES = (*PARAMETERS, *(preset for preset, method in PRESETS.items() if method in PARAMETERS))

SUPPORTED = {"method", "params", "min_tokens", "min_query_tokens", "dense_layers", "requests"}
"""Settings that have a meaning for MLA."""

OFF = (None, False, AUTO)
"""Values of other settings that change nothing."""


def describe(method: MlaMethod) -> str:
    """Format a method with its parameters for the log."""
    name = name_of(method)
    return format_call(name, {field: getattr(method, field) for field in PARAMETERS[name]})


def setting_problems(config: SparsePrefillConfig) -> Iterator[str]:
    """List the settings that MLA does not support."""
    for field in sorted(config.model_fields_set - SUPPORTED):
        value = config.model_dump()[field]
        if value not in OFF:
            given = f"{SETTINGS}.{field}: given {format_value(value)}"
            yield f"{given}, which multi-head latent attention does not support; leave it out"
    if config.method not in METHOD_NAMES:
        yield (
            f"{SETTINGS}.method: given {config.method!r}, expected one of {', '.join(METHOD_NAMES)}: no other method "
            "exists for multi-head latent attention"
        )
    name = PRESETS.get(config.method, config.method)
    for field, value in config.params.items():
        if field not in PARAMETERS[name]:
            yield (
                f"{SETTINGS}.params.{field}: given {format_value(value)}, but {name} has only the parameters "
                f"{', '.join(PARAMETERS[name])} for multi-head latent attention; leave it out"
            )
