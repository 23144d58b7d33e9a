# SPDX-License-Identifier: Apache-2.0
"""SpargeAttn's τ, θ and λ for each head (Zhang et al., arXiv:2502.18137, section 3.6).

Under an error of l₁ the pair of τ and θ with the largest sparsity, then the λ that skips most under l₂ (0.08 and 0.09
for Llama-3.1). The paper says "grid search"; its authors' code (``autotune.py``) says how, and so does this: θ in
sixteenths, at each of them τ to a thousandth and λ to a tenth by bisection, no higher θ once the sparsity is under a
tenth, and heads that leave out less than a tenth of the pairs run dense.

Where this departs from that code:

* ``bound`` is l₂, which the finished head is to hold; l₁ is 8/9 of it, the paper's ratio. Both bind the worst
  hundredth of queries too.
* The code searches prompt by prompt, and joins what it found by the largest τ, θ and λ of neighbouring θs. Here a
  setting is judged on all prompts, and holds if it does on each: nothing is left to join.
* λ is searched once, for the best pair, as the paper has it; the code searches one for every θ.
* θ begins at 0, not at −1: no block is less similar to itself (methods/sparge_attn/method.py).
* λ is searched only with ``skipping``; otherwise ``bound`` is l₁. The engines that are fastest, Hopper's and
  FlashAttention, have no skip, and the one that a layer with a λ runs on instead takes longer by a quarter or more.

Heads differ in all three within one launch.
"""

from collections.abc import Sequence
from dataclasses import replace

from vllm_sparse_backend.profiling.measure import Bound, LayerJudge
from vllm_sparse_backend.profiling.sparsest import LEAST_SPARSITY, Judged, sparse_enough, sparsest
from vllm_sparse_kernels.methods.base import Method
from vllm_sparse_kernels.methods.sparge_attn.method import SpargeAttn

PAPER = SpargeAttn()

FIRST_SHARE = 8 / 9
"""l₁ / l₂."""

TAUS = tuple(step / 1000 for step in range(1, 1000))
THETAS = tuple(step / 16 for step in range(16))
MARGINS = tuple(-step / 10 for step in range(1, 351))
"""λ in natural units, the one that skips most first. The code's range, 0 to 50 in base 2, ends where these do."""

LADDER = (0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.97, 0.98, 0.99, 0.995, 0.998)


def search(
    judge: LayerJudge,
    bound: Bound,
    base: SpargeAttn = PAPER,
    *,
    thetas: Sequence[float] = THETAS,
    skipping: bool = False,
) -> list[Method]:
    """One method for each head: ``base`` with the τ and θ, and with ``skipping`` the λ, that leave out most; or dense.

    Ten passes for each θ, and nine for λ.
    """
    first = bound.less(1 - FIRST_SHARE, bound.unseen) if skipping else bound
    found = _pairs(judge, first, base, thetas)
    methods = [sparse_enough(found.get(head)) for head in range(judge.num_heads)]
    return _with_margins(judge, bound, methods) if skipping else methods


def _pairs(judge: LayerJudge, bound: Bound, base: SpargeAttn, thetas: Sequence[float]) -> dict[int, Judged]:
    """Of each head the sparsest pair of τ and θ, where one holds."""
    found: dict[int, Judged] = {}
    heads = set(range(judge.num_heads))
    for theta in thetas:
        at_theta = tuple(replace(base, min_similarity=theta, kept_mass=tau) for tau in TAUS)
        for head, judged in sparsest(judge, bound, dict.fromkeys(sorted(heads), at_theta)).items():
            if judged.holds and (head not in found or judged.sparsity > found[head].sparsity):
                found[head] = judged
            if judged.sparsity < LEAST_SPARSITY:
                heads.remove(head)  # higher θs keep still more
        if not heads:
            break
    return found


def _with_margins(judge: LayerJudge, bound: Bound, methods: Sequence[Method]) -> list[Method]:
    """Each with the λ that skips most under the bound, if one does."""
    pairs = {head: method for head, method in enumerate(methods) if isinstance(method, SpargeAttn)}
    settings = {head: tuple(replace(pair, skip_margin=margin) for margin in MARGINS) for head, pair in pairs.items()}
    best = sparsest(judge, bound, settings)
    skipping = {head: judged.method for head, judged in best.items() if judged.holds}
    return [skipping.get(head, method) for head, method in enumerate(methods)]


def ladder(base: SpargeAttn = PAPER) -> tuple[Method, ...]:
    """τ for all heads alike, with the θ of ``base`` and no skip, the sparsest first."""
    return tuple(replace(base, kept_mass=tau) for tau in LADDER)
