# SPDX-License-Identifier: Apache-2.0
"""Every kernel that a method launches, compiled for a card that is not there: its shared memory, as JSON.

    python -m tests.helpers.compiled_methods 90 128
    python -m tests.helpers.compiled_methods 89 64 top_p sale

Arguments are a compute capability, a head dim, and methods; all methods without. The interpreter accepts what the
compiler refuses, such as a name that changes its type in a loop. Nothing is run here.
"""

import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from triton.runtime.jit import JITFunction

from tests.helpers.batches import random_batch
from tests.helpers.offline_compiler import SHARED_KIB, card
from vllm_sparse_kernels.attention import widest_block
from vllm_sparse_kernels.layer import Layer, layer_plan, run
from vllm_sparse_kernels.layer_inputs import LayerInputs
from vllm_sparse_kernels.methods import METHODS

MORE: dict[str, list[dict[str, Any]]] = {"top_p": [{"floor": 0.5}, {"channels": "low_rank"}]}
"""Settings of a method that take kernels which neither its defaults nor its ladder launch."""


def shared_bytes(capability: int, head_dim: int, names: Sequence[str]) -> dict[str, dict[str, int]]:
    """Compile what each method launches: at its defaults, where it keeps everything, along its ladder, and at ``MORE``.

    Args:
        capability: of the card, such as 89.
        head_dim: of the layer, whose dtype is bf16.
        names: methods.

    Returns:
        By method and kernel, the most shared memory of any variant in bytes. Empty if the card's shared memory holds no
        block of keys: such layers stay dense (``Fallback.SHARED_MEMORY``), and no kernel runs.
    """
    if widest_block(head_dim, SHARED_KIB[capability] << 10) is None:
        return {}
    most: dict[str, dict[str, int]] = defaultdict(dict)
    batch = random_batch([(3000, 300), (0, 200)], 8, 2, head_dim, page_size=128, dtype=torch.bfloat16)
    launch = JITFunction.run
    name = ""

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        compiled = launch(self, *args, grid=grid, warmup=True, **options)
        kernels = most[name]
        kernels[self.fn.__name__] = max(kernels.get(self.fn.__name__, 0), compiled.metadata.shared)
        return compiled

    for bulk in (True, False) if capability >= 90 else (False,):
        with card(capability, bulk), ExitStack() as stack:
            stack.enter_context(patch.object(JITFunction, "run", compile_only))
            stack.enter_context(patch.object(torch, "empty", torch.zeros))
            inputs = LayerInputs(batch.q, batch.cache, batch.rows, batch.scale)
            for name in names:
                spec = METHODS[name]
                settings = (spec.parameters(), spec.full, *(spec.parameters(**step).group_key for step in spec.ladder))
                more = (spec.parameters(**values) for values in MORE.get(name, []))
                for method in dict.fromkeys((*settings, *more)):
                    layer = replace(Layer.of(layer_plan([method] * 8), head_dim, torch.device("cpu")), by_kernels=True)
                    run(layer, inputs, torch.zeros_like(batch.q))
    return most


if __name__ == "__main__":
    print(json.dumps(shared_bytes(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:] or list(METHODS))))
