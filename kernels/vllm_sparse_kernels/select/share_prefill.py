"""SharePrefill: the pattern of one head, computed densely, serves the similar heads of this and later layers.

"Accelerating Prefilling for Long-Context LLMs via Sparse Pattern Sharing" (arXiv:2505.19578). Heads are clustered
offline; the clusters come with the profile. Per row, heads in order (Algorithms 1 to 4):

* estimate: the last queries' scaled QK averaged over each key block, softmax over blocks (Algorithm 3, line 3);
* a head that is highly sparse, sqrt(JSD) to the uniform distribution at least δ, or in no cluster takes FlexPrefill's
  vertical-slash (Algorithm 5);
* the first other head of a cluster is the pivot. It is computed densely, and its map of block-averaged QK, softmaxed,
  gives the pattern: the fewest blocks that hold γ of the map's mass (Algorithm 2);
* a later head of the cluster takes the pivot's pattern if sqrt(JSD) between the two estimates is under τ, else
  vertical-slash.

Which head becomes a pivot depends on the data, and so differs from row to row. All of it is decided on the device.

How this reads the paper:

* The paper averages QK before the softmax. Such averages follow from mean queries and mean keys (block_average.py):
  the map needs nothing from the attention kernel. On a trained model (8K tokens, γ = 0.9) patterns from it held a
  recall of 0.91 at density 0.24, those from the exact block mass 0.91 at 0.22. On the diagonal, averages run over the
  pairs that the causal mask leaves.
* The map's rows are tiles of 128 queries, its columns blocks of ``index.block_tokens`` keys. The estimate takes the
  chunk's last 128 queries, for pivots too, so that equal heads have equal estimates at any chunk length.
* JSD is taken with the natural logarithm, as in the authors' code. Blocks tied at the threshold are all kept.
* With δ = 0 or τ = 0 nothing could be shared, and no pivot is computed.
* Heads of the pivot's own layer may share its pattern: the map does not wait for the attention. (The authors' code
  builds patterns after the layer, from block-averaged probabilities; there, only later layers share.)
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, NamedTuple, Self, TypeVar

import torch
import triton
import triton.language as tl

from vllm_sparse_kernels.index import LayerShape, SparseIndex, StripeLayout
from vllm_sparse_kernels.paged import PagedCache
from vllm_sparse_kernels.rows import ROW_FIELDS, TILE_FIELDS, Rows, to_device
from vllm_sparse_kernels.select.base import Method, require
from vllm_sparse_kernels.select.block_average import BlockAverages, Spans, divergence
from vllm_sparse_kernels.select.flex_vertical_slash import FlexVerticalSlash
from vllm_sparse_kernels.select.footprint import averaged_bytes
from vllm_sparse_kernels.select.lists import CHUNK_BLOCKS, append, tile_blocks
from vllm_sparse_kernels.select.radix import (
    CHUNK,
    MASS_PASSES,
    Digits,
    keep_state,
    mass_keys,
    masses_by_digit,
    num_chunks,
    room_for_digits,
    span_of,
    store_weights,
    threshold_of,
)

VERTICAL_SLASH, SHARED, DENSE = 0, 1, 2
"""What a head of a row attends to: its own vertical-slash lines, its cluster's pattern, or everything (the pivot)."""

NOISE = -1
"""Cluster id of heads that are like no other."""

State = TypeVar("State")


