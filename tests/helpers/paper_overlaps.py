# SPDX-License-Identifier: Apache-2.0
"""Overlap of reference selections with the rules of the papers and of their authors' released code.

``tests/helpers/paper_rules.py`` implements the rules in float64, independently of the references. Queries and keys are
structured like those of trained models (``tests/helpers/structured.py``). An overlap is the intersection over the union
of kept (query, key) pairs. AnchorAttention keeps single keys, SALE keeps blocks of 64 queries by 32 keys, and
SharePrefill keeps blocks of 128 queries by 64 keys. MInference keeps single keys, and blocks of 128 queries by 64 keys.
"""

from dataclasses import dataclass

import torch

from tests.helpers import paper_rules as rules
from tests.helpers.batches import every_head
from tests.helpers.masks import mask_of
from tests.helpers.structured import Structured, paged_batch, structured
from vllm_sparse_kernels.engine_trial import Batch
from vllm_sparse_kernels.index import SparseIndex
from vllm_sparse_kernels.methods.anchor_attention.method import AnchorAttention
from vllm_sparse_kernels.methods.anchor_attention.reference import select_anchor_attention
from vllm_sparse_kernels.methods.flex_prefill.reference import select_flex_vertical_slash
from vllm_sparse_kernels.methods.minference.reference import select_vertical_slash
from vllm_sparse_kernels.methods.minference.vertical_slash import VerticalSlash
from vllm_sparse_kernels.methods.sale.method import Sale
from vllm_sparse_kernels.methods.sale.reference import paper_blocks
from vllm_sparse_kernels.methods.share_prefill.method import SharePrefill
from vllm_sparse_kernels.methods.share_prefill.reference import select_share_prefill


def prompt(num_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int) -> tuple[Structured, Batch]:
    """Return a whole prompt in float32, and the same prompt in a paged cache."""
    data = structured(num_tokens, 0, num_heads, num_kv_heads, head_dim)
    return data, paged_batch(data, 16)


