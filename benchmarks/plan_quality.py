# SPDX-License-Identifier: Apache-2.0
"""Recall, density and output error of plans on a captured prompt, with the selection and chunks of a server.

A server prefills chunk by chunk through all layers. Here each layer handles all chunks before the next layer is read
from disk. The result is the same: a method keeps no state between chunks, and each chunk has its own state between
layers (``Rows.state``).
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from benchmarks.oracle import Bound, Tally, exact_masses, tally
from benchmarks.paper_density import paper_density
from vllm_sparse_backend.calibration.capture import Capture, LayerTensors
from vllm_sparse_backend.calibration.prompt_chunks import chunk_rows, dense_attention, paged
from vllm_sparse_backend.config.plan import Plan
from vllm_sparse_kernels import PagedCache, Rows, SparseIndex
from vllm_sparse_kernels.index import causal_pairs
from vllm_sparse_kernels.layer import Layer, LayerPlan, methods_by_head

QUANTILES = (0.01, 0.001, 0.0)
"""Shares of queries with the lowest recall: a hundredth, a thousandth and the worst."""

BINS = 10_000


@dataclass
class PlanQuality:
    """Results of one plan by layer."""

    recall: list[list[float]] = field(default_factory=list)
    """Recall and density per layer and query head."""
    density: list[list[float]] = field(default_factory=list)
    output_error: list[float] = field(default_factory=list)
    """Per layer ‖O − Õ‖₂ / ‖O‖₂ over all heads and tokens, with sparse output Õ; empty if not requested."""
    lowest_recalls: list[list[list[float]]] = field(default_factory=list)
    """Recall of single queries per layer, query head and quantile of ``QUANTILES``; empty if not requested."""
    paper_density: list[list[float | None]] = field(default_factory=list)
    """Density at the paper's granularity, per layer and query head; None if unknown (``paper_density.py``)."""
    recall_counts: torch.Tensor = field(default_factory=lambda: torch.zeros(BINS + 1, dtype=torch.int64))
    """Number of queries of all layers and heads by recall, rounded down."""

    @property
    def mean_recall(self) -> float:
        return _mean(self.layer_recall)

    @property
    def mean_density(self) -> float:
        return _mean([_mean(heads) for heads in self.density])

    @property
    def mean_paper_density(self) -> float | None:
        heads = [density for layer in self.paper_density for density in layer]
        known = [density for density in heads if density is not None]
        return _mean(known) if known and len(known) == len(heads) else None

    @property
    def layer_recall(self) -> list[float]:
        return [_mean(heads) for heads in self.recall]

    @property
    def mean_error(self) -> float:
        return _mean(self.output_error)

    def quantiles(self) -> list[float]:
        """Return the recall at ``QUANTILES`` of the queries of all layers and heads, to a ten-thousandth."""
        up_to = self.recall_counts.cumsum(0)
        ranks = [max(1, math.ceil(q * int(up_to[-1]))) for q in QUANTILES]
        return [int((up_to < rank).sum()) / BINS for rank in ranks]

    def add_queries(self, recalls: torch.Tensor) -> None:
        """Add the recalls of one layer: [num_heads, num_tokens]."""
        ordered = recalls.clamp(0, 1).sort(1).values
        places = [max(0, math.ceil(q * ordered.shape[1]) - 1) for q in QUANTILES]
        self.lowest_recalls.append(ordered[:, places].tolist())
        # Rounding errors of sums do not count as lost recall.
        bins = (ordered * BINS + 1e-2).long().flatten()
        self.recall_counts += torch.bincount(bins, minlength=BINS + 1).cpu()

    def add_dense(self, num_heads: int, num_tokens: int, request: "PlanRequest") -> None:
        """Add a layer that the plan runs dense."""
        self.recall.append([1.0] * num_heads)
        self.density.append([1.0] * num_heads)
        self.output_error += [0.0] * request.with_output
        if request.with_queries:
            self.paper_density.append([1.0] * num_heads)
            self.lowest_recalls.append([[1.0] * len(QUANTILES)] * num_heads)
            self.recall_counts[BINS] += num_heads * num_tokens


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


@dataclass(frozen=True)
class PlanRequest:
    """A plan to measure. Its dense layers count with a recall and a density of 1."""

    plan: Plan
    with_output: bool = False
    """Whether to attend, and to compare with dense attention."""
    with_queries: bool = False
    """Whether to measure the recall of single queries, and density at the paper's granularity."""


@dataclass(frozen=True)
class Measured:
    """Results: ``kept[i]`` of the i-th plan, and ``bounds[n]`` of the best possible blocks of n keys."""

    layers: list[int]
    kept: list[PlanQuality]
    bounds: dict[int, Bound]


def measure_plans(
    captured: Capture,
    requests: Sequence[PlanRequest],
    chunk_tokens: int,
    device: str = "cpu",
    bounds: Sequence[int] = (1, 64, 128),
    min_tokens: int = 0,
) -> Measured:
    """Measure recall, density and the other requested quantities of every plan on one captured prompt.

    As on a server, methods select by kernels on a CUDA device, and by references elsewhere. The first ``min_tokens``
    positions, which are dense, are not measured.
    """
    measured = Measured(sorted(captured.scales), [PlanQuality() for _ in requests], {n: Bound(n) for n in bounds})
    chunks = chunk_rows(captured.num_tokens, chunk_tokens, torch.device(device), min_tokens)
    # Each plan has its own rows, whose state belongs to a pass through the layers.
    rows_of = [[replace(rows) for rows in chunks] for _ in requests]
    for layer in measured.layers:
        tensors, scale = captured.read(layer, device), captured.scales[layer]
        step = _Layer(tensors, scale, chunks, any(a.with_output for a in requests))
        sparse = []
        for request, rows, kept in zip(requests, rows_of, measured.kept, strict=True):
            if (groups := request.plan.layer(layer)) is None:
                kept.add_dense(captured.shape.num_heads, captured.num_tokens, request)
            else:
                sparse.append(_Sparse(request, groups, rows, kept))
        step.measure(sparse, measured.bounds.values())
    return measured


