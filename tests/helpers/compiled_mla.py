# SPDX-License-Identifier: Apache-2.0
"""Compile the kernels of MLA's prefill for a GPU that is not present, and print the resource usage of each as JSON.

    python -m tests.helpers.compiled_mla 90

The argument is a compute capability. Nothing is run here.
"""

import json
import os
import subprocess
import sys

import torch

from tests.helpers.compiled_methods import Usage, recorded
from tests.helpers.offline_compiler import card
from vllm_sparse_kernels.mla import MlaAShape, MlaLimits, MlaPrefill, MlaRow, MlaTopP

STEPS = [
    [MlaRow(0, 300, 4000, 0, 0, 3000, 0)],
    [MlaRow(16, 129, 20000, 0, 1, 1, 17), MlaRow(145, 1, 5, 129, 2, 5, 0)],
]
"""Rows of chunks. One compiled variant of each kernel must be enough for their new tokens, and one for the chunks."""

METHODS = (
    MlaTopP(1.0), MlaAShape(128, 1000), MlaTopP(0.9, 0.25), MlaTopP(0.9, channels=64), MlaTopP(0.9, channels=128),
    MlaTopP(0.9, channels=128, queries="half"), MlaTopP(0.9, queries="half"),
)  # fmt: skip

ONE_TOKEN = [MlaRow(0, 1, 4000, 0, 0, 3000, 0)]

TWO_RUNS = [MlaRow(0, 385, 4000, 0, 0, 3000, 0), MlaRow(385, 100, 4000, 385, 0, 3000, 0)]
"""Rows whose chunk has two runs: the first has a set of four tiles, so the second begins at set 1."""

CASES = [(STEPS[0], 512, 0), (STEPS[1], 511, 1), (ONE_TOKEN, 1, 1), (TWO_RUNS, 512, 0)]
"""Rows, tokens of the call, and the place of its counter in a tensor of counters. Tokens decide the stride of the
log-sum-exp, which Triton would specialise if it is 1 or a multiple of 16. Counters at odd places and sets at odd places
are not aligned to 16 bytes, which Triton would specialise too."""


def compiled(target: int) -> dict[str, Usage]:
    """Return ``compiled_kernels`` from a separate process, in which kernels are not interpreted.

    Raises:
        RuntimeError: The process failed. The message is the end of its output.
    """
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.helpers.compiled_mla", str(target)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: ended with {done.returncode}: {done.stderr[-3000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def compiled_kernels(capability: int) -> dict[str, Usage]:
    """Compile the kernels of new tokens and of chunks: dense, A-shape and ``top_p``.

    Args:
        capability: of the card, such as 89.

    Returns:
        The usage by kernel.
    """
    kernels: dict[str, Usage] = {}
    heads, device = 4, torch.device("cpu")
    with card(capability), recorded(kernels):
        engine = MlaPrefill(
            num_heads=heads, scale=192**-0.5, qk_head_dim=192, v_head_dim=128, limits=MlaLimits(512, 3072),
            dtype=torch.bfloat16, device=device,
        )  # fmt: skip
        engine.use_kernels()
        tensors = [torch.zeros(512, heads, 192), torch.zeros(3072, heads, 192), torch.zeros(3072, heads, 256)]
        q, k, up = (x.to(torch.bfloat16) for x in tensors)
        counters = torch.zeros(2, dtype=torch.int64)
        for rows, num_tokens, place in CASES:
            out, lse = torch.zeros(num_tokens, heads, 128, dtype=torch.bfloat16), torch.zeros(heads, num_tokens)
            kept_pairs = counters[place : place + 1]
            new = [row._replace(key_start=0, num_keys=row.num_queries, key_position=row.query_position) for row in rows]
            for method in METHODS:
                for is_causal, part in (True, new), (False, rows):
                    engine.attend(
                        method, q[:num_tokens], k, up[..., 128:], part, is_causal=is_causal, out=out, lse=lse,
                        kept_pairs=kept_pairs,
                    )  # fmt: skip
    return kernels


if __name__ == "__main__":
    print(json.dumps(compiled_kernels(int(sys.argv[1]))))
