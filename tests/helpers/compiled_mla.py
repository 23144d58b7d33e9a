# SPDX-License-Identifier: Apache-2.0
"""Compile the kernels of MLA's prefill for a GPU that is not present, and return the resource usage of each.

Nothing is run here.
"""

import torch

from tests.helpers.compiled_methods import Usage, recorded
from tests.helpers.offline_compiler import card
from vllm_sparse_kernels.methods.minference import AShape
from vllm_sparse_kernels.methods.top_p import TopP
from vllm_sparse_kernels.mla import MlaPrefill, MlaRow

STEPS = [
    [MlaRow(0, 300, 4000, 0, 0, 3000, 0)],
    [MlaRow(16, 129, 20000, 0, 1, 1, 17), MlaRow(145, 1, 5, 129, 2, 5, 0)],
    [MlaRow(0, 1, 4000, 0, 0, 3000, 0)],
]
"""Rows of chunks. One compiled variant of each kernel must be enough for their new tokens, and one for the chunks."""

METHODS = TopP(kept_mass=1.0), AShape(128, 1000), TopP()

CASES = [(STEPS[0], 512, 0), (STEPS[1], 511, 1), (STEPS[2], 1, 1)]
"""Rows, tokens of the call, and the place of its counter in a tensor of counters. Tokens decide the stride of the
log-sum-exp, which Triton would specialise if it is 1 or a multiple of 16. Counters at odd places are not aligned to 16
bytes, which Triton would specialise too."""


def mla_kernels(capability: int) -> dict[str, Usage]:
    """Compile the kernels of new tokens and of chunks: dense, A-shape and ``top_p``.

    Args:
        capability: of the card, such as 89.

    Returns:
        The usage by kernel.
    """
    kernels: dict[str, Usage] = {}
    heads = 4
    with card(capability), recorded(kernels):
        engine = MlaPrefill(heads, 192**-0.5, 512, 3072, torch.device("cpu"), selects=True)
        tensors = [torch.zeros(512, heads, 192), torch.zeros(3072, heads, 192), torch.zeros(3072, heads, 256)]
        q, k, up = (x.to(torch.bfloat16) for x in tensors)
        counters = torch.zeros(2, dtype=torch.int64)
        for rows, num_tokens, place in CASES:
            out, lse = torch.zeros(num_tokens, heads, 128, dtype=torch.bfloat16), torch.zeros(heads, num_tokens)
            kept_pairs = counters[place : place + 1]
            new = [row._replace(key_start=0, num_keys=row.num_queries, key_position=row.query_position) for row in rows]
            for method in METHODS:
                for is_causal, part in (True, new), (False, rows):
                    call = engine.prepare(method, part, is_causal=is_causal)
                    engine.attend(call, q[:num_tokens], k, up[..., 128:], out=out, lse=lse, kept_pairs=kept_pairs)
    return kernels
