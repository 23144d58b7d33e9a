# SPDX-License-Identifier: Apache-2.0
"""The engine ``portable`` compiled for GPUs that are not present: shared memory of each kernel, by case, as JSON.

    python -m tests.helpers.compiled_attention 89-128-64-plain 80-128-128-options

A case is a compute capability, head dim, block size in tokens, and the options of the heads: ``plain``; ``options`` for
skipped products and 8-bit scores; or ``pages`` for pages smaller than a block, and stripes. Kernels cannot be compiled
in Triton's interpreter, so this runs in a separate process. Nothing is launched.
"""

import json
import sys
from contextlib import ExitStack
from unittest.mock import patch

import torch

from tests.helpers.batches import random_batch, random_index
from tests.helpers.offline_compiler import Recorder, card
from vllm_sparse_kernels.attention import smooth_keys
from vllm_sparse_kernels.attention.options import AttendOptions
from vllm_sparse_kernels.attention.portable import engine as portable

KERNELS = {
    "attend_kernel": portable, "approximate_kernel": portable, "place_blocks_kernel": portable,
    "_round_keys_kernel": smooth_keys,
}  # fmt: skip


def shared_bytes(case: str) -> dict[str, int]:
    """Compile ``attend`` as the engine launches it on such a device.

    Args:
        case: such as ``89-128-64-plain``; see the module.

    Returns:
        Shared memory in bytes of each kernel that was launched, by name.
    """
    capability, head_dim, block_tokens, wanted = case.split("-")
    page_size, stripes = (16, 30) if wanted == "pages" else (128, 0)
    batch = random_batch([(600, 200)], 4, 2, int(head_dim), page_size, dtype=torch.bfloat16)
    index = random_index(batch, int(block_tokens), 0.2, stripes=stripes)
    options = None
    if wanted == "options":
        options = AttendOptions.from_heads([-5.0] * 4, [True, False, True, False], torch.device("cpu"))
    recorders = {name: Recorder(getattr(module, name)) for name, module in KERNELS.items()}
    with card(int(capability)), ExitStack() as stack:
        for name, module in KERNELS.items():
            stack.enter_context(patch.object(module, name, recorders[name]))
        means = torch.zeros(2, int(head_dim))
        stack.enter_context(patch.object(smooth_keys, "key_means", return_value=means))
        portable.attend(batch.call(index), torch.empty_like(batch.q), options=options)
    compiled = [kernel for recorder in recorders.values() for kernel in recorder.compiled]
    if any(kernel.metadata.target.arch != int(capability) for kernel in compiled):
        raise RuntimeError(f"{case}: compiled for {compiled[0].metadata.target}, an earlier case's target")
    return {
        name: recorder.compiled[0].metadata.shared for name, recorder in recorders.items() if recorder.compiled
    }  # fmt: skip


if __name__ == "__main__":
    print(json.dumps({case: shared_bytes(case) for case in sys.argv[1:]}))
