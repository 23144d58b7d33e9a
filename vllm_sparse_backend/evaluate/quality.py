"""What methods keep of a captured prompt: selected as the server does it, layer by layer and chunk by chunk.

A server prefills chunk by chunk through all layers, here each layer does all chunks before the next one is read from
disk. That is the same: a method keeps nothing from one chunk to the next, and what it keeps from layer to layer
(``Rows.state``) each chunk has to itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch
import torch.nn.functional as F

from vllm_sparse_backend.evaluate.capture import Capture, LayerTensors
from vllm_sparse_backend.settings.config import AUTO
from vllm_sparse_backend.settings.plan import LayerPlan, Plan, methods_by_head
from vllm_sparse_kernels import PagedCache, Rows, SparseIndex, attend
from vllm_sparse_kernels.index import causal_pairs
from vllm_sparse_kernels.reference.attend import attend as reference_attend
from vllm_sparse_kernels.reference.last_tiles import keep_last_tiles as reference_keep_last_tiles
from vllm_sparse_kernels.rows import ceil_div
from vllm_sparse_kernels.select import METHODS, name_of
from vllm_sparse_kernels.select.base import attend_options
from vllm_sparse_kernels.select.last_tiles import keep_last_tiles
from vllm_sparse_kernels.select.width import index_block_tokens
from vllm_sparse_kernels.testing.oracle import Bound, ExactMass, Tally, exact_masses, tally

PAGE_TOKENS = 128


@dataclass
class Kept:
    """What one plan keeps of each layer."""

    recall: list[list[float]] = field(default_factory=list)
    """Per layer and query head."""
    density: list[list[float]] = field(default_factory=list)
    output_error: list[float] = field(default_factory=list)
    """Per layer ‖O − Õ‖₂ / ‖O‖₂ over all heads and tokens, Õ being the sparse output; empty if it was not asked for."""

    @property
    def mean_recall(self) -> float:
        return _mean(self.layer_recall)

    @property
    def mean_density(self) -> float:
        return _mean([_mean(heads) for heads in self.density])

    @property
    def layer_recall(self) -> list[float]:
        return [_mean(heads) for heads in self.recall]

    @property
    def mean_error(self) -> float:
        return _mean(self.output_error)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


@dataclass(frozen=True)
class Asked:
    """One plan to be measured. Layers that it runs dense count with a recall and a density of 1."""

    plan: Plan
    with_output: bool = False
    """Attend too, and compare with dense attention."""


@dataclass(frozen=True)
class Measured:
    """``kept[i]`` belongs to the i-th plan; ``bounds[n]`` is what the best blocks of n keys could have had."""

    layers: list[int]
    kept: list[Kept]
    bounds: dict[int, Bound]


def measure_plans(
    captured: Capture,
    asked: Sequence[Asked],
    chunk_tokens: int,
    device: str = "cpu",
    bounds: Sequence[int] = (1, 64, 128),
) -> Measured:
    """Recall, density and, where asked for, output error of every plan, on one captured prompt.

    On a CUDA device methods select by their kernels, elsewhere by their references, as on a server.
    """
    measured = Measured(sorted(captured.scales), [Kept() for _ in asked], {n: Bound(n) for n in bounds})
    chunks = chunk_rows(captured.num_tokens, chunk_tokens, torch.device(device))
    # Each plan has rows of its own: their state goes with a pass through the layers.
    rows_of = [[Rows(r.tokens, r.query_lens, r.context_lens, r.block_table) for r in chunks] for _ in asked]
    for layer in measured.layers:
        tensors, scale = captured.read(layer, device), captured.scales[layer]
        step = _Layer(tensors, scale, chunks, any(a.with_output for a in asked))
        for mass in (mass for masses in step.masses for mass in masses):
            for bound in measured.bounds.values():
                bound.add(mass)
        for one, rows, kept in zip(asked, rows_of, measured.kept, strict=True):
            step.measure(one, one.plan.layer(layer), rows, kept)
    return measured


def chunk_rows(num_tokens: int, chunk_tokens: int, device: torch.device) -> list[Rows]:
    """The steps in which a server prefills the prompt, its pages in order."""
    table = torch.arange(ceil_div(num_tokens, PAGE_TOKENS), dtype=torch.int32, device=device)[None]
    return [
        Rows((0,), (min(chunk_tokens, num_tokens - start),), (start,), table)
        for start in range(0, num_tokens, chunk_tokens)
    ]


class _Layer:
    """One layer's tensors, cache and exact attention."""

    def __init__(self, tensors: LayerTensors, scale: float, chunks: list[Rows], with_output: bool) -> None:
        self.scale = scale
        self.cache = PagedCache(paged(tensors.k), paged(tensors.v))
        self.queries = [tensors.q[rows.context_lens[0] : rows.seq_lens[0]] for rows in chunks]
        self.masses: list[list[ExactMass]] = [
            list(exact_masses(q, self.cache, rows, scale)) for q, rows in zip(self.queries, chunks, strict=True)
        ]
        self.dense = dense_attention(tensors, scale) if with_output else None

    def measure(self, asked: Asked, groups: LayerPlan | None, chunks: list[Rows], kept: Kept) -> None:
        num_heads = self.queries[0].shape[1]
        if groups is None:
            kept.recall.append([1.0] * num_heads)
            kept.density.append([1.0] * num_heads)
            kept.output_error += [0.0] * asked.with_output
            return
        counted: Tally | None = None
        outputs: list[torch.Tensor] = []
        options = attend_options(methods_by_head(groups), self.cache.keys.device)
        for q, masses, rows in zip(self.queries, self.masses, chunks, strict=True):
            index = select_layer(groups, q, self.cache, rows, self.scale)
            for mass in masses:
                part = tally(index, mass)
                counted = part if counted is None else counted.plus(part)
            if asked.with_output:
                outputs.append(torch.empty_like(q))
                run = attend if q.is_cuda else reference_attend
                run(q, self.cache, index, outputs[-1], self.scale, options=options)
        assert counted is not None
        quality = counted.quality(sum(causal_pairs(rows) for rows in chunks))
        kept.recall.append(quality.recall.tolist())
        kept.density.append(quality.density.tolist())
        if self.dense is not None and outputs:
            dense = self.dense.float()
            kept.output_error.append(float((torch.cat(outputs).float() - dense).norm() / dense.norm()))


