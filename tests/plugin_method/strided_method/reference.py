# SPDX-License-Identifier: Apache-2.0
"""Strided attention in plain torch, key by key."""

from typing import TYPE_CHECKING

import torch

from vllm_sparse_kernels.index import SparseIndex
from vllm_sparse_kernels.paged import PagedCache

if TYPE_CHECKING:
    from strided_method.method import Strided


def select_strided(
    method: "Strided", q: torch.Tensor, cache: PagedCache, index: SparseIndex, heads: torch.Tensor, scale: float
) -> None:
    for i_tile, tile in enumerate(index.rows.tile_list):
        num_blocks = index.num_causal_blocks(tile)
        keys = torch.arange(num_blocks * index.block_tokens, device=q.device)
        for head, settings in zip(heads.tolist(), method.of_heads(len(heads)), strict=True):
            kept = (
                (keys < settings.sink_tokens)
                | (keys > tile.position - settings.local_tokens)
                | (keys % settings.stride_tokens == 0)
            )
            index.set_blocks(head, i_tile, kept.view(num_blocks, -1).any(1))
