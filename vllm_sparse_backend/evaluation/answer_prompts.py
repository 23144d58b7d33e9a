# SPDX-License-Identifier: Apache-2.0
"""Prompts of ``eval answers``: questions whose answers are part of the prompt.

The answer to a question at a prompt's end is decoded. Decoding is dense and hides the losses of a sparse prefill. Here,
facts are spread over a text, each fact is asked for and answered later in the text, and the whole text is prefilled. A
server that returns log-probabilities of the prompt's tokens (``prompt_logprobs``, vLLM's addition to OpenAI's API)
gives the rank of each token of an answer. The answer is right if all of its tokens have rank 1.
"""

import random
import string
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, starmap, takewhile
from typing import NamedTuple

from vllm_sparse_backend.evaluation.report import BenchError
from vllm_sparse_backend.prompts.lookups import Encode, weave

Span = tuple[int, int]
"""Places of the first token, and after the last token, in a line or prompt."""

_CHANGED = str.maketrans(
    string.digits + string.ascii_letters,
    string.digits[1:] + "1" + string.ascii_letters[1:] + "a",
)


@dataclass(frozen=True)
class Line:
    token_ids: list[int]
    answers: list[Span]


@dataclass(frozen=True)
class Statement:
    """A line of a prompt; ``{}`` in its text stands for each of the answers that it contains."""

    text: str
    answers: tuple[str, ...] = ()

    def encode(self, encode: Encode) -> Line:
        """Encode the line, and locate the tokens of each answer: those that change if all of its characters change.

        This works with any tokenizer: a token may be one digit, three digits, or a space and a digit.
        """
        ids = self._encode(encode, self.answers)
        spans = []
        for i, answer in enumerate(self.answers):
            changed = answer.translate(_CHANGED)
            other = self._encode(encode, [*self.answers[:i], changed, *self.answers[i + 1 :]])
            begin = _equal(ids, other)
            end = len(ids) - _equal(ids[begin:][::-1], other[begin:][::-1])
            if begin >= end:
                raise BenchError(
                    f"the tokenizer gives {answer} and {changed} the same tokens: answers cannot be scored"
                )
            spans.append((begin, end))
        return Line(ids, spans)

    def _encode(self, encode: Encode, answers: Sequence[str]) -> list[int]:
        return encode(f"\n{self.text.format(*answers)}\n")


Thread = list[Statement]
"""Statements in the order in which they appear in a prompt; the last one asks and answers."""


def _equal(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b)))


class PromptKey(NamedTuple):
    task: str
    tokens: int
    prompt: int
    """Index among prompts of this task and length."""


@dataclass(frozen=True)
class Prompt:
    token_ids: list[int]
    answers: list[Span]
    lines: list[Span]
    """Inserted lines, which contain the answers."""

    @property
    def answer_places(self) -> list[int]:
        """Token indices of all answers."""
        return list(chain.from_iterable(starmap(range, self.answers)))

    @property
    def text_places(self) -> list[int]:
        """Token indices outside inserted lines, except the first, which no token precedes."""
        inside = set(chain.from_iterable(starmap(range, self.lines)))
        return [place for place in range(1, len(self.token_ids)) if place not in inside]


def build_prompt(
    encode: Encode,
    begin_ids: Sequence[int],
    text_ids: Sequence[int],
    num_tokens: int,
    threads: Sequence[Thread],
    rng: random.Random,
) -> Prompt:
    """Build a prompt of ``num_tokens``: ``begin_ids``, then ``text_ids`` with the threads' lines inserted.

    The places of a thread's lines are uniformly random in the text, and in order. A question without statements before
    it is about the text, and comes last. Raises BenchError if the lines do not fit or the text is too short.
    """
    lines = [[statement.encode(encode) for statement in thread] for thread in threads]
    room = num_tokens - len(begin_ids) - sum(len(line.token_ids) for line in chain.from_iterable(lines))
    if 2 * room < num_tokens:
        raise BenchError(
            f"questions and their statements take {num_tokens - room:,} of a prompt's {num_tokens:,} tokens, "
            "expected at most half; ask for fewer --facts or longer --lengths"
        )
    if len(text_ids) < room:
        raise BenchError(f"text: given {len(text_ids):,} tokens, expected at least {room:,}")
    ids, places = weave(begin_ids, text_ids[:room], [[line.token_ids for line in thread] for thread in lines], rng)
    placed = list(zip(chain.from_iterable(places), chain.from_iterable(lines), strict=True))
    answers = [(at + begin, at + end) for at, line in placed for begin, end in line.answers]
    return Prompt(ids, answers, [(at, at + len(line.token_ids)) for at, line in placed])
