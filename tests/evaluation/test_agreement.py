# SPDX-License-Identifier: Apache-2.0
"""The KL divergence and the top-1 agreement of two servers' next-token distributions."""

import math

import pytest
import torch

from vllm_sparse_backend.evaluation.agreement import NextTokens, kl_divergence

VOCABULARY = 50


def distribution(seed: int, scale: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(VOCABULARY, generator=generator, dtype=torch.float64)).log_softmax(0)


def top(logprobs: torch.Tensor, k: int, actual: int) -> dict[int, float]:
    """Return the entries that vLLM returns: of the ``k`` most likely tokens, and of the prompt's own token."""
    return {int(token): float(logprobs[token]) for token in [actual, *logprobs.topk(k).indices]}


@pytest.mark.parametrize("k", [1, 5, 20, VOCABULARY])
@pytest.mark.parametrize("scale", [0.5, 2.0, 8.0])
def test_the_divergence_is_a_lower_bound_and_exact_over_the_vocabulary(k: int, scale: float) -> None:
    for seed in range(20):
        reference, near = distribution(seed, scale), distribution(seed + 100, scale)
        other = (reference + 0.3 * near).log_softmax(0)
        exact = float((reference.exp() * (reference - other)).sum())
        bound = kl_divergence(top(reference, k, seed), top(other, k, seed))
        assert -1e-9 <= bound <= exact + 1e-9
        if k == VOCABULARY:
            assert bound == pytest.approx(exact, abs=1e-9)


def test_positions_average_and_ties_agree() -> None:
    half, most = math.log(0.5), math.log(0.9)
    returned = [None, {"1": {"logprob": half}, "2": {"logprob": half}}, {"3": {"logprob": most}}]
    reference = NextTokens.parse(str(NextTokens.of(returned, [1, 2])))
    assert reference.against(reference) == (0, 1)
    kl, top1 = NextTokens([{1: most}, {4: most}]).against(reference)
    assert top1 == 0.5  # token 1 ties for the first place; 3 and 4 differ
    # The second position shares no token, so all of its probability is one event.
    assert kl == pytest.approx((0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1)) / 2, abs=1e-3)
