# SPDX-License-Identifier: Apache-2.0
"""Time of one head's selection and attention, by kind of method. Searches weigh it against the error.

Heads of a layer whose methods are of one kind (``Method.group_key``) are selected by the same kernels and share a fixed
time of selection. A kind therefore has three costs: a fixed cost of its selection, its selection for each head, and
attention to all pairs. Of the last cost, a head pays the share of pairs that it keeps.

The device is measured once, on the first layer that can run sparse.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch

from vllm_sparse_backend.calibration.cuda_device import Card, Span
from vllm_sparse_backend.calibration.judge import with_engine
from vllm_sparse_kernels.attention import AttendEngine
from vllm_sparse_kernels.call import Call
from vllm_sparse_kernels.engine_trial import Batch
from vllm_sparse_kernels.index import causal_pairs
from vllm_sparse_kernels.layer import Layer, LayerPlan, layer_plan
from vllm_sparse_kernels.methods.base import Method
from vllm_sparse_kernels.methods.dense.method import Dense
from vllm_sparse_kernels.methods.minference.a_shape import AShape


@dataclass(frozen=True)
class Cost:
    """Times of one kind of method in one layer, over all served chunks of the first prompt."""

    group_ms: float
    """Selection time that does not depend on the number of heads, in ms."""
    head_ms: float
    """Selection time per head, in ms."""
    full_ms: float
    """Attention time of a head over all pairs, in ms."""


@dataclass(frozen=True)
class Costs:
    """Times of a layer on this device."""

    base_ms: float
    """Attention time of a layer that keeps almost nothing, in ms."""
    dense_ms: float
    """Dense attention time of the whole layer, in ms."""
    of: Callable[[Method], Cost]
    """Returns the times of a method's kind."""

    def head_ms(self, method: Method, density: float) -> float:
        """Return the time that one more head of a method's kind takes."""
        cost = self.of(method)
        return cost.head_ms + density * cost.full_ms


@dataclass
class TimedLayer:
    """One layer's part of a pass: its chunk, the layer as a server would run it, the call, and its output."""

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


def measure_costs(card: Card, read_batches: Callable[[], Sequence[Batch]]) -> Costs:
    """Measure the times of a layer; ``read_batches`` returns its served chunks."""
    batches = read_batches()
    plain = _layers(card, batches, AShape(sink_tokens=64, local_tokens=128))
    for layer in plain:
        layer.select()
    dense = [("dense", card.dense(batch, batch.empty_out())) for batch in batches]
    taken = _median_ms(card, batches, [[("plain", layer.attend) for layer in plain], dense])
    # A time per pair measured on very few pairs is meaningless. None is less than that of a layer that keeps all pairs.
    least_full_ms = _measure_kind(card, batches, Dense(), taken["plain"]).full_ms

    measured: dict[Method, Cost] = {}

    def of(method: Method) -> Cost:
        kind = method.group_key
        if kind not in measured:
            cost = _measure_kind(card, read_batches(), method, taken["plain"])
            measured[kind] = replace(cost, full_ms=max(cost.full_ms, least_full_ms))
        return measured[kind]

    return Costs(taken["plain"], taken["dense"], of)


def _measure_kind(card: Card, batches: Sequence[Batch], method: Method, base_ms: float) -> Cost:
    num_heads = batches[0].num_heads
    layers = _layers(card, batches, method)
    select = [("select", layer.select) for layer in layers]
    attend = [("attend", layer.attend) for layer in layers]
    # Selection for the first head only. The index still has room for all heads.
    one_head = layer_plan([method])
    alone = [("alone", replace(layer, served=replace(layer.served, plan=one_head)).select) for layer in layers]
    taken = _median_ms(card, batches, [[*select, *attend], alone])
    kept_pairs = sum(int(layer.call.index.kept_pairs()) for layer in layers)
    density = kept_pairs / (num_heads * sum(causal_pairs(batch.rows) for batch in batches))
    head_ms = max(0.0, (taken["select"] - taken["alone"]) / max(1, num_heads - 1))
    group_ms = max(0.0, taken["select"] - num_heads * head_ms)
    return Cost(group_ms, head_ms, max(0.0, taken["attend"] - base_ms) / (density * num_heads))


def _median_ms(card: Card, batches: Sequence[Batch], contestants: Sequence[Sequence[Span]]) -> dict[str, float]:
    """Return the median time by name. Each pass starts without state."""

    def new_pass() -> None:
        for batch in batches:
            batch.rows.state.clear()

    return {name: median(ms) for name, ms in card.spans_ms(contestants, new_pass).items()}


def _layers(card: Card, batches: Sequence[Batch], method: Method) -> list[TimedLayer]:
    return [TimedLayer.of(batch, layer_plan([method] * batch.num_heads), card.engines) for batch in batches]
