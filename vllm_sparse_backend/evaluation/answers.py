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
        raise BenchError(_too_many_lines(num_tokens, len(begin_ids), facts, questions))
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


def _too_many_lines(num_tokens: int, num_begin: int, facts: Sequence[Line], questions: Sequence[Line]) -> str:
    """Return why the lines of a prompt do not fit, and how many facts fit with this tokenizer."""
    longest_fact, longest_question = (max(len(line.token_ids) for line in lines) for lines in (facts, questions))
    taken = num_begin + sum(len(line.token_ids) for line in (*facts, *questions))
    most_facts = (num_tokens // 2 - num_begin) // (longest_fact + longest_question)
    fewer = (
        f"ask for at most {most_facts} --facts or longer --lengths" if most_facts > 0 else "ask for longer --lengths"
    )
    return (
        f"{len(facts)} facts and their questions take {taken:,} of a prompt's {num_tokens:,} tokens, expected at most "
        f"half: the tokenizer makes up to {longest_fact} tokens of a fact, and up to {longest_question} of a question; "
        f"{fewer}"
    )


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
class Scores:
    ranks: list[list[int]]
    """Ranks of each answer's tokens; 1 is the most likely token."""
    nats: float
    others: int
    """Sum of negative log-probabilities, and number, of tokens outside answers, except the first token."""


def score(prompt: Prompt, returned: Sequence[Mapping[str, Any] | None]) -> Scores:
    """Score the answers by a server's ``prompt_logprobs``.

    ``returned`` has ``{token id: {"logprob": ..., "rank": ...}}`` for each token. Raises RequestError if a token's
    entry is missing, or has a number that a healthy model does not return. The entire response is then ignored.
    """
    token_ids = prompt.token_ids
    if not isinstance(returned, list) or len(returned) != len(token_ids):
        came = len(returned) if isinstance(returned, list) else returned
        raise RequestError(f"prompt_logprobs: given {came!r}, expected {len(token_ids)} entries")
    # The first token has no log-probability.
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
    inside = {place for answer in prompt.answers for place in range(answer.begin, answer.end)}
    others = [-logprob for place, logprob in enumerate(logprobs) if place and place not in inside]
    return Scores([ranks[answer.begin : answer.end] for answer in prompt.answers], math.fsum(others), len(others))


@dataclass(frozen=True)
class Share:
    """Right answers among all answers."""

    right: int
    total: int

    @property
    def share(self) -> float:
        return self.right / self.total if self.total else math.nan

    def __str__(self) -> str:
        return f"{self.right} of {self.total}" if self.total else ""


def standard_error(of_prompts: Sequence[Share]) -> float:
    """Return the standard error of the share over all prompts: binomial, or between prompts if that is larger.

    Answers of a prompt are not independent: a block of keys that is left out may lose several of them.
    """
    whole = Share(sum(share.right for share in of_prompts), sum(share.total for share in of_prompts))
    if not whole.total:
        return math.nan
    binomial, count = math.sqrt(whole.share * (1 - whole.share) / whole.total), len(of_prompts)
    if count < 2:
        return binomial
    squares = math.fsum((share.right - whole.share * share.total) ** 2 for share in of_prompts)
    return max(binomial, math.sqrt(squares * count / (count - 1)) / whole.total)
