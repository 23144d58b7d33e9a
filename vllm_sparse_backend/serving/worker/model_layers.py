# SPDX-License-Identifier: Apache-2.0
"""Finds the served model's attention layers among all layers that vLLM built on this worker."""

import logging
from typing import NamedTuple

from vllm.config import VllmConfig

from vllm_sparse_backend.config.errors import ConfigurationError
from vllm_sparse_backend.config.fallback import Fallback
from vllm_sparse_backend.identity import BACKEND, LOGGER
from vllm_sparse_backend.serving import compat
from vllm_sparse_backend.serving.startup import no_layer_message
from vllm_sparse_backend.serving.worker.impl import SparsePrefillImpl
from vllm_sparse_backend.serving.worker.mla_prefill import mla_worker
from vllm_sparse_backend.serving.worker.shared_worker import Worker

logger = logging.getLogger(LOGGER)


class ModelLayer(NamedTuple):
    """A layer of the served model: its number, and its attention implementation."""

    number: int
    impl: SparsePrefillImpl


def plain_impls(vllm_config: VllmConfig) -> dict[str, SparsePrefillImpl]:
    """Return the layers that run this backend itself.

    vLLM derives backends from this one for layers that attend to something other than their own sequence (chunked and
    cross attention, static sinks, pooled blocks). Such layers stay unchanged.
    """
    layers = vllm_config.compilation_config.static_forward_context
    impls = {name: getattr(layer, "impl", None) for name, layer in layers.items()}
    return {
        name: impl
        for name, impl in impls.items()
        if type(impl) is SparsePrefillImpl and _path(layers[name].get_attn_backend()) == BACKEND
    }


def _path(backend: type) -> str:
    """Return the qualified name of a backend. Backends that vLLM derives have other names."""
    return f"{backend.__module__}.{backend.__qualname__}"


def model_layers(vllm_config: VllmConfig) -> dict[str, ModelLayer]:
    """Return the served model's layers among ``plain_impls``.

    A draft model's layers may have the same numbers. They are built after the served model's, so the first layer
    with a number belongs to the served model.
    """
    first, end = vllm_config.model_config.get_layers_start_end_indices(vllm_config.parallel_config)
    names: dict[int, str] = {}
    impls = plain_impls(vllm_config)
    for name in impls:
        number = compat.layer_number(name)
        if number is not None and first <= number < end:
            names.setdefault(number, name)
    return {name: ModelLayer(number, impls[name]) for number, name in names.items()}


def adopted_worker(vllm_config: VllmConfig) -> Worker | None:
    """Return the object that the sparse layers of this worker share."""
    impls = plain_impls(vllm_config).values()
    adopted = next((impl.worker for impl in impls if impl.is_adopted), None)
    if adopted is not None:
        return adopted
    mla = mla_worker(vllm_config)
    return mla.worker if mla is not None and mla.layers else None


def require_sparse_layer(vllm_config: VllmConfig) -> None:
    """Check that at least one layer of this worker can run sparse.

    With pipeline parallelism other workers have other layers. A worker without such a layer then only logs a warning.
    """
    reasons = {impl.fallback for impl in plain_impls(vllm_config).values()} or {Fallback.NOT_DECODER}
    if None in reasons:
        return
    message = no_layer_message({reason for reason in reasons if reason is not None})
    if vllm_config.parallel_config.pipeline_parallel_size == 1:
        raise ConfigurationError(message)
    logger.warning("%s, in this pipeline stage", message)
