# SPDX-License-Identifier: Apache-2.0
"""How wide the blocks of a layer's index are. Whoever makes an index for a server's layer, or reckons with one, asks
here, so that memory, warm-up, benchmarks and evaluation speak of what is served.

The heads of a layer share one index, whose blocks are as wide as all of their methods allow: wide ones run fastest.
Blocks narrower than that (``Method.finest_block_tokens``) are made where every head's method gains from them, no head
asks for what only the engine ``portable`` has, and the engines take them almost for nothing. Those are Hopper's: on
``hopper`` a kept pair costs at most 7 % more in blocks of 32 keys than in blocks of 128, and FlashAttention-3, on which
``flash`` runs, takes pages of 32 as it takes those of 128. To ``portable`` each block is a step of its own, whose
matrix products 32 keys do not fill: it runs on them where it must, but slowly.

Without a CUDA device blocks are as on Hopper. References select and attend there, for which fewer keys are less work
whatever the width, and what a CPU tells of a method's quality is then what such a card serves.
"""

from collections.abc import Sequence

import torch

from vllm_sparse_kernels.attention.portable.engine import PORTABLE, shared_bytes, widest_block
from vllm_sparse_kernels.methods.base import Method

HOPPER = (9, 0)
"""Compute capability of the GPUs (H100, H200) whose engines take narrow blocks."""


def index_block_tokens(methods: Sequence[Method], head_dim: int, device: torch.device, engine: str = "auto") -> int:
    """Return keys of a block of the index that heads with these methods share.

    Where not even blocks of 64 fit the device's shared memory (``widest_block``) they are 64 all the same, for
    references.

    Args:
        methods: each head's own method.
        head_dim: channels of a head.
        device: where the index lies.
        engine: name of the engine that is configured; any but ``portable`` leaves it to the device.

    Returns:
        128, 64 or 32.
    """
    usual = min(widest_block(head_dim, shared_bytes(device)) or 64, *(method.block_tokens for method in methods))
    if not _narrow_blocks_pay(methods, device, engine):
        return usual
    return min(usual, max(method.finest_block_tokens or method.block_tokens for method in methods))


def _narrow_blocks_pay(methods: Sequence[Method], device: torch.device, engine: str) -> bool:
    if engine == PORTABLE.name or any(method.int8_scores or method.skip_margin is not None for method in methods):
        return False
    return device.type != "cuda" or torch.cuda.get_device_capability(device) == HOPPER
