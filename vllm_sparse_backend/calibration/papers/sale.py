# SPDX-License-Identifier: Apache-2.0
"""SALE's τ for each head (Ji et al., arXiv:2505.24179, section 3.3 and appendix C).

τ begins at 0.008 and is halved until Err(τ) = ‖O − Õ‖₁ / N (``HeadErrors.absolute``) is below the bound on every
prompt: 0.4 for Llama-3.1-8B, 2.0 for Qwen2.5-32B. The authors' code stops at 0.0001: a head that misses the bound at
every larger τ is dense.
"""

from vllm_sparse_backend.calibration.judge import Bound, CapturedLayer
from vllm_sparse_backend.calibration.search import IsAllowed, Judged, judge_all
from vllm_sparse_kernels.methods.base import Method
from vllm_sparse_kernels.methods.dense.method import Dense
from vllm_sparse_kernels.methods.sale.method import Sale

TAUS = tuple(0.008 / 2**halvings for halvings in range(7))
"""Values of τ in the order in which they are tried; the next one would be below 0.0001."""


def choose_threshold(judge: CapturedLayer, bound: Bound, is_allowed: IsAllowed) -> list[Method]:
    """Choose each head's largest τ within the bound."""
    chosen: list[Judged | None] = [None] * judge.num_heads
    for tau in TAUS:
        setting = Sale(tau=tau)
        for head, judged in enumerate(judge_all(judge, bound, [setting] * judge.num_heads)):
            if chosen[head] is None and judged.holds and is_allowed(head, setting):
                chosen[head] = judged
        if None not in chosen:
            break
    return [judged.method if judged is not None and judged.pays else Dense() for judged in chosen]
