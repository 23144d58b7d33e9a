# SPDX-License-Identifier: Apache-2.0
"""SpargeAttn's τ, θ and λ for each head (Zhang et al., arXiv:2502.18137, section 3.6).

The search first finds the pair of τ and θ with the largest sparsity whose error is below l₁, then the λ that skips most
with an error below l₂ (0.08 and 0.09 for Llama-3.1). The paper states "grid search". The details are
those of the released code (``autotune.py``). θ increases in steps of 1/16. At each θ, bisection finds τ to within a
thousandth and λ to within a tenth. Once the sparsity is below a tenth, no higher θ is tried. Heads that leave out less
than a tenth of the pairs run dense.

Differences from the paper and from that code:

* In both, the error is the relative L1 distance of a head's entire output, a ratio of sums: Σ|O − O′| / Σ|O|. Here it
  is the mean over queries of each query's ratio, ‖o − o′‖₁ / ‖o‖₁ (``HeadErrors.error``), so that queries with small
  outputs count as much as others. Bounds on these two errors are not interchangeable.
* ``bound`` is l₂, which the final setting must meet; l₁ is 8/9 of it, the ratio of the paper's bounds for Llama-3.1.
  Both also bound the p99 of the errors of single queries.
* The code searches each prompt separately, and joins the results by the largest τ, θ and λ of neighbouring values of θ.
  Here a setting is judged on all prompts and must meet the bound on each, so there is nothing to join.
* λ is searched once, for the best pair, as in the paper; the code searches it for every θ.
* θ begins at 0, not at −1: no block has a lower self-similarity (methods/sparge_attn/method.py).
* λ is searched only with ``skipping``; otherwise ``bound`` is l₁. The fastest engines, Hopper's and FlashAttention, do
  not skip, and the engine that a layer with a λ needs takes longer by a quarter or more.

Heads may differ in all three parameters within one launch. The search takes at most ten passes for each θ, and nine for
λ.
"""

from dataclasses import replace

from vllm_sparse_backend.calibration.judge import Bound, CapturedLayer
from vllm_sparse_backend.calibration.search import IsAllowed, choose_sparsest, sparsest
from vllm_sparse_kernels.methods.base import Method
from vllm_sparse_kernels.methods.sparge_attn.method import SpargeAttn

FIRST_MARGIN = 1 / 9
"""1 − l₁ / l₂."""

TAUS = tuple(step / 1000 for step in range(1, 1000))
THETAS = tuple(step / 16 for step in range(16))
MARGINS = tuple(-step / 10 for step in range(1, 351))
"""Candidates for λ in natural units, in order of decreasing skipping. Their range is the code's 0 to 50 in base 2."""


def choose_thresholds(
    judge: CapturedLayer, bound: Bound, is_allowed: IsAllowed, *, skipping: bool = False
) -> list[Method]:
    """Choose each head's pair of τ and θ that leaves out the most pairs, then with ``skipping`` its λ."""
    first_bound = bound.with_margin(FIRST_MARGIN) if skipping else bound
    ladders = ([SpargeAttn(min_similarity=theta, kept_mass=tau) for tau in TAUS] for theta in THETAS)
    methods = choose_sparsest(judge, first_bound, is_allowed, ladders=ladders)
    return _with_margins(judge, bound, methods, is_allowed) if skipping else methods


def _with_margins(judge: CapturedLayer, bound: Bound, methods: list[Method], is_allowed: IsAllowed) -> list[Method]:
    """Add to each method the λ that skips most within the bound, if there is such a λ."""
    settings = {
        head: [setting for margin in MARGINS if is_allowed(head, setting := replace(method, skip_margin=margin))]
        for head, method in enumerate(methods)
        if isinstance(method, SpargeAttn)
    }
    best = sparsest(judge, bound, settings)
    return [best[i].method if i in best and best[i].holds else method for i, method in enumerate(methods)]
