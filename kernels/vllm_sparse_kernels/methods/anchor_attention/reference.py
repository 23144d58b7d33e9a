# SPDX-License-Identifier: Apache-2.0
"""AnchorAttention (Zhang et al., 2025), equations 1 and 2 and section 3.4, in plain torch.

``method.py`` says how we read the paper, and where the method differs from it.
"""

from collections.abc import Sequence

import torch

from vllm_sparse_kernels.call import Call
from vllm_sparse_kernels.methods.anchor_attention.kernels import INITIAL
from vllm_sparse_kernels.methods.anchor_attention.method import AnchorAttention, groups_of
from vllm_sparse_kernels.methods.references import rows_of
from vllm_sparse_kernels.rows import Tile


def select_anchor_attention(call: Call) -> None:
    """Fill the lists of the call's heads in plain torch, as ``AnchorAttention.select`` does with kernels."""
    method, q, index, rows = call.method, call.q, call.index, call.rows
    initial, keys = INITIAL.value, [keys for _, _, keys in rows_of(call)]
    for group in groups_of(rows, method.span_tokens):
        tiles = rows.tile_list[group.first_tile : group.first_tile + group.num_tiles]
        for head, head_method in call.heads.pairs:
            b_q, b_k = q[:, head].float(), keys[group.row][:, head // call.group]
            differences = anchor_differences(method, tiles, b_q, b_k, group.start, call.scale)
            # Equation 2; section 3.4: a key that any tile of the group keeps is kept by all of its tiles.
            kept = initial + (differences <= head_method.theta).any(0).nonzero().flatten()
            for i_tile, tile in enumerate(tiles, group.first_tile):
                blocks = torch.zeros(index.num_causal_blocks(tile), dtype=torch.bool, device=q.device)
                blocks[: initial // index.block_tokens] = True
                blocks[group.start // index.block_tokens :] = True
                if method.whole_blocks:
                    blocks[kept // index.block_tokens] = True
                index.set_blocks(head, i_tile, blocks)
                index.set_stripes(head, i_tile, kept)  # only positions outside the blocks


def anchor_differences(
    method: AnchorAttention, tiles: Sequence[Tile], q: torch.Tensor, k: torch.Tensor, start: int, scale: float
) -> torch.Tensor:
    """Compute avgpool(x_a) − avgpool(Q) Kᵀ · scale of equation 2 in the inputs' dtype.

    With ``sample_tokens`` = n, compute x_a − Q Kᵀ · scale for the last of every n queries of a tile, and for the last
    of the remainder at its end.
    """
    initial, sample_tokens = INITIAL.value, method.sample_tokens
    differences = []
    for tile in tiles:
        q_tile = q[tile.token : tile.token + tile.length_tokens]
        x_a = q.new_zeros(tile.length_tokens)
        if start > initial:
            # Equation 1: the maximum over [K_init, K_w], which ends with the tile's own keys, under the causal mask.
            scores = q_tile @ torch.cat([k[:initial], k[start : tile.last_position + 1]]).T * scale
            future = torch.ones_like(scores, dtype=torch.bool).triu(scores.shape[1] - tile.length_tokens + 1)
            x_a = scores.masked_fill(future, -torch.inf).amax(-1)
        if sample_tokens:
            sampled = torch.arange(sample_tokens - 1, tile.length_tokens + sample_tokens - 1, sample_tokens)
            sampled = sampled.clamp(max=tile.length_tokens - 1).to(q.device)
            x_a, q_tile = x_a[sampled, None], q_tile[sampled]
        else:
            x_a, q_tile = x_a.mean()[None, None], q_tile.mean(0, keepdim=True)
        differences.append(x_a - q_tile @ k[initial : max(start, initial)].T * scale)
    return torch.cat(differences)
