# SPDX-License-Identifier: Apache-2.0
"""Time of one head's selection and attention on this device, by method. Searches weigh it against the error.

Heads of a layer that the same kernels select together (a *kind* of method, ``kind_of``) share a fixed time of their
selection. A kind therefore has three costs: a fixed cost of its selection, its selection for each head, and attention
to all pairs. Of the last cost, a head pays the share of pairs that it keeps. The costs are measured once, on the first
layer that can run sparse, and saved: searches that read the same file of costs make the same decisions.

Without a CUDA device, the references select and attend. Their times do not represent a server, so costs are then
estimated from kept pairs and the relative cost in each method's description (``MethodSpec.cost``).
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from vllm_sparse_backend.calibration.external import read_json
from vllm_sparse_backend.config.method_parameters import describe
from vllm_sparse_backend.config.settings import AUTO
from vllm_sparse_backend.evaluation.cuda_device import Card
from vllm_sparse_backend.evaluation.layer_timing import TimedLayer
from vllm_sparse_backend.evaluation.report import write_json
from vllm_sparse_kernels.engine_trial import Batch
from vllm_sparse_kernels.index import causal_pairs
from vllm_sparse_kernels.layer import layer_plan
from vllm_sparse_kernels.methods import METHODS, name_of
from vllm_sparse_kernels.methods.base import Method
from vllm_sparse_kernels.methods.dense.method import Dense
from vllm_sparse_kernels.methods.minference.a_shape import AShape
from vllm_sparse_kernels.selection.engine import SelectSpec, choose_select_engine

PAIR_MS = 7.6e-10 / 128
"""Time in ms of attention to one pair, per channel of a head, with FlashAttention-3 on an H200."""


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
class LayerCost:
    """Times of a layer that do not depend on its heads' methods."""

    base_ms: float
    """Attention time of a layer that keeps almost nothing, in ms."""
    dense_ms: float
    """Dense attention time of the whole layer, in ms."""


class Costs(Protocol):
    """Source of the times that a search weighs."""

    def of(self, method: Method) -> Cost:
        """Return the times of a method's kind."""

    @property
    def layer(self) -> LayerCost:
        """Times in ms of a layer that do not depend on its heads' methods."""


@lru_cache(maxsize=4096)
def kind_of(method: Method) -> Method:
    """Return the key of a method's kind: methods with equal keys are selected together."""
    return method.group_key


@lru_cache(maxsize=4096)
def _name(method: Method) -> str:
    return describe(kind_of(method))


def head_ms(costs: Costs, method: Method, density: float) -> float:
    """Return the time that one more head of a method's kind takes."""
    cost = costs.of(method)
    return cost.head_ms + density * cost.full_ms


@dataclass(frozen=True)
class EstimatedCosts:
    """Costs estimated from the number of pairs and each method's relative cost."""

    num_heads: int
    full_ms: float = 1.0
    """Time in ms of a head's attention to all pairs."""
    selects: bool = True
    """False to count only kept pairs, for device-independent searches for the sparsest methods."""

    def of(self, method: Method) -> Cost:
        """Estimate the times of a method's kind."""
        selection = METHODS[name_of(method)].cost * self.full_ms * self.selects
        # A third of a selection's time does not depend on the number of heads.
        return Cost(self.num_heads * selection / 3, selection * 2 / 3, self.full_ms)

    @property
    def layer(self) -> LayerCost:
        """Estimated times of a layer: dense attention takes ``full_ms`` for each head."""
        return LayerCost(0.0, self.num_heads * self.full_ms)


@dataclass
class SavedCosts:
    """Contents of a file of measured costs."""

    layer: LayerCost | None
    kinds: dict[str, Cost]


class MeasuredCosts:
    """Times on a CUDA device, each measured when it is first needed and saved in a file.

    ``batches`` returns the served chunks of the layer to measure on. The file is in a job's folder and is valid
    for that job only.
    """

    def __init__(self, card: Card, path: Path, batches: Callable[[], Sequence[Batch]]) -> None:
        self.card, self.path, self.batches = card, path, batches
        self.known: SavedCosts = read_json(path, SavedCosts) if path.exists() else SavedCosts(None, {})

    def of(self, method: Method) -> Cost:
        """Return the times of a method's kind. Unknown times are measured and saved first."""
        if (name := _name(method)) not in self.known.kinds:
            self.known.kinds[name] = self._measure(method, self.batches())
            write_json(self.path, asdict(self.known))
        return self.known.kinds[name]

    @property
    def layer(self) -> LayerCost:
        """Times of the layer, measured and saved first if they are unknown."""
        if self.known.layer is None:
            self.known.layer = self._measure_layer(self.batches())
            write_json(self.path, asdict(self.known))
        return self.known.layer

    def _measure(self, method: Method, batches: Sequence[Batch]) -> Cost:
        num_heads = batches[0].num_heads
        layers = _layers(batches, [method] * num_heads)
        alone = [_alone(layer, method) for layer in layers]
        select, attend = [("select", layer.select) for layer in layers], self._attentions(layers, "attend")
        taken = self._ms(batches, [(*select, *attend), [("alone", layer.select) for layer in alone]])
        kept = sum(int(layer.index.kept_pairs()) for layer in layers)
        density = kept / (num_heads * sum(causal_pairs(batch.rows) for batch in batches))
        head_ms_more = max(0.0, (taken["select"] - taken["alone"]) / max(1, num_heads - 1))
        full = max(0.0, taken["attend"] - self.layer.base_ms) / (density * num_heads)
        # A rate measured on very few pairs is meaningless. No rate is higher than that of dense attention.
        full = full if isinstance(method, Dense) else max(full, self.of(Dense()).full_ms)
        return Cost(*map(_rounded, (max(0.0, taken["select"] - num_heads * head_ms_more), head_ms_more, full)))

    def _measure_layer(self, batches: Sequence[Batch]) -> LayerCost:
        plain = _layers(batches, [AShape(sink_tokens=64, local_tokens=128)] * batches[0].num_heads)
        for layer in plain:
            layer.select()
        dense = [("dense", self.card.dense(batch, batch.empty_out())) for batch in batches]
        taken = self._ms(batches, [self._attentions(plain, "plain"), dense])
        return LayerCost(_rounded(taken["plain"]), _rounded(taken["dense"]))

    def _attentions(self, layers: Sequence[TimedLayer], name: str) -> list[Any]:
        return [(name, partial(layer.attend, layer.engine(self.card.engines))) for layer in layers]

    def _ms(self, batches: Sequence[Batch], contestants: Sequence[Sequence[Any]]) -> dict[str, float]:
        """Return the median time by name. Each pass starts without state."""

        def new_pass() -> None:
            for batch in batches:
                batch.rows.state.clear()

        return {name: median(ms) for name, ms in self.card.spans_ms(contestants, new_pass, budget_s=0.0).items()}


def _layers(batches: Sequence[Batch], methods: Sequence[Method]) -> list[TimedLayer]:
    return [TimedLayer.of(batch, layer_plan(methods), AUTO) for batch in batches]


def _alone(layer: TimedLayer, method: Method) -> TimedLayer:
    """Return the layer with selection for the first head only. Its index still has room for all heads."""
    spec = SelectSpec(method, layer.batch.q.device, layer.batch.cache.head_dim)
    engine = choose_select_engine(spec).engine
    served = replace(layer.served, plan=layer_plan([method]), select_engines=(engine,))
    return replace(layer, served=served)


def _rounded(ms: float) -> float:
    return float(f"{ms:.3g}")
