# SPDX-License-Identifier: Apache-2.0
"""The served model's attention layers: which of them are ours, and their start-up.

When vLLM builds the metadata builder of a cache group, each of its layers gets its part of the plan, and the worker its
memory, engines and kernels.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import AttentionSpec

from vllm_sparse_backend.config.carried import finds_streaming_heads
from vllm_sparse_backend.config.errors import ConfigurationError
from vllm_sparse_backend.config.fallback import Fallback
from vllm_sparse_backend.identity import logger
from vllm_sparse_backend.serving import compat
from vllm_sparse_backend.serving.startup import no_layer_message, other_decode
from vllm_sparse_backend.serving.streaming_startup import do_without
from vllm_sparse_backend.serving.worker import startup_log
from vllm_sparse_backend.serving.worker.backend import SparsePrefillBackend
from vllm_sparse_backend.serving.worker.impl import SparsePrefillImpl
from vllm_sparse_backend.serving.worker.owner import Worker
from vllm_sparse_backend.serving.worker.rows import RowClassifier
from vllm_sparse_backend.serving.worker.warmup import warm_up
from vllm_sparse_kernels.cards import status_note

T = TypeVar("T")


# --- which layers are ours ---


def plain_impls(vllm_config: VllmConfig) -> dict[str, SparsePrefillImpl]:
    """Return the layers that run this backend itself, by name. Others run backends that vLLM derives from it."""
    layers = vllm_config.compilation_config.static_forward_context
    return {
        name: layer.impl
        for name, layer in layers.items()
        # vLLM derives backends for chunked and cross attention, static sinks and pooled blocks.
        if type(getattr(layer, "impl", None)) is SparsePrefillImpl and layer.get_attn_backend() is SparsePrefillBackend
    }


def served_layers(vllm_config: VllmConfig, layers: Mapping[str, T]) -> dict[int, T]:
    """Return the served model's layers in this worker, by number.

    A draft model's layers may have the same numbers. They are built after the served model's, so the first layer
    with a number belongs to the served model.
    """
    first, end = vllm_config.model_config.get_layers_start_end_indices(vllm_config.parallel_config)
    by_number: dict[int, T] = {}
    for name, layer in layers.items():
        number = compat.layer_number(name)
        if number is not None and first <= number < end:
            by_number.setdefault(number, layer)
    return by_number


def require_sparse_layer(vllm_config: VllmConfig) -> None:
    """Check that a layer of this worker can run sparse; with pipeline parallelism, log a warning if none can."""
    reasons = {impl.fallback for impl in plain_impls(vllm_config).values()} or {Fallback.NOT_DECODER}
    if None in reasons:
        return
    message = no_layer_message(reasons)
    if vllm_config.parallel_config.pipeline_parallel_size == 1:
        raise ConfigurationError(message)
    logger.warning("%s, in this pipeline stage", message)


def reserve_memory(worker: Worker) -> None:
    """Allocate our memory before vLLM measures the memory that its model needs, if a layer can run sparse."""
    if worker.mla is not None:
        worker.mla.reserve_memory()
    elif any(impl.fallback is None for impl in plain_impls(worker.vllm_config).values()):
        worker.reserve_memory()


# --- their start-up ---


class SparseGroup(NamedTuple):
    """The layers of a cache group that run sparse, and how the rows of its steps are classified."""

    numbers: tuple[int, ...]
    row_classifier: RowClassifier
    counts_rows: bool
    """Whether this group counts the rows of steps. All groups of a worker see the same rows."""


def adopt_layers(worker: Worker, names: Iterable[str], spec: AttentionSpec, cpu_isa: str) -> SparseGroup | None:
    """Prepare the layers of a cache group to run sparse, and log the result; None if none of them does."""
    vllm_config, resolved = worker.vllm_config, worker.resolved
    plain = plain_impls(vllm_config)
    layers = served_layers(vllm_config, plain)
    in_group = [plain[name] for name in names if name in plain]
    group = {number: impl for number, impl in layers.items() if impl in in_group}
    worker.attention_names = dict.fromkeys(layers, "dense") | worker.attention_names
    reasons = {number: impl.dense_reason(resolved.layer(number)) for number, impl in layers.items()}
    if worker.rank == 0:
        startup_log.log_dense_layers({number: reasons[number] for number in group})
    impls = {number: impl for number, impl in sorted(group.items()) if reasons[number] is None}
    if not impls:
        return None
    if not worker.streaming.by_layer and finds_streaming_heads(vllm_config.additional_config):
        do_without(vllm_config, "this worker got its KV cache before it ran the model to find the streaming heads")
    memory = worker.reserve_memory()
    for number, impl in impls.items():
        impl.adopt(number, worker.layer_levels(number, impl.head_size), worker)
    if memory is not None:
        _make_ready(worker, list(impls.values()), spec, cpu_isa)
    worker.attention_names |= {number: impl.layer.attention_name for number, impl in impls.items()}
    lengths = {
        level: resolved.lengths(level, {impl.levels[level].layer.engine.name for impl in impls.values()})
        for level in resolved.plans
    }
    if worker.rank == 0 and worker.should_log("plans"):
        startup_log.log_plans(vllm_config, resolved, lengths)
    first_sparse = min(number for number, reason in reasons.items() if reason is None)
    return SparseGroup(tuple(impls), RowClassifier(lengths, worker.requests), counts_rows=first_sparse in impls)


def _make_ready(worker: Worker, impls: Sequence[SparsePrefillImpl], spec: AttentionSpec, cpu_isa: str) -> None:
    """Check the cache's layout on a CPU; elsewhere choose engines and compile kernels."""
    if compat.IS_CPU:
        compat.check_cpu_layout(cpu_isa, spec)
        return
    vllm_config, first = worker.vllm_config, impls[0]
    dtype, has_sinks = vllm_config.model_config.dtype, first.sinks is not None
    other = other_decode(vllm_config, spec.head_size, dtype, first.kv_cache_dtype, has_sinks)
    for line in (status_note(torch.cuda.get_device_capability(worker.device)), other):
        if line is not None and worker.should_log(line):
            logger.warning("sparse-prefill: %s", line)
    warm_up(impls, spec, worker.device, worker.resolved.config.engine, compat.page_order(vllm_config))
