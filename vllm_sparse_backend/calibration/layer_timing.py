# SPDX-License-Identifier: Apache-2.0
"""A chunk's pass through the layers of a prompt, as on a server, for timing against dense attention."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from vllm_sparse_kernels import AttendOptions, SparseIndex, layer as layers
from vllm_sparse_kernels.attention import AttendEngine, AttendSpec, choose_engine
from vllm_sparse_kernels.engine_trial import Batch
from vllm_sparse_kernels.layer import LayerPlan


@dataclass
class TimedLayer:
    """One layer's part of a pass: its chunk, its plan, its index and its output."""

    batch: Batch
    served: layers.Layer
    index: SparseIndex
    out: torch.Tensor

    @staticmethod
    def of(batch: Batch, plan: LayerPlan, engine: str) -> "TimedLayer":
        """Prepare a layer's chunk for attention on the engine named ``engine``."""
        served = layers.Layer.of(plan, batch.cache.head_dim, batch.q.device, engine)
        return TimedLayer(batch, served, served.allocate_index(batch.rows), batch.empty_out())

    @property
    def options(self) -> AttendOptions | None:
        return self.served.options

    def select(self) -> None:
        with self.index.workspace.frame():
            self.served.select(self.batch.call(self.index))

    def attend(self, engine: AttendEngine) -> None:
        served = replace(self.served, engine=engine, by_kernels=True)  # on any device, because this engine is measured
        served.attend(self.batch.call(self.index), self.out)

    def run(self, engine: AttendEngine) -> None:
        self.select()
        self.attend(engine)

    def engine(self, table: Mapping[str, AttendEngine]) -> AttendEngine:
        """Return the engine that a server would use for this layer."""
        return choose_engine(table.values(), AttendSpec.of(self.batch.cache, self.index, self.options)).engine
