# SPDX-License-Identifier: Apache-2.0
"""A chunk's pass through the layers of a prompt, as on a server, for timing against dense attention."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from vllm_sparse_kernels import SparseIndex
from vllm_sparse_kernels.attention import AttendEngine, AttendSpec, choose_engine
from vllm_sparse_kernels.engine_trial import Batch
from vllm_sparse_kernels.layer import Layer, LayerPlan


@dataclass
class TimedLayer:
    """One layer's part of a pass: its chunk, its plan, the engine that a server would use, its index and its output."""

    batch: Batch
    served: Layer
    engine: AttendEngine
    index: SparseIndex
    out: torch.Tensor

    @staticmethod
    def of(batch: Batch, plan: LayerPlan, engines: Mapping[str, AttendEngine]) -> "TimedLayer":
        """Prepare a layer's chunk for attention on one of the device's engines."""
        served = Layer.of(plan, batch.cache.head_dim, batch.q.device)
        index = served.allocate_index(batch.rows)
        engine = choose_engine(engines.values(), AttendSpec.of(batch.cache, index, served.options)).engine
        return TimedLayer(batch, served, engine, index, batch.empty_out())

    def select(self) -> None:
        with self.index.workspace.frame():
            self.served.select(self.batch.call(self.index))

    def attend(self) -> None:
        served = replace(self.served, engine=self.engine, by_kernels=True)  # on any device, because it is measured
        served.attend(self.batch.call(self.index), self.out)
