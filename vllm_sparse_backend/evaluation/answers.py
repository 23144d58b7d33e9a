# SPDX-License-Identifier: Apache-2.0
"""Answers inside the prompt: questions whose answers are part of the prompt, scored by the ranks of their tokens.

The answer to a question at a prompt's end is decoded. Decoding is dense and hides the losses of a sparse prefill. Here,
facts are spread over a text, each fact is asked for and answered later in the text, and the whole text is prefilled. A
server that returns log-probabilities of the prompt's tokens (``prompt_logprobs``, vLLM's addition to OpenAI's API)
gives the rank of each token of an answer. The answer is right if all of its tokens have rank 1.
"""

import hashlib
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from vllm_sparse_backend.evaluation.client import RequestError
from vllm_sparse_backend.evaluation.report import BenchError

Encode = Callable[[str], list[int]]
"""Token ids of a text, without special tokens around them."""

_ADJECTIVES = (
    "amber crimson silent golden frozen hidden ancient velvet copper lunar misty scarlet broken quiet rapid gentle"
)
_KINDS = (
    "falcon tiger lantern meadow harbor glacier orchid compass anchor willow raven summit beacon badger cedar dragon"
)
_PLACES = "river stone forest tower bridge valley garden island canyon temple harbor engine desert castle planet market"
NAMES = [f"{a} {k} {p}" for a in _ADJECTIVES.split() for k in _KINDS.split() for p in _PLACES.split()]


@dataclass(frozen=True)
class Templates:
    """Lines that state a fact, and that ask and answer; ``{name}`` and ``{value}`` (seven digits) are placeholders."""

    fact: str = "# The magic number of {name} is {value}."
    question: str = "# Question: what is the magic number of {name}? Answer: {value}."


@dataclass(frozen=True)
class Answer:
    """A question's answer. Places are token indices in the prompt, from 0."""

    name: str
    value: str
    fact_at: int
    """Place of the value's first token in the statement."""
    begin: int
    end: int
    """Positions of the value's tokens in the question; ``end`` is after the last token."""

    @property
    def distance(self) -> int:
        return self.begin - self.fact_at


@dataclass(frozen=True)
class Prompt:
    token_ids: list[int]
    answers: tuple[Answer, ...]

    @property
    def answer_places(self) -> list[int]:
        """Token indices of all answers."""
        return [place for answer in self.answers for place in range(answer.begin, answer.end)]

    @property
    def text_places(self) -> list[int]:
        """Token indices outside answers, except the first, which no token precedes."""
        inside = set(self.answer_places)
        return [place for place in range(1, len(self.token_ids)) if place not in inside]

    @property
    def sha256(self) -> str:
        return hashlib.sha256(" ".join(map(str, self.token_ids)).encode()).hexdigest()


@dataclass(frozen=True)
class Line:
    token_ids: list[int]
    begin: int
    end: int
    """Positions of the value's tokens; ``end`` is after the last token."""

    @staticmethod
    def of(encode: Encode, template: str, name: str, value: str) -> "Line":
        """Encode a line, and locate the value's tokens: those that change if every digit changes.

        This works with any tokenizer: a token may be one digit, three digits, or a space and a digit.
        """
        changed = "".join(str(int(digit) % 9 + 1) for digit in value)
        ids, other = (
            encode("\n" + template.replace("{name}", name).replace("{value}", v) + "\n") for v in (value, changed)
        )
        begin = _equal(ids, other)
        end = len(ids) - _equal(ids[begin:][::-1], other[begin:][::-1])
        if begin >= end:
            raise BenchError(f"the tokenizer gives {value} and {changed} the same tokens: answers cannot be scored")
        return Line(ids, begin, end)


def _equal(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b)))


