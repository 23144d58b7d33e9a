# SPDX-License-Identifier: Apache-2.0
"""SharePrefill: the pattern of one head, computed densely, is shared by similar heads of this and later layers.

"Accelerating Prefilling for Long-Context LLMs via Sparse Pattern Sharing" (Peng et al., arXiv:2505.19578).

**The paper's rule.** Heads are clustered offline; the clusters are part of the profile. At inference, per row and for
each head in order (Algorithms 1 to 4):

1. *Estimate.* Average the last queries' scaled QK over each key block, then take the softmax over blocks: â (Algorithm
   3, line 3).
2. *Exclude.* A head that is highly sparse (sqrt(JSD) between â and the uniform distribution is at least δ), or that
   belongs to no cluster, uses FlexPrefill's vertical-slash (Algorithm 5).
3. *Pivot.* The first other head of a cluster is computed densely. The softmax of its block-averaged QK is its map; its
   pattern is the fewest blocks that hold γ of the map's mass (Algorithm 2).
4. *Share.* A later head of the cluster uses the pivot's pattern if sqrt(JSD) between their estimates is below τ, and
   vertical-slash otherwise.

The choice of pivots depends on the data and differs between rows. The device chooses them without the host.

**Choices where the paper is open, and deviations from it:**

* *Averages.* The paper averages QK before the softmax. Such averages follow from mean queries and mean keys
  (block_average.py), so the map needs nothing from the attention kernel. On the diagonal, averages run over the pairs
  that the causal mask leaves.
* *Blocks.* The map's rows are tiles of 128 queries, and its columns are blocks of ``index.block_tokens`` keys. The
  estimate uses the chunk's last 128 queries, also for pivots, so that equal heads have equal estimates at any chunk
  length.
* *Diagonal.* Blocks on the diagonal are always kept, as by every method here. The paper keeps them if the map does.
* *JSD* uses the natural logarithm, as the released code does. Blocks tied at the threshold are all kept.
* *γ per head.* A head that shares uses the pivot's map, not its pattern, and keeps the blocks that hold the head's γ of
  the mass. The paper has one γ. Therefore γ never decides which heads share, and a head's γ does not affect other
  heads.
* *No sharing.* With δ = 0 or τ = 0 nothing could be shared, and no pivot is computed. sqrt(JSD) never exceeds 0.83 =
  √ln 2: with δ = 1.01, the paper's most accurate row (table 2: 39.35 against 39.05, at 1.18 times the latency), no head
  is too sparse to share.
* *Same layer.* Heads of the pivot's own layer may share its pattern, because the map does not wait for the attention.
  The released code builds patterns after the layer, so only later layers share them.

**Released code.** The authors' repository (opas-lab/SharePrefill at f42a531) differs from the paper as follows; none of
these differences is implemented here:

* *True mass.* Its map is the exact softmax mass of each block, by a second pass over the pivot's QK, which costs half
  of the pivot's dense attention or more.
* *γ of each row.* It keeps γ of the mass of each row of the map, not of the whole map. With the whole map, all rows
  have equal weight, and rows with many blocks (at a chunk's end) keep too little.
* *Comparison.* It compares heads by the true mass of the last queries, summed over columns and over diagonals: both
  distances to the pivot must be below 0.5. The paper compares estimates, and has τ = 0.2.
* *Query-aware heads.* A head whose pooled estimate is close to the true one (a distance below 0.1) uses FlexPrefill's
  query-aware pattern, in any cluster or without a cluster.
* *Exclusion.* It has no δ. Instead no head shares a pivot whose own vertical-slash would hold 0.9 or more of its mass.
* *Budget.* Each head, including heads that share, keeps at least 1,024 keys' worth of its own best columns and of its
  own best diagonals, in blocks of 128.

On a small trained model (64 heads, 8,192 tokens, each head with the pattern of its own map, γ = 0.9), recall → density
were 0.864 → 0.131 with averages, 0.874 → 0.163 with γ of each row, 0.910 → 0.154 with true mass, and 0.926 → 0.190 with
both. Averages reach a recall of 0.916 with γ = 0.95, at a density of 0.201. On SmolLM2, heads that share keep less with
each of these maps than by their own vertical-slash at equal density (docs/research/papers.md has the other
differences).

**Cost.** The decisions to share are known before vertical-slash reads any key. It then skips heads that share, and key
heads whose query heads all share. Query heads that share keys are stacked, so a single head costs as much as all of
them.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Self

import torch
import triton

from vllm_sparse_kernels.call import Call
from vllm_sparse_kernels.index import SparseIndex, StripeLayout
from vllm_sparse_kernels.methods.base import Method
from vllm_sparse_kernels.methods.flex_prefill.method import FlexVerticalSlash
from vllm_sparse_kernels.methods.share_prefill.block_average import BlockAverages, Spans
from vllm_sparse_kernels.methods.share_prefill.kernels import (
    ShareArgs,
    SharingThresholds,
    apply_patterns_kernel,
    decide_kernel,
    low_weights_kernel,
)
from vllm_sparse_kernels.rows import Rows
from vllm_sparse_kernels.selection.last_queries import least_shared_bytes
from vllm_sparse_kernels.selection.parameters import on_device, require
from vllm_sparse_kernels.selection.radix import DIGITS

NOISE = -1
"""Cluster id of heads that resemble no other head."""


@dataclass(frozen=True)
class SharePrefill(Method):
    """Parameters of SharePrefill for each head; the module's docstring has the rules."""

    differing = ("gamma", "cluster")

    max_sparsity: float = 0.3
    """δ: heads at least this far from uniform share nothing (Algorithm 3). Above 0.84, there are no such heads."""

    max_distance: float = 0.2
    """τ: heads at least this far from their pivot do not use its pattern (Algorithm 3)."""

    gamma: float = 0.9
    """γ: share of the mass that patterns, columns and diagonals hold (Algorithms 2 and 5)."""

    cluster: int = NOISE
    """Number of the head's cluster, the same in all layers; −1 for noise."""

    last_queries: int = 64
    """Number of queries from which vertical-slash's lines are estimated."""

    def __post_init__(self) -> None:
        require(self.max_sparsity >= 0, "max_sparsity", self.max_sparsity, "a number >= 0 (δ)")
        require(self.max_distance >= 0, "max_distance", self.max_distance, "a number >= 0 (τ)")
        require(0 < self.gamma <= 1, "gamma", self.gamma, "a share in (0, 1] (γ)")
        require(self.cluster >= NOISE, "cluster", self.cluster, f"a cluster's number >= 0, or {NOISE} for noise")
        FlexVerticalSlash(last_queries=self.last_queries)  # which refuses invalid values

    @property
    def sharing(self) -> "SharePrefill":
        """The method with the class's default γ: the key of heads that may share."""
        return replace(self, gamma=type(self).gamma)

    @property
    def unshared(self) -> "SharePrefill":
        """The method without a cluster: a cluster's only head would be a dense pivot whose pattern no head uses."""
        return replace(self, cluster=NOISE)

    @classmethod
    def objection(cls, methods: Sequence[Self]) -> str | None:
        members = Counter(m.sharing for m in methods if m.shares([m]))
        if any(count > 1 for count in members.values()):
            return None
        return (
            "share_prefill: no two heads can share a pattern, so it would only run as flex_vertical_slash: expected a "
            "profile that gives similar heads the same cluster, and thresholds above 0; or method flex_vertical_slash"
        )

    @classmethod
    def summary(cls, methods: Sequence[Self]) -> dict[str, object]:
        fields = {name: value for name, value in methods[0].group_key.shown_fields.items() if name != "cluster"}
        gammas = {method.gamma for method in methods}
        fields["gamma"] = gammas.pop() if len(gammas) == 1 else f"{min(gammas):g} to {max(gammas):g}"
        members = Counter(method.cluster for method in methods if method.cluster != NOISE)
        return fields | {"clusters": len(members), "clustered_heads": members.total()}

    @cached_property
    def fallback(self) -> FlexVerticalSlash:
        """The vertical-slash method of the same head."""
        return FlexVerticalSlash(self.gamma, last_queries=self.last_queries)

    def stripe_layout(self, rows: Rows) -> StripeLayout:
        return self.fallback.stripe_layout(rows)

    def shares(self, heads: Sequence["SharePrefill"]) -> bool:
        """Return whether any of these heads could reuse a pattern; otherwise no pivot is worth its dense attention."""
        return self.max_sparsity > 0 and self.max_distance > 0 and any(head.cluster != NOISE for head in heads)

    def least_shared_bytes(self, head_dim: int) -> int:
        return least_shared_bytes(self.last_queries, head_dim)

    def select(self, call: Call) -> None:
        index, methods = call.index, call.heads.methods
        lines = replace(call, heads=call.heads.derived("fallback"))
        if not self.shares(methods):
            self.fallback.select(lines)
            return
        key, state = ("pivots", self.group_key), index.rows.state
        if key not in state:
            state[key] = Pivots(index)  # for all layers with these thresholds
        pivots: Pivots = state[key]
        clusters = [method.cluster for method in methods]
        in_layer = sorted(set(clusters) - {NOISE})
        device = index.rows.device
        places = on_device(tuple(NOISE if c == NOISE else in_layer.index(c) for c in clusters), device)
        slots = on_device(pivots.slots_of(in_layer), device)
        with index.workspace.frame():
            patterns = index.workspace.empty(len(methods), index.rows.num_rows, dtype=torch.int32)
            with index.workspace.frame():
                averages = BlockAverages(call, pivots.spans, places)
                _share(call, pivots, averages, places, slots, patterns)
            self.fallback.select(lines, patterns)


