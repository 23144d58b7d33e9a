# SPDX-License-Identifier: Apache-2.0
"""Every kernel that a method launches to select, compiled for Hopper without one: prints their names, by method.

    python -m tests.methods.compiled_methods

The interpreter takes what the compiler refuses: a name that changes its type in a loop, say. Nothing is run here.
"""

import json
from collections import defaultdict
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from triton.runtime.jit import JITFunction

from benchmarks.batches import random_batch
from benchmarks.offline import compiling_for
from vllm_sparse_kernels.attend import portable
from vllm_sparse_kernels.inputs import LayerInputs
from vllm_sparse_kernels.layer import Layer, layer_plan, run
from vllm_sparse_kernels.methods import METHODS
from vllm_sparse_kernels.methods.anchor_attention import method as anchors


def main() -> None:
    compiled = defaultdict[str, set[str]](set)
    for bulk in (False, True):  # keys by pointers, and as Hopper copies them
        known = partial(patch.object, attribute="supports_bulk", return_value=bulk)
        with known(portable), known(anchors):
            compile_all(compiled)
    print(json.dumps({name: sorted(of) for name, of in compiled.items()}))


def compile_all(compiled: dict[str, set[str]]) -> None:
    """Adds what each method launches."""
    batch, name = random_batch([(3000, 300), (0, 200)], 8, 2, 128, page_size=128, dtype=torch.bfloat16), ""
    launch = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        compiled[name].add(self.fn.__name__)
        return launch(self, *args, grid=grid, warmup=True, **options)

    with compiling_for(), patch.object(JITFunction, "run", compile_only), patch.object(torch, "empty", torch.zeros):
        for name, spec in METHODS.items():  # noqa: B007
            found = (spec.parameters(), spec.full, *(spec.parameters(**one).group_key for one in spec.ladder))
            for method in dict.fromkeys(found):
                layer = replace(Layer.of(layer_plan([method] * 8), 128, torch.device("cpu")), by_kernels=True)
                inputs = LayerInputs(batch.q, batch.cache, batch.rows, batch.scale)
                run(layer, inputs, torch.zeros_like(batch.q))


if __name__ == "__main__":
    main()