def build_prompt(
    encode: Encode,
    begin_ids: Sequence[int],
    text_ids: Sequence[int],
    num_tokens: int,
    num_facts: int,
    templates: Templates,
    rng: random.Random,
) -> Prompt:
    """Build a prompt of ``num_tokens``: ``begin_ids``, then ``text_ids`` with facts and questions inserted.

    The two places of a fact are uniformly random in the text, and the question is at the later place. Raises BenchError
    if the lines do not fit or the text is too short.
    """
    names = rng.sample(NAMES, num_facts)
    values = [str(value) for value in rng.sample(range(1_000_000, 10_000_000), num_facts)]
    facts, questions = (
        [Line.of(encode, template, *name_and_value) for name_and_value in zip(names, values)]
        for template in (templates.fact, templates.question)
    )
    room = num_tokens - len(begin_ids) - sum(len(line.token_ids) for line in (*facts, *questions))
    if 2 * room < num_tokens:
        raise BenchError(
            f"{num_facts} facts and their questions take {num_tokens - room:,} of a prompt's {num_tokens:,} tokens, "
            "expected at most half; ask for fewer --facts or longer --lengths"
        )
    if len(text_ids) < room:
        raise BenchError(f"text: given {len(text_ids):,} tokens, expected at least {room:,}")
    cuts = [sorted((rng.randint(0, room), rng.randint(0, room))) for _ in names]
    threads = [(fact.token_ids, question.token_ids) for fact, question in zip(facts, questions)]
    ids, places = weave(begin_ids, text_ids[:room], threads, cuts)
    answers = tuple(
        Answer(name, value, stated_at + fact.begin, asked_at + question.begin, asked_at + question.end)
        for name, value, fact, question, (stated_at, asked_at) in zip(names, values, facts, questions, places)
    )
    return Prompt(ids, answers)


def weave(
    begin_ids: Sequence[int],
    text_ids: Sequence[int],
    threads: Sequence[Sequence[Sequence[int]]],
    cuts: Sequence[Sequence[int]],
) -> tuple[list[int], list[list[int]]]:
    """Insert lines into a text that follows ``begin_ids``, and return the tokens and the place of each line.

    A thread is a sequence of lines. ``cuts`` has the number of the text's tokens before each line, in
    ascending order.
    """
    placed = sorted((cut, step, i) for i, thread_cuts in enumerate(cuts) for step, cut in enumerate(thread_cuts))
    ids, at = list(begin_ids), 0
    places = [[0] * len(thread_cuts) for thread_cuts in cuts]
    for cut, step, i in placed:
        ids += text_ids[at:cut]
        at = cut
        places[i][step] = len(ids)
        ids += threads[i][step]
    ids += text_ids[at:]
    return ids, places


@dataclass(frozen=True)
class TokenScores:
    """How a server ranks each token of a prompt: 1 is the most likely token. The first token has zeros."""

    ranks: list[int]
    logprobs: list[float]

    @staticmethod
    def of(token_ids: Sequence[int], returned: Sequence[Mapping[str, Any] | None]) -> "TokenScores":
        """Read a server's ``prompt_logprobs``: ``{token id: {"logprob": ..., "rank": ...}}`` for each token.

        Raises RequestError if a token's entry is missing, or has a number that a healthy model does not return. The
        entire response is then ignored.
        """
        if len(returned) != len(token_ids):
            raise RequestError(f"prompt_logprobs: given {len(returned)}, expected {len(token_ids)} entries")
        scores = TokenScores([0], [0.0])
        for place in range(1, len(token_ids)):
            entry = (returned[place] or {}).get(str(token_ids[place]))
            if entry is None:
                raise RequestError(f"prompt_logprobs: no entry for token {token_ids[place]} at position {place}")
            logprob, rank = entry.get("logprob"), entry.get("rank")
            if not isinstance(logprob, int | float) or not -1e5 < logprob <= 1e-3:
                raise RequestError(f"prompt_logprobs: log-probability {logprob} at position {place}")
            if not isinstance(rank, int) or rank < 1:
                raise RequestError(f"prompt_logprobs: rank {rank} at position {place}")
            scores.ranks.append(rank)
            scores.logprobs.append(logprob)
        return scores

    def of_answers(self, prompt: Prompt) -> list[list[int]]:
        """Return the ranks of each answer's tokens."""
        return [self.ranks[answer.begin : answer.end] for answer in prompt.answers]


def standard_error(answers: Sequence[Sequence[bool]]) -> float:
    """Return the standard error of the share of right answers, which are given by prompt.

    It is the binomial error, or the error between prompts if that is larger: answers of a prompt are not independent,
    because a block of keys that is left out may lose several of them.
    """
    total, count = sum(map(len, answers)), len(answers)
    if not total:
        return math.nan
    share = sum(map(sum, answers)) / total
    binomial = math.sqrt(share * (1 - share) / total)
    if count < 2:
        return binomial
    squares = math.fsum((sum(of_prompt) - share * len(of_prompt)) ** 2 for of_prompt in answers)
    return max(binomial, math.sqrt(squares * count / (count - 1)) / total)
