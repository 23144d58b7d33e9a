# SPDX-License-Identifier: Apache-2.0
"""SharePrefill (arXiv:2505.19578), Algorithms 1 to 4, head by head in plain float32.

``method.py`` lists the deviations from the paper.
"""

from dataclasses import replace
from typing import NamedTuple

import torch

from vllm_sparse_kernels.call import Call
from vllm_sparse_kernels.index import SparseIndex
from vllm_sparse_kernels.methods.flex_prefill.reference import fewest_with_mass, select_flex_vertical_slash
from vllm_sparse_kernels.methods.references import heads_of_rows
from vllm_sparse_kernels.methods.share_prefill.method import NOISE, SharePrefill
from vllm_sparse_kernels.rows import TILE_TOKENS, split_blocks


class Pivot(NamedTuple):
    """An entry of the paper's pivotal_pattern_dict: ã, and the map of each tile of its row instead of the pattern M."""

    last_row: torch.Tensor
    weights: list[torch.Tensor]


def select_share_prefill(call: Call) -> None:
    """Fill the lists of the call's heads in plain torch, as ``SharePrefill.select`` does with kernels."""
    select_flex_vertical_slash(replace(call, heads=call.heads.derived("fallback")))
    index, method = call.index, call.method
    if not method.shares(call.heads.methods):
        return
    pivots: dict[tuple[int, int], Pivot] = index.rows.state.setdefault(("reference", method.group_key), {})
    for row, head, head_method, queries, keys in heads_of_rows(call):
        scaled_keys = keys * call.scale
        last_row = block_average(queries[-TILE_TOKENS:], scaled_keys, index.block_tokens).softmax(-1)
        pivot = pivots.get((row, head_method.cluster))
        pattern = determine(head_method, last_row, pivot)
        if pattern == "dense":
            weights = block_average_map(queries, scaled_keys, index, row)
            pivots[row, head_method.cluster] = Pivot(last_row, weights)
            set_pattern([torch.ones_like(w, dtype=torch.bool) for w in weights], index, row, head)
        elif pattern == "shared" and pivot is not None:
            set_pattern(pivotal_pattern(pivot.weights, head_method.gamma), index, row, head)


def set_pattern(kept: list[torch.Tensor], index: SparseIndex, row: int, head: int) -> None:
    """Write the lists of one row and head."""
    for i_tile, tile_kept in enumerate(kept, index.rows.tile_starts[row]):
        index.set_blocks(head, i_tile, tile_kept)
        index.stripe_counts[head, i_tile] = 0


def determine(method: SharePrefill, last_row: torch.Tensor, pivot: Pivot | None) -> str:
    """Decide the pattern of a head: Algorithm 3, and the first lines of Algorithm 4."""
    uniform = torch.full_like(last_row, 1 / len(last_row))
    if method.cluster == NOISE or js_distance(last_row, uniform) >= method.max_sparsity:
        return "vertical_slash"
    if pivot is None:
        return "dense"
    return "shared" if js_distance(last_row, pivot.last_row) < method.max_distance else "vertical_slash"


def js_distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Compute sqrt(JSD(a‖b)) in natural logarithms."""
    mean = (a + b) / 2
    divergence = (relative_entropy(a, mean) + relative_entropy(b, mean)) / 2
    return float(divergence.clamp(min=0).sqrt())


def relative_entropy(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Compute KL(a‖b) in natural logarithms; 0 · log 0 is 0."""
    return torch.where(a > 0, a * (a / b).log(), 0).sum()


def block_average(queries: torch.Tensor, keys: torch.Tensor, block_tokens: int) -> torch.Tensor:
    """Compute pool(Q̂Kᵀ): scores of the last queries of ``keys``, averaged over the causal pairs of each block."""
    num_queries, num_keys = len(queries), len(keys)
    scores = (queries @ keys.T).tril_(num_keys - num_queries)
    seen_by = (num_keys - torch.arange(num_keys, device=keys.device)).clamp(max=num_queries)  # queries of each key
    return split_blocks(scores.sum(0), block_tokens).sum(1) / split_blocks(seen_by, block_tokens).sum(1)


def block_average_map(queries: torch.Tensor, keys: torch.Tensor, index: SparseIndex, row: int) -> list[torch.Tensor]:
    """Compute Ã, Algorithm 2's softmax of block averages."""
    return [
        block_average(b_q, keys[: index.rows.tile_list[i_tile].last_position + 1], index.block_tokens).softmax(-1)
        for b_q, i_tile in zip(queries.split(TILE_TOKENS), index.rows.tiles_of(row), strict=True)
    ]


def pivotal_pattern(weights: list[torch.Tensor], gamma: float) -> list[torch.Tensor]:
    """Flag the fewest blocks that hold γ of the whole map (Algorithm 2)."""
    return list(fewest_with_mass(torch.cat(weights), gamma).split([len(w) for w in weights]))
