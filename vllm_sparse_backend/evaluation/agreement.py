# SPDX-License-Identifier: Apache-2.0
"""How far a server's next-token distributions are from a reference server's, on the same prompt.

This needs no ability of the model, unlike answers. vLLM's ``prompt_logprobs`` has the ``TOP`` most likely tokens of
each position, and the token that follows in the prompt. Tokens that both servers return count one by one. The
remaining probability of each server is one event. Merging events cannot raise a KL divergence (data processing
inequality), so the result is a lower bound of the divergence over the vocabulary.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

TOP = 20
"""Most likely tokens to ask for: the most that vLLM returns by default (``--max-logprobs``)."""

LEAST_REST = 1e-6
"""Lower limit of the remaining probability, which rounding of log-probabilities may turn negative."""


class Agreement(NamedTuple):
    """Means over positions."""

    kl: float
    """KL divergence of this server from the reference server, in nats: a lower bound."""
    top1: float
    """Share of positions at which a most likely token is the same. Tokens with equal log-probabilities tie."""


@dataclass(frozen=True)
class NextTokens:
    """Distributions of the next token: for each position, the log-probabilities of some tokens by token id."""

    positions: Sequence[Mapping[int, float]]

    @staticmethod
    def of(returned: Sequence[Mapping[str, Any] | None], places: Iterable[int]) -> "NextTokens":
        """Read a server's ``prompt_logprobs`` at ``places``: token indices of the prompt, from 1."""
        entries = [returned[place] or {} for place in places]
        return NextTokens([{int(token): entry["logprob"] for token, entry in tokens.items()} for tokens in entries])

    @staticmethod
    def parse(text: str) -> "NextTokens":
        pairs = [[pair.split(":") for pair in line.split()] for line in text.splitlines()]
        return NextTokens([{int(token): float(logprob) for token, logprob in line} for line in pairs])

    def __str__(self) -> str:
        """Return a line of ``token:logprob`` for each position, which a results file keeps."""
        return "\n".join(
            " ".join(f"{token}:{logprob:.4f}" for token, logprob in tokens.items()) for tokens in self.positions
        )

    def against(self, reference: "NextTokens") -> Agreement:
        """Compare with a reference server's distributions at the same positions."""
        pairs = list(zip(reference.positions, self.positions, strict=True))
        return Agreement(
            fmean(kl_divergence(*pair) for pair in pairs),
            fmean(not _likeliest(first).isdisjoint(_likeliest(second)) for first, second in pairs),
        )


def kl_divergence(reference: Mapping[int, float], other: Mapping[int, float]) -> float:
    """Return KL(reference ‖ other) of one position in nats, with one event for all tokens that are not in both."""
    shared = reference.keys() & other.keys()
    rest, other_rest = (
        max(1 - math.fsum(math.exp(tokens[token]) for token in shared), LEAST_REST) for tokens in (reference, other)
    )
    divergence = math.fsum(math.exp(reference[token]) * (reference[token] - other[token]) for token in shared)
    return divergence + rest * math.log(rest / other_rest)


def _likeliest(tokens: Mapping[int, float]) -> set[int]:
    most = max(tokens.values())
    return {token for token, logprob in tokens.items() if logprob == most}
