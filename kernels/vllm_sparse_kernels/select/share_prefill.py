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
from typing import Self, TypeVar

import torch
import triton
import triton.language as tl

from vllm_sparse_kernels.index import LayerShape, SparseIndex, StripeLayout
from vllm_sparse_kernels.paged import PagedCache
from vllm_sparse_kernels.rows import TILE_FIELDS, Rows, to_device
from vllm_sparse_kernels.select.base import Method, require
from vllm_sparse_kernels.select.block_average import BlockAverages, Spans
from vllm_sparse_kernels.select.flex_vertical_slash import FlexVerticalSlash, mass_threshold
from vllm_sparse_kernels.select.footprint import averaged_bytes
from vllm_sparse_kernels.select.lists import CHUNK_BLOCKS, append, tile_blocks

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
        self.fallback.select(q, cache, index, heads, scale)
        if not self.shares(clusters):
            return
        pivots = self.state_of_step(index.rows, "pivots", lambda: Pivots(index))
        in_layer = sorted(set(clusters) - {NOISE})
        places = _on_device(tuple(NOISE if c == NOISE else in_layer.index(c) for c in clusters), index.rows.device)
        slots = _on_device(pivots.slots_of(in_layer, index), index.rows.device)
        averages = BlockAverages(q, cache, index, heads, scale, pivots.spans)
        estimates = averages.estimates()
        patterns, new_pivots = _decide(self, pivots, estimates, places, slots)
        _keep_pivots(self, pivots, averages.maps(new_pivots), estimates, new_pivots, slots)
        _apply_pivots(pivots, index, heads, patterns, places, slots)


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
    method: SharePrefill, pivots: Pivots, estimates: torch.Tensor, places: torch.Tensor, slots: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Algorithm 3: (pattern [heads, num_rows], new pivots [clusters of the layer, num_rows]), int32 each.

    places [heads] is each head's cluster among those of the layer, slots [clusters of the layer] their slots in
    ``pivots``. A new pivot is named by its place in heads; −1 if a cluster gets none here.
    """
    num_heads, num_rows = len(estimates), pivots.exists.shape[1]
    sparsity = torch.empty(num_heads, num_rows, dtype=torch.float32, device=estimates.device)
    _sparsity_kernel[(num_heads, num_rows)](
        estimates, estimates.stride(0), pivots.spans.block_starts, sparsity, num_rows, CHUNK=CHUNK_BLOCKS
    )
    patterns = torch.empty(num_heads, num_rows, dtype=torch.int32, device=estimates.device)
    new_pivots = torch.full((len(slots), num_rows), -1, dtype=torch.int32, device=estimates.device)
    _decide_kernel[(num_heads, num_rows)](
        estimates, estimates.stride(0), sparsity, places, slots,
        pivots.exists, pivots.last_rows, pivots.last_rows.stride(0), pivots.spans.block_starts, patterns, new_pivots,
        num_heads, num_rows, method.max_sparsity, method.max_distance,
        HEADS=triton.next_power_of_2(num_heads), CHUNK=CHUNK_BLOCKS, SHARED=SHARED, DENSE=DENSE,
    )  # fmt: skip
    return patterns, new_pivots


def _keep_pivots(
    method: SharePrefill,
    pivots: Pivots,
    maps: torch.Tensor,
    estimates: torch.Tensor,
    new_pivots: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Algorithm 2 for the rows and clusters that have a new pivot; maps [clusters of the layer, block_capacity]."""
    _keep_pivots_kernel[new_pivots.shape](
        maps, maps.stride(0), estimates, estimates.stride(0), new_pivots, slots,
        pivots.exists, pivots.last_rows, pivots.last_rows.stride(0), pivots.kept, pivots.kept.stride(0),
        pivots.spans.block_starts, pivots.spans.map_starts, new_pivots.shape[1], method.fallback.kernel_share,
        CHUNK=8192, num_warps=16,
    )  # fmt: skip


