# SPDX-License-Identifier: Apache-2.0
"""What an index keeps, key by key: slow and plain, for tests and the lab."""

import torch

from vllm_sparse_kernels.index import SparseIndex, causal_pairs


def tile_keys(index: SparseIndex, head: int, i_tile: int) -> torch.Tensor:
    """Bool [last_position + 1]: keys that the tile keeps, before the causal mask."""
    tile = index.rows.tile_list[i_tile]
    blocks = torch.zeros(index.num_causal_blocks(tile), dtype=torch.bool, device=index.rows.device)
    blocks[index.blocks_of(head, i_tile)] = True
    keys = blocks.repeat_interleave(index.block_tokens)[: tile.last_position + 1]
    keys[index.stripes_of(head, i_tile)] = True
    return keys


def mask_of(index: SparseIndex, row: int) -> torch.Tensor:
    """Bool [num_heads, query_len, seq_len] of one row: True where the pair is kept, causal mask included."""
    rows = index.rows
    query_len, context_len = rows.query_lens[row], rows.context_lens[row]
    mask = torch.zeros(index.num_heads, query_len, context_len + query_len, dtype=torch.bool, device=rows.device)
    for i_tile in rows.tiles_of(row):
        tile = rows.tile_list[i_tile]
        first = tile.position - context_len
        for head in range(index.num_heads):
            mask[head, first : first + tile.length_tokens, : tile.last_position + 1] = tile_keys(index, head, i_tile)
    return mask.tril_(context_len)


def density_of(index: SparseIndex) -> float:
    """Kept (query, key) pairs over causal pairs, all rows and heads together."""
    kept = sum(int(mask_of(index, row).sum()) for row in range(index.rows.num_rows))
    return kept / (index.num_heads * causal_pairs(index.rows))
