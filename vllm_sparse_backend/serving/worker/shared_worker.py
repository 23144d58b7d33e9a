# SPDX-License-Identifier: Apache-2.0
"""What the layers of one worker share: settings, arena, counters and guard. The first layer that needs it makes it."""

import torch
from vllm.config import VllmConfig

from vllm_sparse_backend.config.profile import EXACT
from vllm_sparse_backend.serving import compat
from vllm_sparse_backend.serving.resolution import log_other_device, resolve
from vllm_sparse_backend.serving.worker.arena import Memory
from vllm_sparse_backend.serving.worker.counters import Recorder
from vllm_sparse_backend.serving.worker.guard import Guard
from vllm_sparse_backend.serving.worker.step_context import RunnerRequests
from vllm_sparse_kernels.layer import Layer, LayerPlan


class Worker:
    """Groups of layers and microbatches have builders of their own; what is here they have in common."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, memory: Memory | None = None) -> None:
        self.vllm_config, self.device = vllm_config, device
        self.rank, size = compat.tensor_parallel(vllm_config)
        self.resolved = resolve(vllm_config, self.rank, size)
        log_other_device(self.resolved, self.rank)
        # In inference mode, as in the profile run, tensors would be such as nothing outside may write to.
        with torch.inference_mode(False):
            self.recorder = Recorder(device, is_first_rank=self.rank == 0)
        self.memory = memory
        self.guard: Guard | None = None
        self.said: set[str] = set()
        """What the log says once for a worker."""
        self.requests = RunnerRequests({EXACT, *self.resolved.plans})
        self._layers: dict[LayerPlan, Layer] = {}

    def is_of(self, vllm_config: VllmConfig) -> bool:
        """Whether its plans are for that configuration's model."""
        return self.resolved.plan.shape == compat.model_shape(vllm_config)

    def reserve(self) -> Memory | None:
        """The arena, allocated when it is first asked for; None if nothing will ever go sparse here."""
        if self.memory is None and not self.resolved.is_dense:
            self.memory = Memory.reserve(self.vllm_config, self.resolved, self.device, self.rank)
        return self.memory

    def watch_over(self) -> Guard | None:
        """The guard, if the operator asked for it."""
        settings = self.resolved.config.guard
        if settings is not None and self.guard is None:
            self.guard = Guard(settings, self.recorder, self.rank)
        return self.guard

    def layer(self, groups: LayerPlan, head_dim: int) -> Layer:
        """What layers of this plan do; one object for all of them."""
        if groups not in self._layers:
            self._layers[groups] = Layer.of(groups, head_dim, self.device, self.resolved.config.engine)
        return self._layers[groups]

    def says(self, line: str) -> bool:
        """Whether a line is still to be logged: of each one the first time."""
        is_new = line not in self.said
        self.said.add(line)
        return is_new