class Pivots:
    """The pivots of one forward pass, by slot and row. A cluster gets its slot in the first layer that has it.

    They are not in the workspace, because later layers read them.
    """

    def __init__(self, index: SparseIndex) -> None:
        self.spans = Spans.of(index)
        self.slots: dict[int, int] = {}
        empty = partial(torch.empty, 0, dtype=torch.float32, device=index.rows.device)
        self.exists = empty(index.rows.num_rows, dtype=torch.int32)
        self.last_rows = empty(self.spans.num_blocks)  # ã
        self.maps = empty(index.block_ids.shape[1])  # Ã, as block_ids
        self.weights = empty(index.rows.num_tiles, DIGITS.value)  # of its high digits

    def slots_of(self, clusters: list[int]) -> tuple[int, ...]:
        """Return the slots of clusters, and make room for new clusters. The host does not read from the device."""
        for cluster in clusters:
            self.slots.setdefault(cluster, len(self.slots))
        if len(self.slots) > len(self.exists):
            # Room for twice as many clusters at a time, so that few layers wait for a copy.
            room = triton.next_power_of_2(len(self.slots))
            tensors = self.exists, self.last_rows, self.maps, self.weights
            self.exists, self.last_rows, self.maps, self.weights = (_with_room(x, room) for x in tensors)
        return tuple(self.slots[c] for c in clusters)


