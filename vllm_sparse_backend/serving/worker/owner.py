# SPDX-License-Identifier: Apache-2.0
"""``Worker``: the owner of all that the layers, builders and hooks of one of vLLM's workers share.

A hook makes it when vLLM's worker is connected with the others, before the model loads. ``worker_of`` leads to it.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_sparse_backend.config.metrics import METRICS
from vllm_sparse_backend.config.profile import SHARE
from vllm_sparse_backend.config.settings import SCORING_METHOD
from vllm_sparse_backend.serving import compat
from vllm_sparse_backend.serving.resolution import resolve
from vllm_sparse_backend.serving.worker import compile_monitor, startup_log
from vllm_sparse_backend.serving.worker.arena import LayerMemory, Memory
from vllm_sparse_backend.serving.worker.counters import DECODE_ROW, Key, Recorder
from vllm_sparse_backend.serving.worker.rows import BatchRow, Requests, count_decodes
from vllm_sparse_backend.streaming_heads import streaming_method
from vllm_sparse_kernels.layer import Layer, LayerPlan, fits_shared_memory, layer_plan
from vllm_sparse_kernels.methods import name_of


@dataclass(frozen=True)
class LayerLevel:
    """How one attention layer runs the rows of requests at one level."""

    layer: Layer
    stays_dense: bool = False


@dataclass(frozen=True)
class StreamingHeads:
    """The streaming heads of a rank, and a fingerprint of those of all ranks. Empty if none were searched."""

    by_layer: Mapping[int, Mapping[int, int]]
    """By layer, the windows of its streaming heads."""
    fingerprint: str


class Worker:
    """The settings, memory, counters, requests and streaming heads of one of vLLM's workers."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        self.vllm_config = vllm_config
        self.device = compat.current_device()
        self.rank = compat.tensor_parallel_rank()
        self.resolved = resolve(vllm_config, self.rank)
        startup_log.warn_of_other_device(self.resolved, self.rank)
        self.recorder = Recorder(self.device, self.resolved.plan.shape.num_layers, self.resolved.plans)
        self.requests = Requests()
        self.streaming = StreamingHeads({}, "")
        self.memory: Memory | None = None
        self.mla: Any = None
        """State of the prefill backends for multi-head latent attention, which the first of them makes."""
        self.attention_names: dict[int, str] = {}
        """By layer, the engine or backend that computes its prefills."""
        self._sent: Counter[Key] = Counter()
        self._logged: set[str] = set()
        self._layers: dict[tuple[LayerPlan, int | None], Layer] = {}
        _workers[_key(vllm_config)] = self

    def reserve_memory(self) -> Memory | None:
        """Return the arena. The first call allocates it."""
        if self.memory is None:
            # The profile run is in inference mode; tensors created in it could not be written to outside of it.
            with torch.inference_mode(False):
                self.memory = Memory.reserve(
                    self.vllm_config,
                    self._layer_memory(),
                    self.resolved.earliest_lengths(),
                    self.device,
                    self.rank,
                )
        return self.memory

    def _layer_memory(self) -> LayerMemory:
        """Return the layers of this worker at any level, each distinct plan once."""
        model, parallel = self.vllm_config.model_config, self.vllm_config.parallel_config
        head_dim = self.resolved.plan.shape.head_dim
        plans: dict[LayerPlan, None] = {}
        for number in range(*model.get_layers_start_end_indices(parallel)):
            levels = self.resolved.layer(number)
            if all(fits_shared_memory(plan, head_dim, self.device) for plan in levels):
                plans |= dict.fromkeys(levels)
        layers = [self.layer(plan, head_dim) for plan in plans]
        return LayerMemory(layers, model.get_num_kv_heads(parallel), head_dim, model.dtype)

    def layer(self, plan: LayerPlan, head_dim: int, block_tokens: int | None = None) -> Layer:
        """Return the methods and engines of layers with this plan."""
        key = plan, block_tokens
        if key not in self._layers:
            self._layers[key] = Layer.of(plan, head_dim, self.device, self.resolved.config.engine, block_tokens)
        return self._layers[key]

    def layer_levels(self, number: int, head_dim: int) -> dict[str, LayerLevel]:
        """Return a layer's methods and engines at each level."""
        windows = self.streaming.by_layer.get(number, {})
        # A request that sets p gets that share in every head.
        return {
            level: LayerLevel(
                self._with_streaming_heads(of_level, head_dim, {} if level == SHARE else windows),
                stays_dense=plan.layer(number) is None,
            )
            for (level, plan), of_level in zip(self.resolved.plans.items(), self.resolved.layer(number), strict=True)
        }

    def _with_streaming_heads(self, plan: LayerPlan, head_dim: int, windows: Mapping[int, int]) -> Layer:
        """Return a layer in which heads with a window keep only the first and the nearest keys."""
        scoring = self.layer(plan, head_dim)
        methods = tuple(
            streaming_method(windows[head]) if head in windows and name_of(method) == SCORING_METHOD else method
            for head, method in enumerate(plan.methods)
        )
        if methods == plan.methods:
            return scoring
        # The same block width: the other heads keep the same keys, and the arena has room for the index.
        return self.layer(layer_plan(methods), head_dim, scoring.block_tokens)

    def count_rows(self, common: CommonAttentionMetadata, rows: Sequence[BatchRow]) -> None:
        """Count the rows of a batch, which are decodes if ``rows`` is empty. Dummy runs are not counted."""
        if self.rank == 0 and self.requests.is_counted:
            self.recorder.count_rows(Counter(row.kind for row in rows) or {DECODE_ROW: count_decodes(common)})

    def should_log(self, line: str) -> bool:
        """Return whether to log a line: True only for the first call with the line."""
        is_new = line not in self._logged
        self._logged.add(line)
        return is_new

    def new_samples(self) -> dict[str, Any]:
        """Return what this worker counted since its last answer, and its gauges.

        The server calls this by name (``WORKER_METHOD``).
        """
        samples = []
        for key, total in {**self.recorder.samples(), **self._gauges()}.items():
            (name, labels), value = key, total
            if METRICS[name].type == "counter":
                value -= self._sent[key]
                self._sent[key] = total
            samples.append((name, [*labels], float(value)))
        return {"rank": self.vllm_config.parallel_config.rank, "samples": samples}

    def _gauges(self) -> dict[Key, int]:
        gauges: dict[Key, int] = {("compilations", (when,)): n for when, n in compile_monitor.listener().counts.items()}
        if self.rank == 0:
            gauges |= {("layers", (name,)): number for name, number in Counter(self.attention_names.values()).items()}
        gauges["streaming_heads", (self.streaming.fingerprint,)] = sum(map(len, self.streaming.by_layer.values()))
        if self.memory is not None:
            gauges["arena_overflows", ()] = self.memory.arena.overflows
            if self.device.type == "cuda":
                gauges["device_bytes", ()] = torch.cuda.memory_reserved(self.device)
        return gauges


_workers: WeakValueDictionary[int, Worker] = WeakValueDictionary()


def _key(vllm_config: VllmConfig) -> int:
    """Identify a worker's model by vLLM's registry of its layers, which configurations of the model's parts share."""
    return id(vllm_config.compilation_config.static_forward_context)


def worker_of(vllm_config: VllmConfig) -> Worker:
    """Return the owner of the state of the vLLM worker with this configuration, or with a part of its model."""
    worker = _workers.get(_key(vllm_config))
    if worker is None:
        raise RuntimeError(
            "sparse-prefill: given a configuration that no worker of this process has, expected that of a vLLM worker "
            "whose init_device has returned; build layers in vLLM's workers only"
        )
    return worker
