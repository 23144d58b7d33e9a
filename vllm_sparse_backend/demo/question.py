# SPDX-License-Identifier: Apache-2.0
"""The demo's text: simple prose with facts inserted, and questions about two of them with known answers."""

import random
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

from vllm_sparse_backend.evaluation.answers import NAMES, Templates
from vllm_sparse_backend.evaluation.prompt_texts import prose

NUM_FACTS = 12
ASKED = (5, 9)
"""Numbers, in text order, of the facts in the questions. All are after the demo's dense first tokens."""


@dataclass(frozen=True)
class Question:
    """A text with facts, and a question about one of them."""

    text: str
    name: str
    question: str
    """The question without its answer, for the end of the text."""
    value: str

    def is_answered_by(self, answer: str | None) -> bool:
        return self.value in (answer or "")


def make_questions(count_tokens: Callable[[str], int], tokens: int) -> list[Question]:
    """Return a question for each fact of ASKED, about one text of at least ``tokens`` tokens by ``count_tokens``.

    The text is only a little longer, and has the same number of lines between any two neighbouring facts.
    """
    rng = random.Random(0)
    names = rng.sample(NAMES, NUM_FACTS)
    values = [str(value) for value in rng.sample(range(1_000_000, 10_000_000), NUM_FACTS)]
    templates = Templates()
    facts = [templates.fact.replace("{name}", name).replace("{value}", value) for name, value in zip(names, values)]
    lines = prose(tokens, 0).splitlines()  # a word has at least one token
    num_lines = bisect_left(range(len(lines)), tokens, 1, key=lambda n: count_tokens(_strewn(lines[:n], facts)))
    text = _strewn(lines[:num_lines], facts)
    asks = templates.question[: templates.question.index(" Answer:")]
    return [Question(text, names[i], asks.replace("{name}", names[i]), values[i]) for i in ASKED]


def _strewn(lines: list[str], facts: list[str]) -> str:
    parts: list[str] = []
    for i, fact in enumerate(facts):
        parts += [*lines[len(lines) * i // len(facts) : len(lines) * (i + 1) // len(facts)], fact]
    return "\n".join(parts)