@dataclass(frozen=True)
class SharePrefill(Method):
    """δ, τ, γ of the paper, and the cluster of a head as the profile knows it.

    Heads of a layer depend on each other: the ``SharePrefillLayer`` that ``merged`` makes selects them together.
    """

    max_sparsity: float = 0.3  # δ: heads at least that far from uniform share nothing
    max_distance: float = 0.2  # τ: heads at least that far from their pivot do not take its pattern
    gamma: float = 0.9  # γ: the share of the mass that patterns, columns and diagonals hold
    cluster: int = NOISE

    def __post_init__(self) -> None:
        require(self.max_sparsity >= 0, "max_sparsity", self.max_sparsity, "a number >= 0 (δ)")
        require(self.max_distance >= 0, "max_distance", self.max_distance, "a number >= 0 (τ)")
        require(0 < self.gamma <= 1, "gamma", self.gamma, "a share in (0, 1] (γ)")
        require(self.cluster >= NOISE, "cluster", self.cluster, f"a cluster's number >= 0, or {NOISE} for noise")

    @property
    def alike(self) -> "SharePrefill":
        return SharePrefill(self.max_sparsity, self.max_distance, self.gamma)

    @classmethod
    def merged(cls, methods: Sequence[Self]) -> "SharePrefillLayer":
        first, clusters = methods[0].alike, tuple(m.cluster for m in methods)
        require(all(m.alike == first for m in methods), "methods", methods, "equal thresholds")
        return SharePrefillLayer(first.max_sparsity, first.max_distance, first.gamma, clusters=clusters)

    @property
    def alone(self) -> "SharePrefill":
        """Noise: the only head of its cluster would be a pivot, computed densely, whose pattern nobody takes."""
        return self.alike

    @classmethod
    def objection(cls, methods: Sequence[Self]) -> str | None:
        members = Counter(m for m in methods if m.shares(m.clusters_of_heads))
        if any(count > 1 for count in members.values()):
            return None
        return (
            "share_prefill: no two heads can share a pattern, and without that it is flex_vertical_slash: expected a "
            "profile that gives alike heads the same cluster, and thresholds above 0; or method flex_vertical_slash"
        )

    @classmethod
    def summary(cls, methods: Sequence[Self]) -> dict[str, object]:
        fields = {name: value for name, value in asdict(methods[0].alike).items() if name != "cluster"}
        members = Counter(c for m in methods for c in m.clusters_of_heads if c != NOISE)
        return fields | {"clusters": len(members), "clustered_heads": members.total()}

    @property
    def clusters_of_heads(self) -> tuple[int, ...]:
        """The cluster of each head that this method is for."""
        return (self.cluster,)

    @property
    def fallback(self) -> FlexVerticalSlash:
        return FlexVerticalSlash(gamma=self.gamma)

    def stripe_layout(self, rows: Rows) -> StripeLayout:
        return self.fallback.stripe_layout(rows)

    def workspace_bytes(self, rows: Rows, shape: LayerShape, num_selected: int, stripe_capacity: int) -> int:
        lines = super().workspace_bytes(rows, shape, num_selected, stripe_capacity)
        return max(lines, averaged_bytes(rows, shape, num_selected))

    def clusters_of(self, heads: torch.Tensor) -> tuple[int, ...]:
        """The cluster of each of ``heads``."""
        require(self.cluster == NOISE, "cluster", self.cluster, "clustered heads of a layer merged into one method")
        return (NOISE,) * len(heads)

    def shares(self, clusters: tuple[int, ...]) -> bool:
        """Whether any head could take a pattern. If none could, no pivot is worth its dense attention."""
        return self.max_sparsity > 0 and self.max_distance > 0 and any(c != NOISE for c in clusters)

    def select(self, q: torch.Tensor, cache: PagedCache, index: SparseIndex, heads: torch.Tensor, scale: float) -> None:
        self.clusters_of(heads)
        self.fallback.select(q, cache, index, heads, scale)


@dataclass(frozen=True)
class SharePrefillLayer(SharePrefill):
    """All heads of a layer that share by the same thresholds.

    ``clusters[i]`` is the cluster of the i-th head that ``select`` is given; a cluster has the same id in all layers.
    """

    clusters: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        require(min(self.clusters, default=0) >= NOISE, "clusters", self.clusters, f"ids >= 0, or {NOISE} for noise")

    @property
    def clusters_of_heads(self) -> tuple[int, ...]:
        return self.clusters

    def clusters_of(self, heads: torch.Tensor) -> tuple[int, ...]:
        expected = f"one id for each of the {len(heads)} heads"
        require(len(self.clusters) == len(heads), "clusters", self.clusters, expected)
        return self.clusters

    def state_of_step(self, rows: Rows, kind: str, make: Callable[[], State]) -> State:
        """What layers keep for later ones, made by the first of them. Heads with other thresholds share nothing."""
        key = (kind, self.alike)
        if key not in rows.state:
            rows.state[key] = make()
        return rows.state[key]

    def select(self, q: torch.Tensor, cache: PagedCache, index: SparseIndex, heads: torch.Tensor, scale: float) -> None:
        clusters = self.clusters_of(heads)
        if not self.shares(clusters):
            self.fallback.select(q, cache, index, heads, scale)
            return
        pivots = self.state_of_step(index.rows, "pivots", lambda: Pivots(index))
        in_layer = sorted(set(clusters) - {NOISE})
        places = _on_device(tuple(NOISE if c == NOISE else in_layer.index(c) for c in clusters), index.rows.device)
        slots = _on_device(pivots.slots_of(in_layer, index), index.rows.device)
        with index.workspace.frame():
            averages = BlockAverages(q, cache, index, heads, scale, pivots.spans)
            estimates, sparsity = averages.estimates()
            patterns, new_pivots = _decide(self, pivots, index, estimates, sparsity, places, slots)
            maps = averages.maps(new_pivots)
            digits = _map_digits(self, pivots, index, maps, new_pivots)
            _apply_patterns(self, pivots, index, heads, estimates, maps, digits, patterns, new_pivots, places, slots)
            self.fallback.select_where(q, cache, index, heads, scale, patterns)