def head_of(data: Structured, head: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the queries and keys of a query head, in float64."""
    group = data.q.shape[1] // data.k.shape[1]
    return data.q[:, head].double(), data.k[:, head // group].double()


def mean(values: list[float]) -> float:
    """Return the mean of a list."""
    return sum(values) / len(values)


@dataclass(frozen=True)
class AnchorOverlap:
    """Overlaps of AnchorAttention's reference, averaged over heads.

    Attributes:
        paper: The defaults against the paper's rule.
        paper_density: Density of the paper's rule.
        released: ``dense_tail`` and ``first_group`` against the released code's rule.
        released_but_for_skipped: The same, without the block of keys before each group, which the code never visits.
        kept_of_skipped: Share of the keys in these blocks that the reference keeps.
        paper_against_released: The defaults against the released code's rule.
        dense_tail_alone: Only ``dense_tail`` against the released code's rule, without these blocks.
        first_group_alone: Only ``first_group`` against the released code's rule, without these blocks.
    """

    paper: float
    paper_density: float
    released: float
    released_but_for_skipped: float
    kept_of_skipped: float
    paper_against_released: float
    dense_tail_alone: float
    first_group_alone: float

    @staticmethod
    def measure(
        num_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int, theta: float, step_tiles: int
    ) -> "AnchorOverlap":
        """Compare the reference with both rules on one prompt.

        Args:
            num_tokens: Tokens of the prompt, not a multiple of a group.
            num_heads: Query heads.
            num_kv_heads: Key heads.
            head_dim: Channels of a head.
            theta: θ.
            step_tiles: Tiles of a group.

        Returns:
            The overlaps.
        """
        data, batch = prompt(num_tokens, num_heads, num_kv_heads, head_dim)

        def masks(**options: bool) -> torch.Tensor:
            method = AnchorAttention(theta=theta, step_tiles=step_tiles, **options)
            layout = method.stripe_layout(batch.rows)
            index = SparseIndex.allocate(batch.rows, num_heads, 128, dict.fromkeys(range(num_heads), layout))
            select_anchor_attention(batch.call(index, every_head(method, num_heads)))
            return mask_of(index, 0)

        default, with_options = masks(), masks(dense_tail=True, first_group=True)
        tail, group = masks(dense_tail=True), masks(first_group=True)
        rows: list[list[float]] = []
        for head in range(num_heads):
            q, k = head_of(data, head)
            paper = rules.anchor_paper(q, k, data.scale, theta, step_tiles)
            released, skipped = rules.anchor_released(q, k, data.scale, theta, step_tiles)
            rows.append([
                rules.overlap(default[head], paper),
                int(paper.sum()) / (num_tokens * (num_tokens + 1) / 2),
                rules.overlap(with_options[head], released),
                rules.overlap(with_options[head] & ~skipped, released),
                int((with_options[head] & skipped).sum()) / int(skipped.sum()),
                rules.overlap(default[head], released),
                rules.overlap(tail[head] & ~skipped, released),
                rules.overlap(group[head] & ~skipped, released),
            ])  # fmt: skip
        return AnchorOverlap(*(mean(list(column)) for column in zip(*rows, strict=True)))


@dataclass(frozen=True)
class SaleOverlap:
    """Overlaps of SALE's reference, averaged over heads.

    Attributes:
        paper: Against the paper's rule.
        paper_density: Density of the paper's rule, in blocks.
        released: Against the released code's rule, where pairs of queries share a scale, biases are rounded, and scores
            must exceed the threshold.
        released_but_for_rounding: The same, with a scale for each query and biases that are not rounded.
    """

    paper: float
    paper_density: float
    released: float
    released_but_for_rounding: float

    @staticmethod
    def measure(num_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int, tau: float) -> "SaleOverlap":
        """Compare the reference with both rules on one prompt.

        Args:
            num_tokens: Tokens of the prompt.
            num_heads: Query heads.
            num_kv_heads: Key heads.
            head_dim: Channels of a head.
            tau: τ.

        Returns:
            The overlaps.
        """
        data, batch = prompt(num_tokens, num_heads, num_kv_heads, head_dim)
        shape = -(-num_tokens // 64), -(-num_tokens // 32)
        ours = torch.zeros(num_heads, *shape, dtype=torch.bool)
        index = SparseIndex.allocate(batch.rows, num_heads, 32)
        for head, i_tile, kept in paper_blocks(batch.call(index, every_head(Sale(tau), num_heads))):
            ours[head, 2 * i_tile : 2 * i_tile + len(kept), : kept.shape[1]] = kept
        causal_blocks = sum(min(64 * i + 63, num_tokens - 1) // 32 + 1 for i in range(shape[0]))
        rows: list[list[float]] = []
        for head in range(num_heads):
            q, k = head_of(data, head)
            paper = rules.sale(q, k, data.scale, tau, pairs_share=False, rounds_bias=False, strict=False)
            released = rules.sale(q, k, data.scale, tau, pairs_share=True, rounds_bias=True, strict=True)
            unrounded = rules.sale(q, k, data.scale, tau, pairs_share=False, rounds_bias=False, strict=True)
            rows.append([
                rules.overlap(ours[head], paper),
                int(paper.sum()) / causal_blocks,
                rules.overlap(ours[head], released),
                rules.overlap(ours[head], unrounded),
            ])  # fmt: skip
        return SaleOverlap(*(mean(list(column)) for column in zip(*rows, strict=True)))


@dataclass(frozen=True)
class ShareOverlap:
    """Overlaps of SharePrefill's reference with the paper's rule, where all heads are in the same cluster.

    Attributes:
        paper: Mean over heads that share, with the blocks on the diagonal added to the rule.
        paper_without_diagonal: The same without these blocks.
        paper_density: Density of the heads that share.
        pivots: Heads that are dense by the rule.
        shared: Heads that share by the rule.
        as_decided: Heads that the reference treats as the rule does.
    """

    paper: float
    paper_without_diagonal: float
    paper_density: float
    pivots: int
    shared: int
    as_decided: int

    @staticmethod
    def measure(
        num_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int, gamma: float, max_distance: float
    ) -> "ShareOverlap":
        """Compare the reference with the paper's rule on one prompt.

        Args:
            num_tokens: Tokens of the prompt.
            num_heads: Query heads.
            num_kv_heads: Key heads.
            head_dim: Channels of a head.
            gamma: γ.
            max_distance: τ.

        Returns:
            The overlaps.
        """
        data, batch = prompt(num_tokens, num_heads, num_kv_heads, head_dim)
        method = SharePrefill(1.01, max_distance, gamma, cluster=0)
        index = SparseIndex.allocate(
            batch.rows, num_heads, 64, dict.fromkeys(range(num_heads), method.stripe_layout(batch.rows))
        )
        select_flex_vertical_slash(batch.call(index, every_head(method.fallback, num_heads)))
        lines = mask_of(index, 0)
        select_share_prefill(batch.call(index, every_head(method, num_heads)))
        ours = mask_of(index, 0)
        queries, keys = (torch.stack(x) for x in zip(*(head_of(data, i) for i in range(num_heads)), strict=True))
        expected = rules.share_prefill(queries, keys, data.scale, gamma, 1.01, max_distance)
        tokens = torch.arange(num_tokens)
        causal = tokens[:, None] >= tokens
        diagonal = causal & (tokens[:, None] // 128 <= tokens // 128)
        overlaps, without, densities, decided = [], [], [], 0
        for head, mask in enumerate(expected):
            decided += torch.equal(ours[head], lines[head]) == (mask is None)
            if mask is not None and not bool(mask.all()):
                overlaps.append(rules.overlap(ours[head], (mask & causal) | diagonal))
                without.append(rules.overlap(ours[head], mask & causal))
                densities.append(int((mask & causal).sum()) / int(causal.sum()))
        pivots = sum(mask is not None and bool(mask.all()) for mask in expected)
        return ShareOverlap(mean(overlaps), mean(without), mean(densities), pivots, len(overlaps), decided)


@dataclass(frozen=True)
class VerticalSlashOverlap:
    """Overlaps of the reference of MInference's vertical-slash pattern with the paper's rule, averaged over heads.

    Attributes:
        paper: With the diagonal added to the rule, and each slash widened to blocks of 128 queries by 64 keys.
        paper_pairs: With the diagonal added to the rule, in single pairs.
        paper_density: Density of the rule in single pairs.
        released: The setting of the released code, whose first lines are forced, against the widened rule.
    """

    paper: float
    paper_pairs: float
    paper_density: float
    released: float

    @staticmethod
    def measure(
        num_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int, num_verticals: int, num_slashes: int
    ) -> "VerticalSlashOverlap":
        """Compare the reference with the paper's rule on one prompt.

        Args:
            num_tokens: Tokens of the prompt.
            num_heads: Query heads.
            num_kv_heads: Key heads.
            head_dim: Channels of a head.
            num_verticals: k_v.
            num_slashes: k_s.

        Returns:
            The overlaps.
        """
        data, batch = prompt(num_tokens, num_heads, num_kv_heads, head_dim)

        def masks(forced_verticals: int, forced_slashes: int) -> torch.Tensor:
            method = VerticalSlash(num_verticals, num_slashes, 64, forced_verticals, forced_slashes)
            layout = method.stripe_layout(batch.rows)
            index = SparseIndex.allocate(batch.rows, num_heads, 64, dict.fromkeys(range(num_heads), layout))
            select_vertical_slash(batch.call(index, every_head(method, num_heads)))
            return mask_of(index, 0)

        paper, released = masks(0, 0), masks(30, 100)
        rows: list[list[float]] = []
        for head in range(num_heads):
            q, k = head_of(data, head)
            lines = rules.minference_lines(q, k, data.scale, num_verticals, num_slashes)
            pairs, widened = rules.minference(*lines, 1, 1), rules.minference(*lines, 128, 64)
            rows.append([
                rules.overlap(paper[head], widened),
                rules.overlap(paper[head], pairs),
                int(pairs.sum()) / (num_tokens * (num_tokens + 1) / 2),
                rules.overlap(released[head], widened),
            ])  # fmt: skip
        return VerticalSlashOverlap(*(mean(list(column)) for column in zip(*rows, strict=True)))
