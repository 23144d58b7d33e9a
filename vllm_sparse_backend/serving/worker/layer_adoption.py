# SPDX-License-Identifier: Apache-2.0
"""Start-up of the layers of one cache group: each gets its part of the plan, its memory, engines and kernels."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import AttentionSpec

from vllm_sparse_backend.config.crossover_table import AUTO, Thresholds
from vllm_sparse_backend.config.resolved import carried_streaming
from vllm_sparse_backend.identity import LOGGER
from vllm_sparse_backend.serving import compat, hooks
from vllm_sparse_backend.serving.startup import other_decode, slow_path
from vllm_sparse_backend.serving.streaming_startup import do_without
from vllm_sparse_backend.serving.worker import startup_log
from vllm_sparse_backend.serving.worker.arena import Memory
from vllm_sparse_backend.serving.worker.chunk_limits import ChunkLimits
from vllm_sparse_backend.serving.worker.impl import SparsePrefillImpl
from vllm_sparse_backend.serving.worker.model_layers import ModelLayer
from vllm_sparse_backend.serving.worker.shared_worker import Worker
from vllm_sparse_kernels.cards import status_note

logger = logging.getLogger(LOGGER)


@dataclass(frozen=True)
class CacheGroup:
    """Layers that share a block table, as vLLM passes them to a metadata builder."""

    vllm_config: VllmConfig
    device: torch.device
    layer_names: Sequence[str]
    cache_spec: AttentionSpec
    cpu_isa: str = ""


@dataclass(frozen=True)
class AdoptedLayers:
    """The layers of a cache group that run sparse, and the data that their steps need."""

    numbers: tuple[int, ...]
    worker: Worker
    memory: Memory | None
    thresholds: Mapping[str, Thresholds]
    is_first_group: bool


class LayerAdoption:
    """Makes the layers of a cache group run sparse, before the first step."""

    def __init__(self, group: CacheGroup, model_layers: Mapping[str, ModelLayer]) -> None:
        self._group = group
        self._model_layers = model_layers
        self._group_layers = [model_layers[name] for name in group.layer_names if name in model_layers]

    def adopt(self) -> AdoptedLayers | None:
        """Give each layer its part of the plan, allocate the arena, compile kernels, and log how each layer runs."""
        vllm_config = self._group.vllm_config
        worker = self._group_layers[0].impl.shared_worker(vllm_config, self._group.device, planned=True)
        if worker.resolved.is_dense:
            if worker.rank == 0 and worker.should_log("pooling"):
                startup_log.log_pooling()
            return None
        plans = {number: worker.resolved.layer(number) for number, _ in self._model_layers.values()}
        reasons = {number: impl.dense_reason(plans[number]) for number, impl in self._model_layers.values()}
        if worker.rank == 0:
            startup_log.log_dense_layers({number: reasons[number] for number, _ in self._group_layers})
        impls = {number: impl for number, impl in self._group_layers if reasons[number] is None}
        if not impls:
            return None
        if worker.streaming is None and carried_streaming(vllm_config.additional_config):
            do_without(vllm_config, "this worker got its KV cache before it ran the model to find the streaming heads")
        memory = worker.reserve_memory()
        numbers = tuple(sorted(impls))
        worker.recorder.add_layers(numbers, worker.resolved.plans)
        for number in numbers:
            levels = worker.layer_levels(number, plans[number], impls[number].head_size)
            impls[number].adopt(number, levels, worker)
        if memory is not None:
            self._make_ready([impls[number] for number in numbers], worker)
        thresholds = self._thresholds(list(impls.values()), worker)
        hooks.install_in_worker(vllm_config)
        if worker.rank == 0 and worker.should_log("plans"):
            startup_log.log_plans(vllm_config, worker.resolved, thresholds)
        sparse_layers = {number for number, reason in reasons.items() if reason is None}
        return AdoptedLayers(
            numbers=numbers,
            worker=worker,
            memory=memory,
            thresholds=thresholds,
            is_first_group=min(sparse_layers) in numbers,
        )

    def _make_ready(self, impls: Sequence[SparsePrefillImpl], worker: Worker) -> None:
        """Check the cache's layout on a CPU; elsewhere choose engines and compile kernels."""
        spec = self._group.cache_spec
        if compat.IS_CPU:
            compat.check_cpu_layout(self._group.cpu_isa, spec)
            return
        from vllm_sparse_backend.serving.worker.warmup import warm_up

        capability = compat.device_capability()
        status = None if capability is None else status_note(capability)
        for line in (status, slow_path(spec.block_size, capability), self._other_decode(impls[0])):
            if line is not None and worker.should_log(line):
                logger.warning("sparse-prefill: %s", line)
        order = compat.page_order(self._group.vllm_config)
        warm_up(impls, spec, self._group.device, worker.resolved.config.engine, order, compat.gather_over_ranks)

    def _other_decode(self, impl: SparsePrefillImpl) -> str | None:
        """Return why decodes of the group run on a different backend than in stock vLLM; None if they do not."""
        vllm_config = self._group.vllm_config
        stock = compat.stock_backend(
            vllm_config,
            self._group.cache_spec.head_size,
            vllm_config.model_config.dtype,
            impl.kv_cache_dtype,
            has_sink=impl.sinks is not None,
        )
        return other_decode(stock, compat.DenseBackend.get_name())

    def _thresholds(self, impls: Sequence[SparsePrefillImpl], worker: Worker) -> dict[str, Thresholds]:
        """Return the lengths from which rows of each level run sparse on the engines that the layers got."""
        limits = ChunkLimits.of(self._group.vllm_config)
        is_auto = worker.resolved.config.min_query_tokens == AUTO
        by_level = {}
        for level in worker.resolved.plans:
            engines = {impl.levels[level].layer.engine.name for impl in impls}
            thresholds = worker.resolved.thresholds(level, engines)
            by_level[level] = thresholds.fitted(*limits) if is_auto else thresholds
        return by_level
