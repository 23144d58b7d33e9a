"""Softmax attention under the index's own mask, tile by tile, in float32 (or the dtype asked for)."""

import torch

from vllm_sparse_kernels.index import SparseIndex
from vllm_sparse_kernels.paged import PagedCache


def attend(
    q: torch.Tensor,
    cache: PagedCache,
    index: SparseIndex,
    out: torch.Tensor,
    scale: float,
    lse: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Write softmax(scale · q kᵀ + mask) v of the index's rows into ``out``, and its log-sum-exp into ``lse``.

    q and out are [num_tokens, num_heads, head_dim], lse is [num_heads, num_tokens]; other tokens stay untouched.
    """
    rows, group = index.rows, q.shape[1] // cache.num_kv_heads
    for row in range(rows.num_rows):
        keys, values = (x.to(dtype) for x in cache.gather(rows.block_table[row], rows.seq_lens[row]))
        for i_tile in range(rows.tile_starts[row], rows.tile_starts[row + 1]):
            tile = rows.tile_list[i_tile]
            tokens = slice(tile.token, tile.token + tile.length_tokens)
            positions = tile.position + torch.arange(tile.length_tokens, device=q.device)
            for head in range(index.num_heads):
                kept = index.tile_keys(head, i_tile).nonzero().flatten()
                k, v = keys[kept, head // group], values[kept, head // group]
                scores = (q[tokens, head].to(dtype) @ k.T) * scale
                scores.masked_fill_(kept[None, :] > positions[:, None], -torch.inf)
                out[tokens, head] = (scores.softmax(-1) @ v).to(out.dtype)
                if lse is not None:
                    lse[head, tokens] = scores.logsumexp(-1).to(lse.dtype)
