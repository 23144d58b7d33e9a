# SPDX-License-Identifier: Apache-2.0
"""Settings for multi-head latent attention (MLA): the methods that exist for it, and settings that it cannot honour.

Every setting without a meaning for MLA is refused: none is ignored silently.
"""

from collections.abc import Iterator

from vllm_sparse_backend.config.crossover_table import AUTO
from vllm_sparse_backend.config.errors import format_value
from vllm_sparse_backend.config.keys import KEY, OPTION
from vllm_sparse_backend.config.method_parameters import PRESETS
from vllm_sparse_backend.config.settings import SparsePrefillConfig
from vllm_sparse_kernels.methods import name_of
from vllm_sparse_kernels.mla import MlaMethod

ENGINE = "mla"
"""Name of the attention engine in tables of crossovers. It has not been measured, so ``auto`` is conservative."""

PARAMETERS = {"a_shape": ("sink_tokens", "local_tokens"), "top_p": ("kept_mass", "most_tokens")}
"""The methods that exist for MLA, with the parameters that they have there."""

METHOD_NAMES = (*PARAMETERS, *(preset for preset, (method, _) in PRESETS.items() if method in PARAMETERS))


def describe(method: MlaMethod) -> str:
    """Format a method with its parameters for the log."""
    name = name_of(method)
    return f"{name}({', '.join(f'{field}={getattr(method, field)}' for field in PARAMETERS[name])})"


def setting_problems(config: SparsePrefillConfig) -> Iterator[str]:
    """List the settings that MLA cannot honour."""
    place = f"{OPTION} {KEY}"
    if config.profile is not None:
        yield (
            f"{place}.profile: given {config.profile!r}, but profiles describe models with plain keys and values; "
            f"leave it out, and set method to one of {', '.join(METHOD_NAMES)}"
        )
    elif config.method not in METHOD_NAMES:
        yield (
            f"{place}.method: given {config.method!r}, expected one of {', '.join(METHOD_NAMES)}: no other method "
            "exists for multi-head latent attention"
        )
    else:
        name, _ = PRESETS.get(config.method, (config.method, {}))
        for field, value in config.params.items():
            if field not in PARAMETERS[name]:
                yield (
                    f"{place}.params.{field}: given {format_value(value)}, but {name} has only the parameters "
                    f"{', '.join(PARAMETERS[name])} for multi-head latent attention; leave it out"
                )
    if config.crossover is not None:
        yield (
            f"{place}.crossover: given {config.crossover!r}, but no crossover of multi-head latent attention is "
            "measured; leave it out, and set min_tokens and min_query_tokens"
        )
    if config.engine != AUTO:
        yield (
            f"{place}.engine: given {config.engine!r}, expected {AUTO!r}: multi-head latent attention has kernels of "
            "its own"
        )
    if config.requires_streaming_heads:
        yield (
            f"{place}.streaming_heads: given, but streaming heads are not measured for multi-head latent attention; "
            "leave it out"
        )
    if config.check_index:
        yield f"{place}.check_index: given true, but multi-head latent attention has no index; leave it out"
