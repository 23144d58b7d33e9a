# SPDX-License-Identifier: Apache-2.0
"""SALE's τ for each head (Ji et al., 2025, section 3.3).

τ starts at τ₀ = 0.008 and is halved until the error of the head's output falls under the bound on every prompt; a head
for which it falls to 0.0001 or below runs dense. All heads are halved together: at most seven passes.

Where this departs from the paper: it bounds ‖O − Õ‖₁ / N, in units of the values (0.4 for Llama-3.1, 2.0 for Qwen-2.5).
Here a head's error is relative to its output, and the worst hundredth of queries has a bound of its own (``Figures``,
``Bound``).

Beyond the paper, if the caller asks: ``first_tau`` above 0.008. On most heads of a trained model τ = 0.1 answers as
dense attention does and keeps half of what 0.008 keeps (docs/quality.md). It is the paper's own halving, from further
up: 0.256 takes five passes more.

Heads differ in τ within one launch; the other parameters are those of ``base`` for all.
"""

from dataclasses import replace

from vllm_sparse_backend.profiling.measure import Bound, LayerJudge
from vllm_sparse_backend.profiling.sparsest import judge_all
from vllm_sparse_kernels.methods.base import Method
from vllm_sparse_kernels.methods.dense.method import Dense
from vllm_sparse_kernels.methods.sale.method import Sale
from vllm_sparse_kernels.select.parameters import require

PAPER = Sale()

FIRST_TAU = 0.008
LEAST_TAU = 1e-4
"""At most that: dense."""

BEYOND_TAU = 0.256
"""0.008 · 2⁵: as ``first_tau`` the widest search that ends on the paper's own τs."""


def search(judge: LayerJudge, bound: Bound, base: Sale = PAPER, *, first_tau: float = FIRST_TAU) -> list[Method]:
    """One method for each head: the largest τ of first_tau, first_tau / 2, … that holds the bound, or dense.

    Raises ValueError for a ``first_tau`` outside (0.0001, 1).
    """
    require(LEAST_TAU < first_tau < 1, "first_tau", first_tau, f"a number in ({LEAST_TAU}, 1)")
    found: dict[int, Method] = {}
    tau = first_tau
    while len(found) < judge.num_heads and tau > LEAST_TAU:
        method = replace(base, tau=tau)
        # Heads that are done repeat what they have: of all that is judged the cheapest.
        methods = [found.get(head, method) for head in range(judge.num_heads)]
        for head, judged in enumerate(judge_all(judge, bound, methods)):
            if judged.holds:
                found.setdefault(head, judged.method)
        tau /= 2
    return [found.get(head, Dense()) for head in range(judge.num_heads)]


def ladder(base: Sale = PAPER) -> tuple[Method, ...]:
    """τ for all heads alike, the sparsest first."""
    return tuple(replace(base, tau=tau) for tau in (0.256, 0.128, 0.064, 0.032, 0.016, 0.008, 0.004, 0.002, 0.001))
