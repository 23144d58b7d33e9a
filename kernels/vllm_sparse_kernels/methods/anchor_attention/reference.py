# SPDX-License-Identifier: Apache-2.0
"""AnchorAttention (Zhang et al., 2025), equations 1 and 2 and section 3.4, in plain torch.

``method.py`` describes the interpretation of the paper, and departures from it.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import torch

from vllm_sparse_kernels.index import SparseIndex
from vllm_sparse_kernels.methods.references import rows_of
from vllm_sparse_kernels.paged import PagedCache
from vllm_sparse_kernels.rows import TILE_TOKENS, Tile

if TYPE_CHECKING:
    from vllm_sparse_kernels.methods.anchor_attention.method import AnchorAttention

INITIAL_TOKENS = TILE_TOKENS  # K_init: the paper's blocks are 128 wide, on both sides


def select_anchor_attention(
    method: "AnchorAttention", q: torch.Tensor, cache: PagedCache, index: SparseIndex, heads: torch.Tensor, scale: float
) -> None:
    """Fill the lists of ``heads`` in plain torch, as ``AnchorAttention.select`` does by kernels.

    Args:
        method: The method of the heads, possibly merged.
        q: [num_tokens, num_heads, head_dim], in the cache's dtype.
        cache: Keys and values of the layer, in pages of [page_size, num_kv_heads, head_dim].
        index: The index, whose lists of ``heads`` are overwritten.
        heads: [n] int32 on the device, numbers of the selected query heads.
        scale: Factor from q·k to scores, usually 1/√head_dim; above 0.
    """
    rows, ratio = index.rows, q.shape[1] // cache.num_kv_heads
    keys = [keys for _, _, keys in rows_of(q, cache, rows)]
    numbered = enumerate(rows.tile_list)
    thetas = [head.theta for head in method.of_heads(len(heads))]
    for (row, start), members in groupby(
        numbered, lambda it: (it[1].row, window_start(it[1], method.step_tiles, method.window_tokens))
    ):
        tiles = list(members)
        for head, theta in zip(heads.tolist(), thetas):
            k = keys[row][:, head // ratio]
            settings = scale, method.use_anchor, method.sample_tokens
            differences = anchor_differences([tile for _, tile in tiles], q[:, head].float(), k, start, *settings)
            # Equation 2; section 3.4: what any tile of the group keeps, all of them keep.
            kept = INITIAL_TOKENS + (differences <= theta).any(0).nonzero().flatten()
            for i_tile, tile in tiles:
                blocks = torch.zeros(index.num_causal_blocks(tile), dtype=torch.bool, device=q.device)
                blocks[: INITIAL_TOKENS // index.block_tokens] = True
                blocks[start // index.block_tokens :] = True
                if method.whole_blocks:
                    blocks[kept // index.block_tokens] = True
                index.set_blocks(head, i_tile, blocks)
                index.set_stripes(head, i_tile, kept)  # those outside the blocks


def window_start(tile: Tile, step_tiles: int, window_tokens: int = 0) -> int:
    """Return where the window of the tile begins, ``window_tokens`` before its group.

    Groups lie at multiples of the span, a tile goes by its first query.

    Args:
        tile: Number of the tile.
        step_tiles: Tiles of a group.
        window_tokens: Keys of the window that lie before the group.

    Returns:
        A position, negative in a row's first groups.
    """
    span_tokens = step_tiles * TILE_TOKENS
    return max(tile.position // span_tokens * span_tokens - window_tokens, 0)


def anchor_differences(
    tiles: Sequence[Tile], q: torch.Tensor, k: torch.Tensor, start: int, scale: float, use_anchor: bool = True,
    sample_tokens: int = 0,
) -> torch.Tensor:  # fmt: skip
    """avgpool(x_a) − avgpool(Q) Kᵀ · scale of equation 2: [tiles, keys from the initial block to ``start``].

    With ``sample_tokens``, x_a − Q Kᵀ · scale of the last of every so many queries of a tile, and of the last of what
    is left at its end: [such queries, keys]. q [num_tokens, head_dim] and k [seq_len, head_dim] belong to one head, the
    tiles to one group whose window begins at ``start``. Computed in the inputs' dtype.

    Args:
        tiles: The tiles of a group.
        q: [num_tokens, head_dim].
        k: [seq_len, head_dim].
        start: Position at which the group's window begins.
        scale: Factor from q·k to scores, usually 1/√head_dim; above 0.
        use_anchor: False sets x_a = 0.
        sample_tokens: Distance between voting queries; 0 if the mean of all queries votes.

    Returns:
        float32.
    """
    future = torch.ones(TILE_TOKENS, TILE_TOKENS, dtype=torch.bool, device=q.device).triu(1)
    differences = []
    for tile in tiles:
        q_tile = q[tile.token : tile.token + tile.length_tokens]
        x_a = q.new_zeros(tile.length_tokens)
        if use_anchor and start > INITIAL_TOKENS:
            # Equation 1: the maximum over [K_init, K_w], which ends with the tile's own keys, under the causal mask.
            scores = q_tile @ torch.cat([k[:INITIAL_TOKENS], k[start : tile.last_position + 1]]).T * scale
            scores[:, -tile.length_tokens :].masked_fill_(
                future[: tile.length_tokens, : tile.length_tokens], -torch.inf
            )
            x_a = scores.amax(-1)
        if sample_tokens:
            sampled = torch.arange(sample_tokens - 1, tile.length_tokens + sample_tokens - 1, sample_tokens)
            sampled = sampled.clamp(max=tile.length_tokens - 1).to(q.device)
            x_a, q_tile = x_a[sampled, None], q_tile[sampled]
        else:
            x_a, q_tile = x_a.mean()[None, None], q_tile.mean(0, keepdim=True)
        differences.append(x_a - q_tile @ k[INITIAL_TOKENS : max(start, INITIAL_TOKENS)].T * scale)
    return torch.cat(differences)
