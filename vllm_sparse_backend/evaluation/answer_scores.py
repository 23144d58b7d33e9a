# SPDX-License-Identifier: Apache-2.0
"""Scores of a prompt's answers by the ranks of their tokens, and an answered prompt as a case of a results file."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BeforeValidator, PlainSerializer, TypeAdapter

from vllm_sparse_backend.evaluation.agreement import NextTokens
from vllm_sparse_backend.evaluation.answer_prompts import Prompt, PromptKey
from vllm_sparse_backend.evaluation.client import RequestError
from vllm_sparse_backend.evaluation.metrics_scrape import Pairs

TEXT_POSITIONS = 512
"""Positions of a prompt outside answers whose next-token distributions are compared: evenly spaced."""


@dataclass(frozen=True)
class PromptScores:
    """Scores of a prompt from a server's ``prompt_logprobs``."""

    seconds: float
    nats: float
    """Sum over the text outside inserted lines of -log(probability) of its tokens."""
    text_tokens: int
    """Number of tokens in that text."""
    ranks: list[list[int]]
    next_tokens: Mapping[str, Annotated[NextTokens, PlainSerializer(str), BeforeValidator(NextTokens.parse)]]
    """Distributions at some positions of the ``text``, and at all tokens of the ``answers``."""

    @staticmethod
    def of(prompt: Prompt, returned: Sequence[Mapping[str, Any] | None], seconds: float) -> "PromptScores":
        """Score a server's ``prompt_logprobs``: ``{token id: {"logprob": ..., "rank": ...}}`` for each token.

        Raises RequestError if a token's entry is missing, or has a number that a healthy model does not return. The
        entire response is then ignored.
        """
        ranks, logprobs = _ranks_and_logprobs(prompt.token_ids, returned)
        text_places = prompt.text_places
        sample = text_places[:: max(1, len(text_places) // TEXT_POSITIONS)]
        return PromptScores(
            seconds=round(seconds, 3),
            nats=math.fsum(-logprobs[place] for place in text_places),
            text_tokens=len(text_places),
            ranks=[ranks[begin:end] for begin, end in prompt.answers],
            next_tokens={
                "text": NextTokens.of(returned, sample),
                "answers": NextTokens.of(returned, prompt.answer_places),
            },
        )

    @property
    def mean_nats(self) -> float:
        return self.nats / self.text_tokens

    @property
    def right(self) -> list[bool]:
        """Whether each answer is right: all of its tokens have rank 1."""
        return [all(rank == 1 for rank in ranks) for ranks in self.ranks]

    @property
    def num_right(self) -> int:
        return sum(self.right)


def _ranks_and_logprobs(
    token_ids: Sequence[int], returned: Sequence[Mapping[str, Any] | None]
) -> tuple[list[int], list[float]]:
    """Return each token's rank, 1 for the most likely, and log-probability. The first token has zeros."""
    if len(returned) != len(token_ids):
        raise RequestError(f"prompt_logprobs: given {len(returned)}, expected {len(token_ids)} entries")
    ranks, logprobs = [0], [0.0]
    for place in range(1, len(token_ids)):
        entry = (returned[place] or {}).get(str(token_ids[place]))
        if entry is None:
            raise RequestError(f"prompt_logprobs: no entry for token {token_ids[place]} at position {place}")
        logprob, rank = entry.get("logprob"), entry.get("rank")
        if not isinstance(logprob, int | float) or not -1e5 < logprob <= 1e-3:
            raise RequestError(f"prompt_logprobs: log-probability {logprob} at position {place}")
        if not isinstance(rank, int) or rank < 1:
            raise RequestError(f"prompt_logprobs: rank {rank} at position {place}")
        ranks.append(rank)
        logprobs.append(logprob)
    return ranks, logprobs


@dataclass(frozen=True)
class AnsweredPrompt:
    """A server's answers to a prompt: a case of a results file."""

    label: str
    level: int | float | str | None
    key: PromptKey
    error: str | None
    """Why the request failed or its answer is incomplete; then there are no scores."""
    scores: PromptScores | None
    pairs: Pairs | None
    """None if the server does not count them."""
    dense_rows: Mapping[str, int] | None
    """Number of dense rows by reason, of a server that counts them."""

    @property
    def outcome(self) -> str:
        if self.scores is None:
            return f"failed: {self.error}"
        return f"{self.scores.num_right} of {len(self.scores.ranks)} right, {self.scores.seconds:.1f} s"

    def __str__(self) -> str:
        return f"{self.label}, {self.key.task}, {self.key.tokens:,} tokens, prompt {self.key.prompt + 1}"


CASE = TypeAdapter(AnsweredPrompt)


def read_cases(cases: Iterable[Mapping[str, Any]]) -> list[AnsweredPrompt]:
    """Return the answered prompts of a report or a results file."""
    return [CASE.validate_python(case) for case in cases]
