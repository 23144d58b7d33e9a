# SPDX-License-Identifier: Apache-2.0
"""State that the layers of one worker share: settings, arena and counters."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from vllm.config import VllmConfig

from vllm_sparse_backend.calibration.streaming_heads import STREAMING
from vllm_sparse_backend.config.settings import SCORING_METHOD
from vllm_sparse_backend.serving import compat
from vllm_sparse_backend.serving.resolution import log_other_device, resolve
from vllm_sparse_backend.serving.worker.arena import LayerMemory, Memory
from vllm_sparse_backend.serving.worker.counters import Recorder
from vllm_sparse_backend.serving.worker.layer_level import LayerLevel
from vllm_sparse_backend.serving.worker.step_context import RunnerRequests
from vllm_sparse_kernels.layer import Layer, LayerPlan, fits_shared_memory, layer_plan
from vllm_sparse_kernels.methods import name_of


@dataclass(frozen=True)
class StreamingHeads:
    """The streaming heads of a rank by layer, and a fingerprint of those of all ranks."""

    by_layer: Mapping[int, frozenset[int]]
    fingerprint: str

    @property
    def count(self) -> int:
        """Number of streaming heads on this rank."""
        return sum(map(len, self.by_layer.values()))


class Worker:
    """State that the layers of one worker share. Each group of layers and each microbatch has its own builder."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, memory: Memory | None = None) -> None:
        self.vllm_config, self.device = vllm_config, device
        self.rank, size = compat.tensor_parallel(vllm_config)
        self.resolved = resolve(vllm_config, self.rank, size)
        log_other_device(self.resolved, self.rank)
        # The profile run is in inference mode; tensors created in it could not be written to outside of it.
        with torch.inference_mode(False):
            self.recorder = Recorder(device, is_first_rank=self.rank == 0)
        self.memory = memory
        self.requests = RunnerRequests()
        self.streaming: StreamingHeads | None = None
        self._logged: set[str] = set()
        self._layers: dict[tuple[LayerPlan, int | None], Layer] = {}

    def fits(self, vllm_config: VllmConfig) -> bool:
        """Return whether the plans are for this configuration's model."""
        return self.resolved.plan.shape == compat.model_shape(vllm_config)

    def reserve_memory(self) -> Memory | None:
        """Return the arena. The first call allocates it."""
        if self.memory is None and not self.resolved.is_dense:
            # The profile run is in inference mode; tensors created in it could not be written to outside of it.
            with torch.inference_mode(False):
                self.memory = Memory.reserve(
                    self.vllm_config,
                    self._layer_memory(),
                    self.resolved.earliest_thresholds(),
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

    def layer_levels(self, number: int, plans: Sequence[LayerPlan], head_dim: int) -> dict[str, LayerLevel]:
        """Return a layer's methods and engines at each level."""
        return {
            level: LayerLevel(
                self.layer(of_level, head_dim),
                stays_dense=plan.layer(number) is None,
                streaming_layer=self._streaming_layer(number, of_level, head_dim),
            )
            for (level, plan), of_level in zip(self.resolved.plans.items(), plans, strict=True)
        }

    def _streaming_layer(self, number: int, plan: LayerPlan, head_dim: int) -> Layer | None:
        """Return a layer whose streaming heads keep only the first and the nearest keys; None if it has none.

        Its index has blocks of the same width as without streaming heads. The other heads thus keep the same keys, and
        the arena has room for it.
        """
        heads = frozenset[int]() if self.streaming is None else self.streaming.by_layer[number]
        scored = {head for head, method in enumerate(plan.methods) if name_of(method) == SCORING_METHOD}
        if not heads & scored:
            return None
        streaming = [STREAMING if head in heads & scored else method for head, method in enumerate(plan.methods)]
        return self.layer(layer_plan(streaming), head_dim, self.layer(plan, head_dim).block_tokens)

    def should_log(self, line: str) -> bool:
        """Return whether to log a line: True only for the first call with the line."""
        is_new = line not in self._logged
        self._logged.add(line)
        return is_new
