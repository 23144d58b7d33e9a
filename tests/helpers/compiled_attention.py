# SPDX-License-Identifier: Apache-2.0
"""The engine ``portable`` compiled for GPUs that are not present: usage of each kernel, by case.

A case is a compute capability, head dim, block size in tokens, and the options of the heads: ``plain``; ``options`` for
skipped products and 8-bit scores; or ``stripes`` for an index that has some. Nothing is launched.
"""

import torch

from tests.helpers.batches import random_batch, random_index
from tests.helpers.compiled_methods import Usage, recorded
from tests.helpers.offline_compiler import card
from vllm_sparse_kernels.attention.options import AttendOptions
from vllm_sparse_kernels.attention.portable import engine as portable


def attention_kernels(case: str) -> dict[str, Usage]:
    """Compile ``attend`` as the engine launches it on such a device, and return the usage of each kernel by name.

    Args:
        case: such as ``89-128-64-plain``; see the module.
    """
    capability, head_dim, block_tokens, wanted = case.split("-")
    batch = random_batch([(600, 200)], 4, 2, int(head_dim), page_size=16, dtype=torch.bfloat16)
    index = random_index(batch, int(block_tokens), 0.2, stripes=30 if wanted == "stripes" else 0)
    options = None
    if wanted == "options":
        options = AttendOptions.from_heads([-5.0] * 4, [True, False, True, False], torch.device("cpu"))
    kernels: dict[str, Usage] = {}
    with card(int(capability)), recorded(kernels):
        portable.attend(batch.call(index), torch.empty_like(batch.q), options=options)
    return kernels
