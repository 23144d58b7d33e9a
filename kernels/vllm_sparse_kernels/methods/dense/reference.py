# SPDX-License-Identifier: Apache-2.0
"""Every causal block."""

import torch

from vllm_sparse_kernels.call import Call


def select_dense(call: Call) -> None:
    """Fill the lists of the call's heads in plain torch, as ``Dense.select`` does with kernels."""
    index = call.index
    for i_tile, tile in enumerate(index.rows.tile_list):
        for head in call.heads.heads:
            index.set_blocks(head, i_tile, torch.ones(index.num_causal_blocks(tile), dtype=torch.bool))