@dataclass
class _Sparse:
    """One plan's part of one layer, with its counts."""

    request: PlanRequest
    groups: LayerPlan
    rows: list[Rows]
    """Rows of each chunk."""
    kept: PlanQuality
    counted: Tally | None = None
    outputs: list[torch.Tensor] = field(default_factory=list)
    recalls: list[torch.Tensor] = field(default_factory=list)


class _Layer:
    """One layer's tensors, cache and exact attention."""

    def __init__(self, tensors: LayerTensors, scale: float, chunks: list[Rows], with_output: bool) -> None:
        self.scale, self.chunks = scale, chunks
        self.cache = PagedCache(paged(tensors.k), paged(tensors.v))
        self.queries = [tensors.q[rows.context_lens[0] : rows.seq_lens[0]] for rows in chunks]
        self.dense = dense_attention(tensors, scale) if with_output else None

    def measure(self, sparse: Sequence[_Sparse], bounds: Iterable[Bound]) -> None:
        for i, q in enumerate(self.queries):
            indices = [select_layer(part.groups, q, self.cache, part.rows[i], self.scale) for part in sparse]
            by_query = [part for part in sparse if part.request.with_queries]
            of_queries = [index for part, index in zip(sparse, indices) if part.request.with_queries]
            for mass in exact_masses(q, self.cache, self.chunks[i], self.scale, of_queries):
                for bound in bounds:
                    bound.add(mass)
                for part, index in zip(sparse, indices, strict=True):
                    counts = tally(index, mass)
                    part.counted = counts if part.counted is None else part.counted.plus(counts)
                for part, recalls in zip(by_query, mass.query_recalls, strict=True):
                    part.recalls.append(recalls)
            for part, index in zip(sparse, indices, strict=True):
                if part.request.with_output:
                    part.outputs.append(self._attend(part, q, index))
        for part in sparse:
            self._write(part)

    def _attend(self, part: _Sparse, q: torch.Tensor, index: SparseIndex) -> torch.Tensor:
        out = torch.empty_like(q)
        Layer.of(part.groups, self.cache.head_dim, q.device).attend(q, self.cache, index, out, self.scale)
        return out

    def _write(self, part: _Sparse) -> None:
        assert part.counted is not None
        pairs = [causal_pairs(rows) for rows in self.chunks]
        quality = part.counted.quality(sum(pairs))
        part.kept.recall.append(quality.recall.tolist())
        part.kept.density.append(quality.density.tolist())
        if self.dense is not None and part.outputs:
            dense = self.dense[self.chunks[0].context_lens[0] :].float()
            part.kept.output_error.append(float((torch.cat(part.outputs).float() - dense).norm() / dense.norm()))
        if part.request.with_queries:
            part.kept.add_queries(torch.cat(part.recalls, 1))
            real = part.kept.density[-1]
            densities = [
                paper_density(method, head, real[head], self.queries, self.cache, self.chunks, self.scale)
                for head, method in enumerate(methods_by_head(part.groups))
            ]
            part.kept.paper_density.append(densities)


@dataclass(frozen=True)
class Selected:
    """Selection of one plan in one layer for one chunk."""

    i_plan: int
    q: torch.Tensor
    cache: PagedCache
    rows: Rows
    scale: float
    groups: LayerPlan | None
    index: SparseIndex | None
    """None, as ``groups``, if the plan runs the layer dense."""


def selections(
    captured: Capture,
    plans: Sequence[Plan],
    chunk_tokens: int,
    device: str,
    num_tokens: int | None = None,
    min_tokens: Sequence[int] | None = None,
) -> Iterator[Selected]:
    """Yield each plan's selections layer by layer, without attention, for the first ``num_tokens`` (or all) past each
    plan's ``min_tokens``."""
    num_tokens, starts = num_tokens or captured.num_tokens, min_tokens or [0] * len(plans)
    chunks = [chunk_rows(num_tokens, chunk_tokens, torch.device(device), start) for start in starts]
    for layer, scale in sorted(captured.scales.items()):
        q, k, v = (x[:num_tokens] for x in captured.read(layer, device))
        cache = PagedCache(paged(k), paged(v))
        for i, plan in enumerate(plans):
            groups = plan.layer(layer)
            for rows in chunks[i]:
                queries = q[rows.context_lens[0] : rows.seq_lens[0]]
                index = None if groups is None else select_layer(groups, queries, cache, rows, scale)
                yield Selected(i, queries, cache, rows, scale, groups, index)


def kept_shares(captured: Capture, plans: Sequence[Plan], *how: Any) -> list[float]:
    """Return each plan's ratio of kept to causal pairs. For the arguments, see ``selections``. Dense layers keep
    all."""
    kept, pairs = [0] * len(plans), [0] * len(plans)
    for selected in selections(captured, plans, *how):
        every = captured.shape.num_heads * causal_pairs(selected.rows)
        kept[selected.i_plan] += every if selected.index is None else int(selected.index.kept_pairs())
        pairs[selected.i_plan] += every
    return [n / total for n, total in zip(kept, pairs, strict=True)]


def select_layer(groups: LayerPlan, q: torch.Tensor, cache: PagedCache, rows: Rows, scale: float) -> SparseIndex:
    """Return the selection of one layer's groups, as on a server."""
    layer = Layer.of(groups, cache.head_dim, q.device)
    index = layer.allocate_index(rows)
    layer.select(q, cache, index, scale)
    return index