@lru_cache(maxsize=4096)
def _on_device(values: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return to_device(values, torch.int32, device)


class Pivots:
    """The pivots of one forward pass, by slot and row. A cluster gets its slot in the first layer that has it."""

    def __init__(self, index: SparseIndex) -> None:
        self.spans = Spans.of(index)
        self.slots: dict[int, int] = {}
        device = index.rows.device
        self.exists = torch.empty(0, index.rows.num_rows, dtype=torch.int32, device=device)
        self.last_rows = torch.empty(0, self.spans.num_blocks, dtype=torch.float32, device=device)  # ã
        self.kept = torch.empty(0, index.block_ids.shape[1], dtype=torch.uint8, device=device)  # M, as block_ids

    def slots_of(self, clusters: list[int], index: SparseIndex) -> tuple[int, ...]:
        """The slots of ``clusters``, making room for the new ones. Host and device both know without asking."""
        given, expected = (index.block_ids.shape[1], index.block_tokens), (self.kept.shape[1], self.spans.block_tokens)
        require(given == expected, "index", given, f"the capacity and block size of the layers before: {expected}")
        num_before = len(self.slots)
        for cluster in clusters:
            self.slots.setdefault(cluster, len(self.slots))
        if num_new := len(self.slots) - num_before:
            self.exists, self.last_rows, self.kept = (
                torch.cat((x, x.new_zeros(num_new, x.shape[1]))) for x in (self.exists, self.last_rows, self.kept)
            )
        return tuple(self.slots[c] for c in clusters)


def _decide(
    method: SharePrefill,
    pivots: Pivots,
    index: SparseIndex,
    estimates: torch.Tensor,
    sparsity: torch.Tensor,
    places: torch.Tensor,
    slots: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Algorithm 3: (pattern [heads, num_rows], new pivots [clusters of the layer, num_rows]), int32 each.

    places [heads] is each head's cluster among those of the layer, slots [clusters of the layer] their slots in
    ``pivots``. A new pivot is named by its place in heads; −1 if a cluster gets none here.
    """
    num_heads, num_rows = sparsity.shape
    patterns = index.workspace.empty(num_heads, num_rows, dtype=torch.int32)
    new_pivots = index.workspace.empty(len(slots), num_rows, dtype=torch.int32)
    _decide_kernel[(num_heads, num_rows)](
        estimates, estimates.stride(0), sparsity, places, slots,
        pivots.exists, pivots.last_rows, pivots.last_rows.stride(0), pivots.spans.block_starts, patterns, new_pivots,
        num_heads, num_rows, method.max_sparsity, method.max_distance,
        HEADS=triton.next_power_of_2(num_heads), CHUNK=CHUNK_BLOCKS, SHARED=SHARED, DENSE=DENSE,
    )  # fmt: skip
    return patterns, new_pivots


def _map_digits(
    method: SharePrefill, pivots: Pivots, index: SparseIndex, maps: torch.Tensor, new_pivots: torch.Tensor
) -> Digits:
    """Algorithm 2's threshold, less its last digit, for the rows and clusters that have a new pivot."""
    num_jobs, num_rows = new_pivots.shape
    chunks = num_chunks(pivots.spans.longest_map)
    digits = room_for_digits(index, num_rows, num_jobs, chunks, MASS_PASSES, torch.float32)
    for i in range(MASS_PASSES):
        _map_digits_kernel[(chunks, num_jobs, num_rows)](
            maps, maps.stride(0), new_pivots, pivots.spans.map_starts, method.fallback.kernel_share, digits, chunks,
            PASS=i, CHUNK=CHUNK,
        )  # fmt: skip
    return digits


def _apply_patterns(
    method: SharePrefill,
    pivots: Pivots,
    index: SparseIndex,
    heads: torch.Tensor,
    estimates: torch.Tensor,
    maps: torch.Tensor,
    digits: Digits,
    patterns: torch.Tensor,
    new_pivots: torch.Tensor,
    places: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Write the lists of shared and dense heads, and keep the new pivots' patterns M and estimates ã."""
    rows = index.rows
    spans, share = pivots.spans, method.fallback.kernel_share
    fresh = FreshArgs(maps, spans.map_starts, digits, share, new_pivots, estimates, spans.block_starts)
    _apply_patterns_kernel[(rows.num_tiles, len(heads))](
        patterns, rows.num_rows, places, slots, fresh, maps.stride(0), estimates.stride(0), digits.weights.shape[3],
        pivots.exists, pivots.last_rows, pivots.last_rows.stride(0), pivots.kept, pivots.kept.stride(0),
        heads, rows.tiles, rows.row_table,
        index.block_offsets, index.block_counts, index.block_ids, index.block_ids.stride(0), index.stripe_counts,
        rows.num_tiles, len(slots), BLOCK_N=index.block_tokens, CHUNK=CHUNK_BLOCKS, CHUNK_MAP=CHUNK,
        FIELDS=TILE_FIELDS, ROW_FIELDS=ROW_FIELDS, SHARED=SHARED, DENSE=DENSE, PASS=MASS_PASSES - 1,
    )  # fmt: skip


class FreshArgs(NamedTuple):
    """What this layer's new pivots are known by."""

    maps: Any
    map_starts: Any
    digits: Any
    share: float
    new_pivots: Any
    estimates: Any
    block_starts: Any


@triton.jit(do_not_specialize=["stride", "stride_last", "num_heads", "num_rows"])
def _decide_kernel(
    estimates, stride, sparsity, places, slots, exists, last_rows, stride_last, block_starts, patterns, new_pivots,
    num_heads, num_rows, max_sparsity, max_distance,
    HEADS: tl.constexpr, CHUNK: tl.constexpr, SHARED: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """One (head, row). Where a cluster has no pivot yet, its first head that is not too sparse becomes it."""
    i, i_row = tl.program_id(0), tl.program_id(1)
    place = tl.load(places + i)
    pattern = 0
    if place >= 0:
        slot = tl.load(slots + place).to(tl.int64)
        known = tl.load(exists + slot * num_rows + i_row)
        o_h = tl.arange(0, HEADS)
        b_same = tl.load(places + o_h, mask=o_h < num_heads, other=-1) == place
        b_sparsity = tl.load(sparsity + o_h * num_rows + i_row, mask=b_same, other=float("inf"))
        pivot = tl.min(tl.where(b_sparsity < max_sparsity, o_h, HEADS), 0)
        if tl.min(tl.where(b_same, o_h, HEADS), 0) == i:
            is_new = (known == 0) & (pivot < HEADS)
            tl.store(new_pivots + place * num_rows + i_row, tl.where(is_new, pivot, -1))
        if tl.load(sparsity + i * num_rows + i_row) < max_sparsity:
            if (pivot == i) & (known == 0):
                pattern = DENSE
            else:
                start = tl.load(block_starts + i_row)
                num_blocks = (tl.load(block_starts + i_row + 1) - start).to(tl.int32)
                num_fresh = tl.where(known == 0, num_blocks, 0)  # the pivot's estimate: this layer's, or stored
                num_stored = num_blocks - num_fresh
                mine = estimates + i.to(tl.int64) * stride + start
                fresh = estimates + pivot.to(tl.int64) * stride + start
                stored = last_rows + slot * stride_last + start
                b_sum = tl.zeros([CHUNK], tl.float32)
                for first in range(0, num_blocks, CHUNK):
                    o_n = first + tl.arange(0, CHUNK)
                    b_pivot = tl.load(fresh + o_n, mask=o_n < num_fresh, other=0.0)
                    b_pivot += tl.load(stored + o_n, mask=o_n < num_stored, other=0.0)
                    b_sum += divergence(tl.load(mine + o_n, mask=o_n < num_blocks, other=0.0), b_pivot)
                if tl.sqrt(tl.maximum(tl.sum(b_sum, 0), 0.0)) < max_distance:
                    pattern = SHARED
    tl.store(patterns + i * num_rows + i_row, pattern)


@triton.jit(do_not_specialize=["stride_map", "chunks"])
def _map_digits_kernel(
    maps, stride_map, new_pivots, map_starts, share, digits, chunks, PASS: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """A pass of radix.py over the map of one (cluster of the layer, row) that has a new pivot."""
    i_chunk, place, i_row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if tl.load(new_pivots + place * tl.num_programs(2) + i_row) < 0:
        return
    begin = tl.load(map_starts + i_row)
    length = (tl.load(map_starts + i_row + 1) - begin).to(tl.int32)
    span = span_of(length, CHUNK)
    first, end = i_chunk * span, tl.minimum((i_chunk + 1) * span, length)
    if first >= end:
        return
    i_job = i_row * tl.num_programs(1) + place
    num_jobs = tl.num_programs(1) * tl.num_programs(2)
    prefix = tl.full([], 0, tl.uint32)
    if PASS > 0:
        used = (length + span - 1) // span
        prefix, left, _, _ = threshold_of(digits, PASS - 1, i_job, num_jobs, chunks, used, share, True)
        if i_chunk == 0:
            keep_state(digits, PASS, i_job, num_jobs, prefix, left)
    b_weight = masses_by_digit(maps + place.to(tl.int64) * stride_map + begin, first, end, prefix, PASS)
    store_weights(digits, PASS, i_job, num_jobs, chunks, b_weight)


@triton.jit(
    do_not_specialize=[
        "num_rows", "stride_map", "stride_estimate", "chunks", "stride_last", "stride_kept", "stride_ids", "num_tiles",
        "num_places",
    ]
)  # fmt: skip
def _apply_patterns_kernel(
    patterns, num_rows, places, slots, fresh, stride_map, stride_estimate, chunks,
    exists, last_rows, stride_last, kept, stride_kept, heads, tiles, rows,
    block_offsets, block_counts, block_ids, stride_ids, stripe_counts, num_tiles, num_places,
    BLOCK_N: tl.constexpr, CHUNK: tl.constexpr, CHUNK_MAP: tl.constexpr, FIELDS: tl.constexpr,
    ROW_FIELDS: tl.constexpr, SHARED: tl.constexpr, DENSE: tl.constexpr, PASS: tl.constexpr,
):  # fmt: skip
    i_tile, i = tl.program_id(0), tl.program_id(1)
    i_row = tl.load(tiles + i_tile * FIELDS)
    pattern = tl.load(patterns + i * num_rows + i_row)
    if (pattern != SHARED) & (pattern != DENSE):
        return
    i_head = tl.load(heads + i).to(tl.int64)
    place = tl.load(places + i)
    slot = tl.load(slots + place).to(tl.int64)
    diagonal, num_causal = tile_blocks(tiles, i_tile, BLOCK_N, FIELDS)
    start = tl.load(block_offsets + i_tile)
    flags = kept + slot * stride_kept + start
    target = block_ids + i_head * stride_ids + start
    is_fresh = tl.load(fresh.new_pivots + place * num_rows + i_row) >= 0
    values = fresh.maps + place.to(tl.int64) * stride_map + start
    threshold = 0
    if is_fresh:
        length = (tl.load(fresh.map_starts + i_row + 1) - tl.load(fresh.map_starts + i_row)).to(tl.int32)
        span = span_of(length, CHUNK_MAP)
        threshold = threshold_of(
            fresh.digits, PASS, i_row * num_places + place, num_rows * num_places, chunks,
            (length + span - 1) // span, fresh.share, True,
        )[0].to(tl.int32)  # fmt: skip
    count = 0
    for first in range(0, num_causal, CHUNK):
        o_n = first + tl.arange(0, CHUNK)
        causal = o_n < num_causal
        if is_fresh:
            b_kept = mass_keys(tl.load(values + o_n, mask=causal, other=0.0)) >= threshold
        else:
            b_kept = tl.load(flags + o_n, mask=causal, other=0) != 0
        if pattern == DENSE:
            tl.store(flags + o_n, b_kept.to(tl.uint8), mask=causal)
            b_kept = causal
        count = append(target, count, o_n, causal & (b_kept | (o_n >= diagonal)))
    tl.store(block_counts + i_head * num_tiles + i_tile, count)
    tl.store(stripe_counts + i_head * num_tiles + i_tile, 0)

    # The pivot's last tile, which ends where the row does, keeps the estimate.
    end = tl.load(tiles + i_tile * FIELDS + 3) + tl.load(tiles + i_tile * FIELDS + 2)
    if (pattern == DENSE) & (end == tl.load(rows + i_row * ROW_FIELDS + 2)):
        begin = tl.load(fresh.block_starts + i_row)
        for first in range(0, num_causal, CHUNK):
            o_n = first + tl.arange(0, CHUNK)
            b_a = tl.load(fresh.estimates + i.to(tl.int64) * stride_estimate + begin + o_n, mask=o_n < num_causal)
            tl.store(last_rows + slot * stride_last + begin + o_n, b_a, mask=o_n < num_causal)
        tl.store(exists + slot * num_rows + i_row, 1)
