# SPDX-License-Identifier: Apache-2.0
"""A chunk's pass through the layers of a prompt, as on a server, for timing against dense attention."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from vllm_sparse_kernels.attention import AttendEngine, AttendSpec, choose_engine
from vllm_sparse_kernels.call import Call
from vllm_sparse_kernels.engine_trial import Batch
from vllm_sparse_kernels.layer import Layer, LayerPlan


def with_engine(layer: Layer, call: Call, engines: Mapping[str, AttendEngine]) -> Layer:
    """Return the layer with the attention engine that a server would use."""
    spec = AttendSpec.of(call.cache, call.index, layer.options)
    return replace(layer, engine=choose_engine(engines.values(), spec).engine)


@dataclass
class TimedLayer:
    """One layer's part of a pass: its chunk, the layer as a server would run it, and its output."""

    batch: Batch
    served: Layer
    call: Call
    out: torch.Tensor

    @staticmethod
    def of(batch: Batch, plan: LayerPlan, engines: Mapping[str, AttendEngine]) -> "TimedLayer":
        """Prepare a layer's chunk for attention on one of the device's engines."""
        served = Layer.of(plan, batch.cache.head_dim, batch.q.device)
        call = served.new_call(batch.q, batch.cache, batch.rows, batch.scale)
        return TimedLayer(batch, with_engine(served, call, engines), call, batch.empty_out())

    def select(self) -> None:
        self.served.select(self.call)

    def attend(self) -> None:
        self.served.attend(self.call, self.out)
