# SPDX-License-Identifier: Apache-2.0
"""FlexPrefill's γ for each head (arXiv:2502.20766; as SharePrefill, arXiv:2505.19578, falls back to it).

The papers have one γ for all heads, 0.9 or 0.95, and no search: this procedure is ours. For each head the smallest γ
whose error is in the bound, by bisection in hundredths; a head that leaves out less than a tenth of the pairs runs
dense.

Heads differ in γ within one launch. ``base`` fixes all else, beyond the paper ``estimating: spread`` too: lines from
queries all over the chunk, without which the heads that retrieve keep what its last queries look for (docs/quality.md).
"""

from dataclasses import replace

from vllm_sparse_backend.profiling.measure import Bound, LayerJudge
from vllm_sparse_backend.profiling.sparsest import for_all, sparse_enough, sparsest
from vllm_sparse_kernels.methods.base import Method
from vllm_sparse_kernels.methods.flex_prefill.method import FlexVerticalSlash

PAPER = FlexVerticalSlash()

SPREAD = FlexVerticalSlash(estimating="spread", last_queries=256)
"""Beyond the paper."""

GAMMAS = (*(percent / 100 for percent in range(30, 100)), 0.995, 0.998, 0.999)
LADDER = (0.5, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98, 0.99, 0.995)


def search(judge: LayerJudge, bound: Bound, base: FlexVerticalSlash = PAPER) -> list[Method]:
    """One method for each head: ``base`` with the least of ``GAMMAS`` that holds the bound, or dense. Seven passes."""
    settings = [replace(base, gamma=gamma) for gamma in GAMMAS]
    found = sparsest(judge, bound, for_all(judge, settings))
    return [sparse_enough(found[head]) for head in range(judge.num_heads)]


def ladder(base: FlexVerticalSlash = PAPER) -> tuple[Method, ...]:
    """γ for all heads alike, the sparsest first."""
    return tuple(replace(base, gamma=gamma) for gamma in LADDER)
