# SPDX-License-Identifier: Apache-2.0
"""The served model's own attention layers on this worker, found among all that vLLM has built there."""

import logging
from collections import Counter
from typing import NamedTuple

from vllm.config import VllmConfig
from vllm.model_executor.models.utils import extract_layer_index

from vllm_sparse_backend.config.attention_reach import Reach
from vllm_sparse_backend.config.errors import ConfigurationError
from vllm_sparse_backend.config.fallback import Fallback
from vllm_sparse_backend.identity import BACKEND, LOGGER
from vllm_sparse_backend.serving.startup import no_layer_message
from vllm_sparse_backend.serving.worker.impl import SparsePrefillImpl
from vllm_sparse_backend.serving.worker.shared_worker import Worker

logger = logging.getLogger(LOGGER)


class ModelLayer(NamedTuple):
    number: int
    impl: SparsePrefillImpl


def plain_impls(vllm_config: VllmConfig) -> dict[str, SparsePrefillImpl]:
    """By name, layers that run this backend as it is.

    vLLM derives backends from a chosen one where a layer attends to something else than its own sequence (chunked and
    cross attention, static sinks, pooled blocks): those are not ours to touch.
    """
    layers = vllm_config.compilation_config.static_forward_context
    impls = {name: getattr(layer, "impl", None) for name, layer in layers.items()}
    return {
        name: impl
        for name, impl in impls.items()
        if type(impl) is SparsePrefillImpl and _path(layers[name].get_attn_backend()) == BACKEND
    }


def _path(backend: type) -> str:
    """Where a backend is registered from: those that vLLM derives bear other names."""
    return f"{backend.__module__}.{backend.__qualname__}"


def model_layers(vllm_config: VllmConfig) -> dict[str, ModelLayer]:
    """By name, the served model's layers among ``plain_impls``.

    A draft model's layers may bear the same numbers: they are built after the served model's, which are the first of
    each number.
    """
    first, end = vllm_config.model_config.get_layers_start_end_indices(vllm_config.parallel_config)
    found: dict[int, str] = {}
    impls = plain_impls(vllm_config)
    for name in impls:
        number = _number_of(name)
        if number is not None and first <= number < end:
            found.setdefault(number, name)
    return {name: ModelLayer(number, impls[name]) for number, name in found.items()}


def adopted_worker(vllm_config: VllmConfig) -> Worker | None:
    """What the layers that go sparse on this worker have in common; None where no layer does."""
    impls = plain_impls(vllm_config).values()
    return next((impl.worker for impl in impls if impl.is_adopted), None)


def heads_by_reach(vllm_config: VllmConfig) -> Counter[Reach]:
    """By how far back they look, heads of all layers of the served model on this worker that attend to their past."""
    layers = vllm_config.compilation_config.static_forward_context
    first, end = vllm_config.model_config.get_layers_start_end_indices(vllm_config.parallel_config)
    found: Counter[Reach] = Counter()
    known: set[int | None] = {None}
    for name, layer in layers.items():
        impl, number = getattr(layer, "impl", None), _number_of(name)
        if isinstance(impl, SparsePrefillImpl) and impl.attn_type == "decoder" and number not in known:
            known.add(number)
            if first <= number < end:
                found[Reach(layer.sliding_window or 0, getattr(layer, "attention_chunk_size", 0) or 0)] += (
                    impl.num_heads
                )
    return found


def _number_of(name: str) -> int | None:
    try:
        return int(extract_layer_index(name))
    except AssertionError:  # no number in it, or more than one
        return None


def require_sparse_layer(vllm_config: VllmConfig) -> None:
    """Raise ConfigurationError where no layer of this worker can prefill sparsely.

    With pipeline parallelism other workers have other layers: then it is a warning.
    """
    reasons = {impl.fallback for impl in plain_impls(vllm_config).values()} or {Fallback.NOT_DECODER}
    if None in reasons:
        return
    message = no_layer_message({reason for reason in reasons if reason is not None})
    if vllm_config.parallel_config.pipeline_parallel_size == 1:
        raise ConfigurationError(message)
    logger.warning("%s, in this pipeline stage", message)
