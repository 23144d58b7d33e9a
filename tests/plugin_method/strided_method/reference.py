# SPDX-License-Identifier: Apache-2.0
"""Strided attention in plain torch, key by key."""

import torch

from vllm_sparse_kernels.call import Call


def select_strided(call: Call) -> None:
    index = call.index
    for i_tile, tile in enumerate(index.rows.tile_list):
        num_blocks = index.num_causal_blocks(tile)
        keys = torch.arange(num_blocks * index.block_tokens, device=call.q.device)
        for head, method in zip(call.heads.heads, call.heads.methods, strict=True):
            kept = (
                (keys < method.sink_tokens)
                | (keys > tile.position - method.local_tokens)
                | (keys % method.stride_tokens == 0)
            )
            index.set_blocks(head, i_tile, kept.view(num_blocks, -1).any(1))
