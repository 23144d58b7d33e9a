# SPDX-License-Identifier: Apache-2.0
"""Tasks of ``eval answers``: statements spread over a prompt, and questions whose answers are part of the prompt.

All but ``facts`` follow RULER (https://arxiv.org/abs/2404.06654). Where RULER accepts answers in any order, the
question names an order, because the answers are part of the prompt.
"""

import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from vllm_sparse_backend.evaluation.answer_prompts import Statement, Thread
from vllm_sparse_backend.prompts.lookups import FACT, FACT_QUESTION, NAMES

VALUES = 4
"""Numbers of a name in ``multi_value``."""
HOPS = 4
"""Assignments from variable to variable in ``variables``."""
FACT_LINE_TOKENS = 10
"""Lower estimate of a fact's tokens, with any tokenizer."""
SYLLABLES = [consonant + vowel for consonant in "bdfghklmnprstvz" for vowel in "aeiou"]
COMMON, UNCOMMON = [10.0] * 10, [1.0] * 300
"""Weights of the words of ``common_words``."""
ZIPF = [rank**-2.0 for rank in range(1, 2001)]
"""Weights of the words of ``frequent_words``."""


@dataclass(frozen=True)
class Questions:
    """What a task inserts into a prompt."""

    threads: list[Thread]
    text: str | None = None
    """Text in place of the operator's."""


def fact_thread(name: str, value: str) -> Thread:
    """Return a fact, and its question."""
    return [
        Statement(FACT.format(name=name, value=value)),
        Statement(FACT_QUESTION.format(name=name, value="{}"), (value,)),
    ]


def facts(rng: Random, count: int, num_tokens: int) -> Questions:
    return Questions(list(map(fact_thread, rng.sample(NAMES, count), _numbers(rng, count))))


def multi_key(rng: Random, count: int, num_tokens: int) -> Questions:
    """Ask for facts between facts of similar names, which fill the text."""
    names = rng.sample(NAMES, len(NAMES))
    threads = list(map(fact_thread, names, _numbers(rng, count)))
    others = rng.choices(names[count:], k=num_tokens // FACT_LINE_TOKENS)
    lines = [FACT.format(name=name, value=rng.randrange(1_000_000, 10_000_000)) for name in others]
    return Questions(threads, "\n".join(lines))


def multi_value(rng: Random, count: int, num_tokens: int) -> Questions:
    """Ask for all numbers of a name."""
    threads = []
    for name in rng.sample(NAMES, max(1, count // VALUES)):
        values = _numbers(rng, VALUES)
        question = f"# Question: what are the magic numbers of {name}, in order? Answer: {_places(VALUES)}."
        stated = [Statement(f"# One of the magic numbers of {name} is {value}.") for value in values]
        threads.append([*stated, Statement(question, values)])
    return Questions(threads)


def variables(rng: Random, count: int, num_tokens: int) -> Questions:
    """Ask which variables have a value that passes from variable to variable."""
    threads, length = [], HOPS + 1
    names = _words(rng, string.ascii_uppercase, 5, max(1, count // length) * length)
    for i, value in enumerate(rng.sample(range(10_000, 100_000), len(names) // length)):
        chain = names[i * length : (i + 1) * length]
        sources = [str(value), *(f"VAR {name}" for name in chain)]
        question = f"# Question: which variables have the value {value}, in order? Answer: {_places(length)}."
        assigned = [Statement(f"VAR {name} = {source}") for name, source in zip(chain, sources)]
        threads.append([*assigned, Statement(question, tuple(chain))])
    return Questions(threads)


def common_words(rng: Random, count: int, num_tokens: int) -> Questions:
    return _word_list(rng, [*COMMON, *UNCOMMON], len(COMMON), num_tokens)


def frequent_words(rng: Random, count: int, num_tokens: int) -> Questions:
    return _word_list(rng, ZIPF, 3, num_tokens)


TASKS: dict[str, Callable[[Random, int, int], Questions]] = {
    task.__name__: task for task in (facts, multi_key, multi_value, variables, common_words, frequent_words)
}
"""By name, functions that make the questions of a prompt: ``task(rng, number of facts, tokens of the prompt)``."""


def _word_list(rng: Random, weights: Sequence[float], num_asked: int, num_tokens: int) -> Questions:
    """Ask at the end of a list of invented words for its ``num_asked`` most frequent words."""
    words = _words(rng, SYLLABLES, 3, len(weights))
    listed = rng.choices(words, weights, k=num_tokens)
    asked = [word for word in dict.fromkeys(listed) if word in words[:num_asked]]
    question = (
        f"# Question: which {num_asked} words are the most frequent in the list above, in order of appearance? "
        f"Answer: {_places(num_asked)}."
    )
    return Questions([[Statement(question, tuple(asked))]], " ".join(listed))


def _places(count: int) -> str:
    return ", ".join(["{}"] * count)


def _numbers(rng: Random, count: int) -> tuple[str, ...]:
    return tuple(str(value) for value in rng.sample(range(1_000_000, 10_000_000), count))


def _words(rng: Random, syllables: Sequence[str], length: int, count: int) -> list[str]:
    """Return ``count`` different words of ``length`` syllables."""
    base = len(syllables)
    numbers = rng.sample(range(base**length), count)
    return ["".join(syllables[number // base**i % base] for i in range(length)) for number in numbers]
