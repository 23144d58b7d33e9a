# SPDX-License-Identifier: Apache-2.0
"""What selection and attention of one head take on this device, method by method: what searches weigh error against.

Heads of a layer that are selected together (``Method.group_key``: a *kind* of method) share what their selection takes
whatever their number. So a kind has three costs: of its selection on any heads at all, of each head more, and of
attention to all pairs, of which a head pays the share that it keeps. They are measured once, on the first layer that
can go sparse, and written down: searches that read the same file of costs decide alike.

Without a CUDA device references select and attend, whose times say nothing of a server's: costs are then estimates, by
kept pairs and what methods say of themselves (``MethodSpec.cost``).
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
"""Of one channel: FlashAttention-3 on an H200."""


@dataclass(frozen=True)
class Cost:
    """Of one kind of method, on one layer and all served chunks of the first prompt."""

    group_ms: float
    """Selection, whatever the number of heads."""
    head_ms: float
    """Selection of each of them."""
    full_ms: float
    """Attention of a head to every pair."""


@dataclass(frozen=True)
class LayerCost:
    """Whatever methods a layer's heads have."""

    base_ms: float
    """Attention to next to nothing."""
    dense_ms: float
    """The whole layer by the dense backend."""


class Costs(Protocol):
    def of(self, method: Method) -> Cost: ...

    @property
    def layer(self) -> LayerCost: ...


@lru_cache(maxsize=4096)
def kind_of(method: Method) -> Method:
    """Equal for methods that a layer selects together."""
    return method.group_key


@lru_cache(maxsize=4096)
def _name(method: Method) -> str:
    return describe(kind_of(method))


def head_ms(costs: Costs, method: Method, density: float) -> float:
    """What one head more of its kind takes."""
    cost = costs.of(method)
    return cost.head_ms + density * cost.full_ms


@dataclass(frozen=True)
class EstimatedCosts:
    """By pairs, and the share of dense attention's time that a selection takes by its method's description."""

    num_heads: int
    full_ms: float = 1.0
    """Of a head's attention to all pairs."""
    selects: bool = True
    """False: kept pairs are all that counts, for searches of what is sparsest, on no device in particular."""

    def of(self, method: Method) -> Cost:
        # A third of what a selection takes does not depend on the number of heads.
        selection = METHODS[name_of(method)].cost * self.full_ms * self.selects
        return Cost(self.num_heads * selection / 3, selection * 2 / 3, self.full_ms)

    @property
    def layer(self) -> LayerCost:
        return LayerCost(0.0, self.num_heads * self.full_ms)


@dataclass
class SavedCosts:
    """What a file of costs holds."""

    layer: LayerCost | None
    kinds: dict[str, Cost]


class MeasuredCosts:
    """Times of a CUDA device, each measured when it is first asked for, and kept in a file.

    ``batches`` gives the served chunks of the layer that they are measured on. The file lies in a job's folder, and is
    of that job.
    """

    def __init__(self, card: Card, path: Path, batches: Callable[[], Sequence[Batch]]) -> None:
        self.card, self.path, self.batches = card, path, batches
        self.known: SavedCosts = read_json(path, SavedCosts) if path.exists() else SavedCosts(None, {})

    def of(self, method: Method) -> Cost:
        if (name := _name(method)) not in self.known.kinds:
            self.known.kinds[name] = self._measure(method, self.batches())
            write_json(self.path, asdict(self.known))
        return self.known.kinds[name]

    @property
    def layer(self) -> LayerCost:
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
        # What is next to nothing has no rate of its own; none is faster than dense attention's.
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
        """Medians; nothing is kept from one pass to the next."""

        def new_pass() -> None:
            for batch in batches:
                batch.rows.state.clear()

        return {name: median(ms) for name, ms in self.card.spans_ms(contestants, new_pass, budget_s=0.0).items()}


def _layers(batches: Sequence[Batch], methods: Sequence[Method]) -> list[TimedLayer]:
    return [TimedLayer.of(batch, layer_plan(methods), AUTO) for batch in batches]


def _alone(layer: TimedLayer, method: Method) -> TimedLayer:
    """The same layer, of which the first head alone selects: it has room for all heads."""
    head = layer.served.head_ids[0][:1]
    engine = choose_select_engine(SelectSpec(method, head.device, layer.batch.cache.head_dim)).engine
    served = replace(layer.served, groups=layer_plan([method]), head_ids=(head,), select_engines=(engine,))
    return replace(layer, served=served)


def _rounded(ms: float) -> float:
    return float(f"{ms:.3g}")
