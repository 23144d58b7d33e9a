# SPDX-License-Identifier: Apache-2.0
"""Lookups in prompts: a line states a fact, and a later line asks for it.

Retrieval heads are active at lookups, where sparse attention loses most. Prompts that measure heads therefore contain
*threads* of three kinds, spread over a text: facts that are stated, and later asked for and answered (as in
`eval answers`); values that pass from name to name before one of the names is asked for (several hops); and passages
of another text that occur twice. Together, threads take about a third of a prompt, so that the 1% of queries with the
largest errors includes lookups. With any tokenizer, they take at most half.
"""

import random
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, pairwise
from typing import Any

from vllm_sparse_backend.config.errors import ConfigurationError

Encode = Callable[[str], list[int]]
"""Token ids of a text, without special tokens around them."""

Thread = list[list[int]]
"""Lines as token ids, in the order in which they appear in a prompt."""

_ADJECTIVES = (
    "amber crimson silent golden frozen hidden ancient velvet copper lunar misty scarlet broken quiet rapid gentle"
)
_THINGS = (
    "falcon tiger lantern meadow harbor glacier orchid compass anchor willow raven summit beacon badger cedar dragon"
)
_PLACES = "river stone forest tower bridge valley garden island canyon temple harbor engine desert castle planet market"
NAMES = [f"{a} {t} {p}" for a in _ADJECTIVES.split() for t in _THINGS.split() for p in _PLACES.split()]

FACT = "# The magic number of {name} is {value}."
FACT_QUESTION = "# Question: what is the magic number of {name}? Answer: {value}."

FIRST_HOP, HOP = "# The number of {name} is {value}.", "# {name} has the number of {other}."
HOPS = 3
QUESTION = "# Question: what is the number of {name}? Answer: {value}."
PASSAGE_TOKENS = (16, 256)

TOKENS_A_THREAD = {"retrieval": 512, "hops": 1024, "repeats": 2048}
"""Average number of prompt tokens per thread of each kind."""


def begin_ids(tokenizer: Any) -> list[int]:
    """Return the tokens that begin every prompt in the model's training."""
    return [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]


def insert_threads(
    stretch: Sequence[int],
    passages: Sequence[int],
    start: Sequence[int],
    encode: Encode,
    rng: random.Random,
) -> list[int]:
    """Insert threads of each kind into a text, and drop the text's end to make room for them.

    Raises ConfigurationError if they do not fit.
    """
    num_tokens = len(stretch)
    threads = [list(_threads(kind, num_tokens, encode, passages, rng)) for kind in TOKENS_A_THREAD]
    _drop_threads(threads, num_tokens, len(start))
    every = list(chain.from_iterable(threads))
    room = num_tokens - len(start) - _tokens(every)
    return weave(start, stretch[:room], every, rng)[0]


def _drop_threads(threads: Sequence[list[Thread]], num_tokens: int, num_start: int) -> None:
    """Drop threads, the longest kind first, until they take at most half of a prompt.

    One tokenizer may need several times as many tokens for a line as another. Raises ConfigurationError if one thread
    of each kind takes more than half.
    """
    while (needed := 2 * (num_start + sum(map(_tokens, threads)))) > num_tokens:
        several = [of_kind for of_kind in threads if len(of_kind) > 1]
        if not several:
            raise ConfigurationError(
                f"generated prompt: given {num_tokens:,} tokens, expected at least {needed:,} with this tokenizer: "
                "lines with facts and questions may fill half of a prompt; use longer prompts"
            )
        max(several, key=_tokens).pop()


def _tokens(threads: Sequence[Thread]) -> int:
    return sum(len(line) for thread in threads for line in thread)


def _threads(
    kind: str, num_tokens: int, encode: Encode, passages: Sequence[int], rng: random.Random
) -> Iterable[Thread]:
    count = max(1, num_tokens // TOKENS_A_THREAD[kind])
    if kind == "repeats":
        most = min(PASSAGE_TOKENS[1], num_tokens // 16)
        for _ in range(count):
            length = rng.randint(min(PASSAGE_TOKENS[0], most), most)
            at = rng.randrange(len(passages) - length)
            yield [list(passages[at : at + length])] * 2
        return
    num_names = HOPS + 1 if kind == "hops" else 1
    for i, value in enumerate(rng.sample(range(1_000_000, 10_000_000), count)):
        if i % (len(NAMES) // num_names) == 0:
            names = rng.sample(NAMES, len(NAMES))
        yield [encode(f"\n{line}\n") for line in _lines(names[-num_names:], value)]
        del names[-num_names:]


def _lines(names: Sequence[str], value: int) -> list[str]:
    """Return the lines that state a value, pass it from name to name, and ask for it with the answer."""
    if len(names) == 1:
        return [line.format(name=names[0], value=value) for line in (FACT, FACT_QUESTION)]
    hops = [HOP.format(name=name, other=other) for other, name in pairwise(names)]
    first, question = FIRST_HOP.format(name=names[0], value=value), QUESTION.format(name=names[-1], value=value)
    return [first, *hops, question]


def weave(
    start: Sequence[int],
    text_ids: Sequence[int],
    threads: Sequence[Sequence[Sequence[int]]],
    rng: random.Random,
) -> tuple[list[int], list[list[int]]]:
    """Insert lines into a text that follows ``start``, and return the tokens and the place of each line.

    A thread is a sequence of lines, whose places are uniformly random in the text, and in order. A single line comes
    last.
    """
    end = len(text_ids)
    cuts = [[end] if len(thread) == 1 else sorted(rng.randint(0, end) for _ in thread) for thread in threads]
    placed = sorted((cut, step, i) for i, thread_cuts in enumerate(cuts) for step, cut in enumerate(thread_cuts))
    ids, at = list(start), 0
    places = [[0] * len(thread) for thread in threads]
    for cut, step, i in placed:
        ids += text_ids[at:cut]
        at = cut
        places[i][step] = len(ids)
        ids += threads[i][step]
    ids += text_ids[at:]
    return ids, places
