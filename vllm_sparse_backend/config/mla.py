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
from vllm_sparse_kernels.methods.base import Method
from vllm_sparse_kernels.mla import MlaAShape, MlaTopP

ENGINE = "mla"
"""Name of the attention engine in tables of crossovers. It has not been measured, so ``auto`` is conservative."""

CHANNELS = {"half": 128, "all": 192}
"""Number of channels that ``top_p`` multiplies, by the value of its parameter ``channels``."""

MlaMethod = MlaAShape | MlaTopP
_METHODS: dict[str, type[MlaMethod]] = {"a_shape": MlaAShape, "top_p": MlaTopP}

METHOD_NAMES = (*_METHODS, *(preset for preset, (method, _) in PRESETS.items() if method in _METHODS))
"""Methods and presets that exist for MLA."""


def mla_method(method: Method) -> MlaMethod:
    """Convert a method to its form for MLA, with the parameters that exist there."""
    parameters = _METHODS[name_of(method)]
    values = {name: getattr(method, name) for name in parameters._fields}
    if "channels" in values:
        values["channels"] = CHANNELS[values["channels"]]
    return parameters(**values)


def describe(method: MlaMethod) -> str:
    """Format a method with its parameters for the log."""
    name = next(name for name, parameters in _METHODS.items() if isinstance(method, parameters))
    return f"{name}({', '.join(f'{field}={format_value(value)}' for field, value in method._asdict().items())})"


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
        yield from _parameter_problems(config)
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


def _registered_name(config: SparsePrefillConfig) -> str:
    name, _ = PRESETS.get(config.method, (config.method, {}))
    return name


def _parameter_problems(config: SparsePrefillConfig) -> Iterator[str]:
    name = _registered_name(config)
    known = _METHODS[name]._fields
    for field, value in config.params.items():
        if field not in known:
            yield (
                f"{OPTION} {KEY}.params.{field}: given {format_value(value)}, but {name} has only the parameters "
                f"{', '.join(known)} for multi-head latent attention; leave it out"
            )
