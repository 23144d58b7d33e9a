# SPDX-License-Identifier: Apache-2.0
"""Width of a layer's index blocks: the single source for serving, memory bounds, warm-up, benchmarks and evaluation.

The heads of a layer share one index. Its blocks are as wide as all methods of the layer allow, because wide blocks run
fastest. Narrower blocks are used if three conditions are met:

* The methods of some heads benefit from them (``Method.finest_block_tokens``), and all other heads leave the width to
  these (``Method.leaves_width_to_others``). A few heads of A-shape thus do not force wide blocks on heads of ``top_p``,
  which would keep more pairs. Dense heads do: they keep most pairs, and run fastest in wide blocks.
* No head needs an option that only the engine ``portable`` has.
* The GPU's engines run them at almost no cost. These are the engines for Hopper: on ``hopper``, a kept pair costs at
  most 7 % more in blocks of 32 keys than in blocks of 128 (measured in pages of 128 tokens). ``flash`` reads units of
  16 keys in vLLM's usual pages, whatever the width of a block. The engine ``portable`` handles one block per step.
  Blocks of 32 keys do not fill its matrix products, so it runs them slowly.

Without a CUDA device, blocks are as on Hopper. Quality measured on a CPU is then the quality on such a GPU, and the
time of the references depends only on the number of kept keys.
"""

from collections.abc import Sequence

import torch

from vllm_sparse_kernels.attention.portable.engine import PORTABLE, widest_block
from vllm_sparse_kernels.cards import HOPPER_CAPABILITY, shared_bytes
from vllm_sparse_kernels.engine_choice import capability_of
from vllm_sparse_kernels.methods.base import Method


def index_block_tokens(methods: Sequence[Method], head_dim: int, device: torch.device, engine: str = "auto") -> int:
    """Return the width of a layer's index blocks, in keys. The engine ``portable`` excludes narrow blocks.

    If even blocks of 64 keys do not fit the device's shared memory (``widest_block``), the width is 64 for references.
    """
    usual = min(widest_block(head_dim, shared_bytes(device)) or 64, *(method.block_tokens for method in methods))
    if not _narrow_blocks_pay(methods, device, engine):
        return usual
    finest = [
        method.finest_block_tokens or method.block_tokens for method in methods if not method.leaves_width_to_others
    ]
    return min(usual, max(finest, default=usual))


def _narrow_blocks_pay(methods: Sequence[Method], device: torch.device, engine: str) -> bool:
    if engine == PORTABLE.name or any(method.int8_scores or method.skip_margin is not None for method in methods):
        return False
    return device.type != "cuda" or capability_of(device) == HOPPER_CAPABILITY