def _apply_pivots(
    pivots: Pivots,
    index: SparseIndex,
    heads: torch.Tensor,
    patterns: torch.Tensor,
    places: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Overwrite the lists of shared and dense heads; the vertical-slash lines of the others stay."""
    rows = index.rows
    _apply_pivots_kernel[(rows.num_tiles, len(heads))](
        patterns, rows.num_rows, places, slots, pivots.kept, pivots.kept.stride(0), heads, rows.tiles,
        index.block_offsets, index.block_counts, index.block_ids, index.block_ids.stride(0), index.stripe_counts,
        rows.num_tiles, BLOCK_N=index.block_tokens, CHUNK=CHUNK_BLOCKS, FIELDS=TILE_FIELDS, SHARED=SHARED, DENSE=DENSE,
    )  # fmt: skip


@triton.jit
def _divergence(b_a, b_b):
    """Terms of JSD(a‖b), elementwise, natural logarithm; 0 · log 0 is 0."""
    b_m = (b_a + b_b) * 0.5
    b_from_a = tl.where(b_a > 0, b_a * tl.log(b_a / b_m), 0.0)
    b_from_b = tl.where(b_b > 0, b_b * tl.log(b_b / b_m), 0.0)
    return (b_from_a + b_from_b) * 0.5


@triton.jit(do_not_specialize=["stride", "num_rows"])
def _sparsity_kernel(estimates, stride, block_starts, sparsity, num_rows, CHUNK: tl.constexpr):
    """d_sparse: sqrt(JSD) between a head's estimate and the uniform distribution."""
    i, i_row = tl.program_id(0), tl.program_id(1)
    start = tl.load(block_starts + i_row)
    num_blocks = (tl.load(block_starts + i_row + 1) - start).to(tl.int32)
    mine = estimates + i.to(tl.int64) * stride + start
    b_sum = tl.zeros([CHUNK], tl.float32)
    for first in range(0, num_blocks, CHUNK):
        o_n = first + tl.arange(0, CHUNK)
        in_row = o_n < num_blocks
        b_uniform = tl.where(in_row, 1.0 / num_blocks, 0.0)
        b_sum += _divergence(tl.load(mine + o_n, mask=in_row, other=0.0), b_uniform)
    tl.store(sparsity + i * num_rows + i_row, tl.sqrt(tl.maximum(tl.sum(b_sum, 0), 0.0)))


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
    if (place >= 0) & (tl.load(sparsity + i * num_rows + i_row) < max_sparsity):
        slot = tl.load(slots + place).to(tl.int64)
        known = tl.load(exists + slot * num_rows + i_row)
        o_h = tl.arange(0, HEADS)
        b_same = tl.load(places + o_h, mask=o_h < num_heads, other=-1) == place
        b_sparsity = tl.load(sparsity + o_h * num_rows + i_row, mask=b_same, other=float("inf"))
        pivot = tl.min(tl.where(b_sparsity < max_sparsity, o_h, HEADS), 0)
        if (pivot == i) & (known == 0):
            pattern = DENSE
            tl.store(new_pivots + place * num_rows + i_row, i)
        else:
            start = tl.load(block_starts + i_row)
            num_blocks = (tl.load(block_starts + i_row + 1) - start).to(tl.int32)
            num_fresh = tl.where(known == 0, num_blocks, 0)  # the pivot's estimate is one of this layer's, or stored
            num_stored = num_blocks - num_fresh
            mine = estimates + i.to(tl.int64) * stride + start
            fresh = estimates + pivot.to(tl.int64) * stride + start
            stored = last_rows + slot * stride_last + start
            b_sum = tl.zeros([CHUNK], tl.float32)
            for first in range(0, num_blocks, CHUNK):
                o_n = first + tl.arange(0, CHUNK)
                b_pivot = tl.load(fresh + o_n, mask=o_n < num_fresh, other=0.0)
                b_pivot += tl.load(stored + o_n, mask=o_n < num_stored, other=0.0)
                b_sum += _divergence(tl.load(mine + o_n, mask=o_n < num_blocks, other=0.0), b_pivot)
            if tl.sqrt(tl.maximum(tl.sum(b_sum, 0), 0.0)) < max_distance:
                pattern = SHARED
    tl.store(patterns + i * num_rows + i_row, pattern)


@triton.jit(do_not_specialize=["stride_map", "stride_estimate", "stride_last", "stride_kept", "num_rows"])
def _keep_pivots_kernel(
    maps, stride_map, estimates, stride_estimate, new_pivots, slots,
    exists, last_rows, stride_last, kept, stride_kept, block_starts, map_starts, num_rows, share,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """One (cluster of the layer, row) that has a new pivot: its pattern M, and its estimate ã."""
    place, i_row = tl.program_id(0), tl.program_id(1)
    i_pivot = tl.load(new_pivots + place * num_rows + i_row)
    if i_pivot >= 0:
        slot = tl.load(slots + place).to(tl.int64)
        start = tl.load(map_starts + i_row)
        length = (tl.load(map_starts + i_row + 1) - start).to(tl.int32)
        values = maps + place.to(tl.int64) * stride_map + start
        threshold = mass_threshold(values, length, share, CHUNK)
        for first in range(0, length, CHUNK):
            o_n = first + tl.arange(0, CHUNK)
            b_bits = tl.load(values + o_n, mask=o_n < length, other=0.0).to(tl.uint32, bitcast=True)
            tl.store(kept + slot * stride_kept + start + o_n, b_bits >= threshold, mask=o_n < length)
        start = tl.load(block_starts + i_row)
        length = (tl.load(block_starts + i_row + 1) - start).to(tl.int32)
        for first in range(0, length, CHUNK):
            o_n = first + tl.arange(0, CHUNK)
            b_a = tl.load(estimates + i_pivot.to(tl.int64) * stride_estimate + start + o_n, mask=o_n < length)
            tl.store(last_rows + slot * stride_last + start + o_n, b_a, mask=o_n < length)
        tl.store(exists + slot * num_rows + i_row, 1)


@triton.jit(do_not_specialize=["num_rows", "stride_kept", "stride_ids", "num_tiles"])
def _apply_pivots_kernel(
    patterns, num_rows, places, slots, kept, stride_kept, heads, tiles,
    block_offsets, block_counts, block_ids, stride_ids, stripe_counts, num_tiles,
    BLOCK_N: tl.constexpr, CHUNK: tl.constexpr, FIELDS: tl.constexpr, SHARED: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    i_tile, i = tl.program_id(0), tl.program_id(1)
    pattern = tl.load(patterns + i * num_rows + tl.load(tiles + i_tile * FIELDS))
    if (pattern == SHARED) | (pattern == DENSE):
        i_head = tl.load(heads + i).to(tl.int64)
        slot = tl.load(slots + tl.load(places + i)).to(tl.int64)
        diagonal, num_causal = tile_blocks(tiles, i_tile, BLOCK_N, FIELDS)
        always = tl.where(pattern == DENSE, 0, diagonal)
        start = tl.load(block_offsets + i_tile)
        target = block_ids + i_head * stride_ids + start
        flags = kept + slot * stride_kept + start
        count = 0
        for first in range(0, num_causal, CHUNK):
            o_n = first + tl.arange(0, CHUNK)
            causal = o_n < num_causal
            b_flags = tl.load(flags + o_n, mask=causal, other=0)
            count = append(target, count, o_n, causal & ((b_flags != 0) | (o_n >= always)))
        tl.store(block_counts + i_head * num_tiles + i_tile, count)
        tl.store(stripe_counts + i_head * num_tiles + i_tile, 0)
