# SPDX-License-Identifier: Apache-2.0
"""The demo's text: simple prose with facts strewn over it, and questions about two of them, whose answers are known."""

import random
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

from vllm_sparse_backend.evaluation.answers import NAMES, Templates
from vllm_sparse_backend.evaluation.prompt_texts import prose

NUM_FACTS = 12
ASKED = (5, 9)
"""Which of the facts are asked for, by their order in the text: both lie past the demo's dense first tokens."""


@dataclass(frozen=True)
class Question:
    text: str
    name: str
    question: str
    """Without its answer, as a user would ask at the text's end."""
    value: str

    def is_answered_by(self, answer: str | None) -> bool:
        return self.value in (answer or "")


def make_questions(count_tokens: Callable[[str], int], tokens: int) -> list[Question]:
    """One for each of ASKED, all about one text that ``count_tokens`` finds at least ``tokens`` long, and little more.

    As many lines lie between any two facts.
    """
    rng = random.Random(0)
    names = rng.sample(NAMES, NUM_FACTS)
    values = [str(value) for value in rng.sample(range(1_000_000, 10_000_000), NUM_FACTS)]
    templates = Templates()
    facts = [templates.fact.replace("{name}", name).replace("{value}", value) for name, value in zip(names, values)]
    lines = prose(tokens, 0).splitlines()  # a word is a token at least
    num_lines = bisect_left(range(len(lines)), tokens, 1, key=lambda n: count_tokens(_strewn(lines[:n], facts)))
    text = _strewn(lines[:num_lines], facts)
    asks = templates.question[: templates.question.index(" Answer:")]
    return [Question(text, names[i], asks.replace("{name}", names[i]), values[i]) for i in ASKED]


def _strewn(lines: list[str], facts: list[str]) -> str:
    parts: list[str] = []
    for i, fact in enumerate(facts):
        parts += [*lines[len(lines) * i // len(facts) : len(lines) * (i + 1) // len(facts)], fact]
    return "\n".join(parts)