def select_layer(groups: LayerPlan, q: torch.Tensor, cache: PagedCache, rows: Rows, scale: float) -> SparseIndex:
    """What the groups of one layer select, as the attention layer in the server does it."""
    index = layer_index(groups, q, cache, rows)
    fill_index(groups, q, cache, index, scale)
    return index


def layer_index(groups: LayerPlan, q: torch.Tensor, cache: PagedCache, rows: Rows, engine: str = AUTO) -> SparseIndex:
    """Room for what the groups of one layer select, as in a server that is asked for this engine."""
    block_tokens = index_block_tokens(methods_by_head(groups), cache.head_dim, q.device, engine)
    layouts = {}
    for group in groups:
        layouts.update(dict.fromkeys(group.heads, group.method.stripe_layout(rows)))
    return SparseIndex.allocate(rows, q.shape[1], block_tokens, layouts)


def fill_index(groups: LayerPlan, q: torch.Tensor, cache: PagedCache, index: SparseIndex, scale: float) -> None:
    """Select for all heads of a layer. On a CUDA device nothing here waits for it."""
    for group in groups:
        heads = _head_ids(group.heads, q.device)
        if q.is_cuda:
            group.method.select(q, cache, index, heads, scale)
        else:
            METHODS[name_of(group.method)].reference(group.method, q, cache, index, heads, scale)
    dense_last = tuple(head for head, method in enumerate(methods_by_head(groups)) if method.dense_last_tile)
    if dense_last:
        keep = keep_last_tiles if q.is_cuda else reference_keep_last_tiles
        keep(index, _head_ids(dense_last, q.device))


@lru_cache(maxsize=1024)
def _head_ids(heads: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """int32, copied to the device once: a copy in each step would wait for it."""
    return torch.tensor(heads, dtype=torch.int32, device=device)


def dense_attention(tensors: LayerTensors, scale: float) -> torch.Tensor:
    """Causal attention over all keys: [num_tokens, num_heads, head_dim]."""
    q, k, v = (x.transpose(0, 1)[None] for x in tensors)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)


def paged(x: torch.Tensor) -> torch.Tensor:
    """[num_tokens, num_kv_heads, head_dim] as pages; places past the end are NaN."""
    padding = -len(x) % PAGE_TOKENS
    return F.pad(x, (0, 0, 0, 0, 0, padding), value=float("nan")).unflatten(0, (-1, PAGE_TOKENS))
