# SPDX-License-Identifier: Apache-2.0
"""AnchorAttention's θ for each head (Zhang et al., 2025).

The paper has one θ for all heads of all models, 12, under which what is left out has "almost no impact" (section 4.1):
it searches nothing, and this procedure is ours. For each head: the smallest θ, and so the largest sparsity, whose error
is in the bound, by bisection of a few values, as raising θ never drops a key. A head that leaves out less than a tenth
of the pairs runs dense.

Heads differ in θ within one launch. ``base`` fixes all else: ``step_tiles``, and beyond the paper ``sample_tokens``,
``whole_blocks``, ``window_tokens``.
A vote of mean queries cannot see what a single query looks for: where heads retrieve, it
holds no bound on their worst queries, and they run dense. ``SAMPLED`` votes by single queries.
"""

from collections.abc import Sequence
from dataclasses import replace

from vllm_sparse_backend.profiling.measure import Bound, LayerJudge
from vllm_sparse_backend.profiling.sparsest import for_all, sparse_enough, sparsest
from vllm_sparse_kernels.methods.anchor_attention.method import AnchorAttention
from vllm_sparse_kernels.methods.base import Method

PAPER = AnchorAttention()

SAMPLED = AnchorAttention(step_tiles=4, sample_tokens=8, whole_blocks=True)
"""Beyond the paper: of what was measured what answers best inside a prompt for its price (docs/quality.md)."""

THETAS = (2.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 12.0, 13.0, 14.0, 16.0, 18.0, 20.0)
SAMPLED_THETAS = (0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0)
"""A query's own score, held against its own anchor, needs far less."""


def thetas(base: AnchorAttention) -> Sequence[float]:
    """The values of θ to choose from, with all else as in ``base``; ascending."""
    return SAMPLED_THETAS if base.sample_tokens else THETAS


def search(judge: LayerJudge, bound: Bound, base: AnchorAttention = PAPER) -> list[Method]:
    """One method for each head: ``base`` with the least of ``thetas(base)`` that holds the bound, or dense.

    Four passes.
    """
    settings = [replace(base, theta=theta) for theta in thetas(base)]
    found = sparsest(judge, bound, for_all(judge, settings))
    return [sparse_enough(found[head]) for head in range(judge.num_heads)]


def ladder(base: AnchorAttention = PAPER) -> tuple[Method, ...]:
    """Every second θ for all heads alike, the sparsest first: the paper's 12 among them, and of sampled votes 0, which
    heads that look nowhere afar take."""
    return tuple(replace(base, theta=theta) for theta in thetas(base)[0 if base.sample_tokens else 1 :: 2])