def _with_room(kept: torch.Tensor, number: int) -> torch.Tensor:
    """Return a tensor extended by rows of zeros to ``number`` rows."""
    return torch.cat((kept, kept.new_zeros(number - len(kept), *kept.shape[1:])))


def _share(
    call: Call, pivots: Pivots, averages: BlockAverages, places: torch.Tensor, slots: torch.Tensor,
    patterns: torch.Tensor,
) -> None:  # fmt: skip
    """Run Algorithm 3, which fills patterns [heads, num_rows] int32 and makes new pivots, and Algorithm 2."""
    index, rows, empty = call.index, call.rows, call.workspace.empty
    num_heads, num_rows = averages.sparsity.shape
    shares = call.heads.derived("fallback").parameters(("kernel_share",), rows.device)
    args = ShareArgs(
        call.head_ids, places, slots, patterns, shares, averages.estimates, averages.sparsity, averages.mean_keys,
        pivots.exists, pivots.last_rows, pivots.maps, pivots.weights,
        empty(num_heads, rows.num_tiles, DIGITS.value), empty(num_heads, rows.num_tiles, dtype=torch.int32),
        empty(num_heads, rows.num_tiles), pivots.spans.block_starts, rows.device_tile_starts,
    )  # fmt: skip
    num_map_programs = len(slots) * rows.num_tiles
    heads = {"HEADS": triton.next_power_of_2(num_heads)}
    thresholds = SharingThresholds(call.method.max_sparsity, call.method.max_distance)
    decide_kernel[(num_map_programs + num_heads * num_rows,)](
        args, num_heads, num_rows, thresholds, averages.queries, averages.keys, index.args, num_map_programs,
        pivots.spans.num_blocks, rows.num_tiles, **heads, SHAPE=averages.shape, num_warps=8,
    )  # fmt: skip
    low_weights_kernel[(rows.num_tiles, num_heads)](args, num_rows, index.args, BLOCK_N=index.block_tokens, **heads)
    apply_patterns_kernel[(rows.num_tiles, num_heads)](
        args, num_rows, pivots.spans.num_blocks, index.args, rows.num_tiles,
        BLOCK_N=index.block_tokens, **heads,
    )  # fmt: skip
