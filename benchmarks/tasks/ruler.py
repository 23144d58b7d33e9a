# SPDX-License-Identifier: Apache-2.0
"""RULER's tasks that need no download (Hsieh et al., 2024: "RULER: What's the Real Context Size of Your Long-Context
Language Models?"), under its names, with its texts and its settings (``synthetic.yaml`` of github.com/NVIDIA/RULER).

Written anew, and not alike in four ways. Its haystack of essays, which are a download, is prose made here or the
operator's text. Keys are words of ``answers.NAMES``, common words are made of syllables, where RULER draws from lists
of English words. Each prompt has a haystack, a vocabulary and an order of its own, where RULER fixes some of them for a
task. Answers to one value may take 32 tokens, of one uuid 64, for RULER's 128. Figures are comparable between servers
that were asked the same, not with published ones.
"""

import math
import random
import string
import uuid
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from benchmarks.tasks.task import Prompts, Question, Written, spread
from vllm_sparse_backend.measure.answers import NAMES

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."


@dataclass(frozen=True)
class Needles(Question):
    """``niah_*``: ``keys`` of which ``asked`` are asked for, each with ``values`` values."""

    answer_tokens: int = 32
    haystack: str = "text"
    """text, noise (one sentence again and again), or needles (of other keys)."""
    key_kind: str = "words"
    value_kind: str = "numbers"
    keys: int = 1
    values: int = 1
    asked: int = 1

    def write(self, units: int, rng: random.Random, depth: float, prompts: Prompts) -> Written:
        keys: list[str] = []
        while len(keys) < self.keys:
            keys += [key for key in (_made(self.key_kind, rng),) if key not in keys]
        values = [[_made(self.value_kind, rng) for _ in range(self.values)] for _ in keys]
        needles = [self._needle(key, value) for key, of in zip(keys, values) for value in of]
        rng.shuffle(needles)
        chosen = rng.sample(range(len(keys)), self.asked)
        # One needle alone goes through all depths, one prompt after the other.
        depths = [depth] if len(needles) == 1 else [step / 39 for step in rng.sample(range(40), len(needles))]
        text = "".join(spread(self._haystack(units, keys, rng, prompts), needles, depths))
        kind, are = (self.value_kind, "are all") if self.asked * self.values > 1 else (self.value_kind[:-1], "is")
        names = [keys[i] for i in chosen]
        query = ", ".join(names[:-1]) + ", and " + names[-1] if len(names) > 1 else names[0]
        some = "A" if are == "is" else "Some"
        question = (
            f"{some} special magic {kind} {'is' if some == 'A' else 'are'} hidden within the following text. Make sure "
            f"to memorize it. I will quiz you about the {kind} afterwards.\n"
            f"{text.rstrip()}\n"
            f"What {are} the special magic {kind} for {query} mentioned in the provided text?"
        )
        begun = f" The special magic {kind} for {query} mentioned in the provided text {are.split()[0]}"
        expected = tuple(value for i in chosen for value in values[i])
        return Written(question, begun, expected, depth if len(needles) == 1 else None)

    def _needle(self, key: str, value: str) -> str:
        end = " " if self.haystack == "text" else "\n"
        return f"One of the special magic {self.value_kind} for {key} is: {value}.{end}"

    def _haystack(self, units: int, keys: list[str], rng: random.Random, prompts: Prompts) -> list[str]:
        if self.haystack == "noise":
            return [f"{NOISE}\n"] * units
        if self.haystack == "text":
            return prompts.haystack.sentences(units, rng)
        others = (_made(self.key_kind, rng) for _ in range(units))
        return [self._needle(key, _made(self.value_kind, rng)) for key in others if key not in keys]


def _made(kind: str, rng: random.Random) -> str:
    if kind == "words":
        # A prompt of needles has thousands of keys, most of which must differ: names of four words.
        return f"{rng.choice(NAMES).replace(' ', '-')}-{rng.choice(NAMES).split()[2]}"
    if kind == "numbers":
        return str(rng.randint(1_000_000, 9_999_999))
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


@dataclass(frozen=True)
class Tracking(Question):
    """``vt``: a value is assigned to a variable, it to the next, and so on; all that have the value are asked for."""

    answer_tokens: int = 30
    hops: int = 4
    TEMPLATE: ClassVar[str] = (
        "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\n"
        "Question: Find all variables that are assigned the value {value} in the text above."
    )
    BEGUN: ClassVar[str] = (
        " Answer: According to the chain(s) of variable assignment in the text above, {count} variables are assigned "
        "the value {value}, they are: "
    )

    def write(self, units: int, rng: random.Random, depth: float, prompts: Prompts) -> Written:
        # RULER shows a short example, with its answer, before it asks.
        question, begun, variables = self._asked(self.hops + 1, rng, letters=3)
        example = f"{question}{begun}{' '.join(variables)}\n\n"
        question, begun, variables = self._asked(units, rng, letters=5)
        return Written(example + question, begun.rstrip(), variables)

    def _asked(self, units: int, rng: random.Random, letters: int) -> tuple[str, str, tuple[str, ...]]:
        variables: list[str] = []
        while len(variables) <= self.hops:
            made = "".join(rng.choices(string.ascii_uppercase, k=letters))
            variables += [made] if made not in variables else []
        value = str(rng.randint(10_000, 99_998))
        chain = [f"VAR {variables[0]} = {value}"]
        chain += [f"VAR {after} = VAR {before}" for before, after in pairwise(variables)]
        depths = sorted(rng.random() for _ in chain)
        # A sorted order keeps the chain's: what is equally deep would be sorted by its text.
        lines = [NOISE] * units
        for placed, (at, link) in enumerate(zip(depths, chain)):
            lines.insert(int(at * units) + placed, link)
        begun = self.BEGUN.format(count=len(variables), value=value)
        return self.TEMPLATE.format(context="\n".join(lines), value=value), begun, tuple(variables)


@dataclass(frozen=True)
class CommonWords(Question):
    """``cwe``: ten words occur often in a numbered list, the others seldom."""

    answer_tokens: int = 120
    least_units: ClassVar[int] = 20
    COMMON: ClassVar[int] = 10
    TEMPLATE: ClassVar[str] = (
        "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
        "appear most often.\n{context}\nQuestion: What are the 10 most common words in the above list?"
    )
    BEGUN: ClassVar[str] = " Answer: The top 10 words that appear most often in the list are:"

    def write(self, units: int, rng: random.Random, depth: float, prompts: Prompts) -> Written:
        shown, example = self._listed(20, 3, 1, rng)
        context, common = self._listed(units, 30, 3, rng)
        first = f"{self.TEMPLATE.format(context=shown)}{self.BEGUN} {_numbered(example)}\n"
        return Written(first + self.TEMPLATE.format(context=context), self.BEGUN, common)

    def _listed(self, units: int, often: int, seldom: int, rng: random.Random) -> tuple[str, tuple[str, ...]]:
        """``units`` words, of which the first ten occur ``often``, the others ``seldom``."""
        syllables = [c + v for c in "bdfgklmnprstvz" for v in "aeiou"]
        words = [_word(i, syllables) for i in rng.sample(range(len(syllables) ** 3), units)]
        common = words[: self.COMMON]
        listed = common * often + words[self.COMMON :] * seldom
        rng.shuffle(listed)
        return _numbered(listed), tuple(common)


def _word(number: int, syllables: list[str]) -> str:
    base = len(syllables)
    return syllables[number % base] + syllables[number // base % base] + syllables[number // base**2]


def _numbered(words: list[str] | tuple[str, ...]) -> str:
    return " ".join(f"{i + 1}. {word}" for i, word in enumerate(words))


@dataclass(frozen=True)
class FrequentWords(Question):
    """``fwe``: coded words whose frequencies fall with the square of their rank; the first rank is noise, "...".

    ``units`` are the words' occurrences.
    """

    answer_tokens: int = 50
    least_units: ClassVar[int] = 300
    LETTERS: ClassVar[int] = 6

    def write(self, units: int, rng: random.Random, depth: float, prompts: Prompts) -> Written:
        words: dict[str, None] = {}
        # Ranks whose share is less than one occurrence have none.
        ranks = math.isqrt(units)
        while len(words) < ranks:
            words["".join(rng.choices(string.ascii_lowercase, k=self.LETTERS))] = None
        vocabulary = ["...", *words][:ranks]
        zeta = math.pi**2 / 6
        listed = [word for i, word in enumerate(vocabulary) for _ in range(int(units / (i + 1) ** 2 / zeta))]
        rng.shuffle(listed)
        question = (
            "Read the following coded text and track the frequency of each coded word. Find the three most frequently "
            f"appeared coded words. {' '.join(listed)}\nQuestion: Do not provide any explanation. Please ignore the "
            "dots '....'. What are the three most frequently appeared words in the above coded text?"
        )
        begun = " Answer: According to the coded text above, the three most frequently appeared words are:"
        return Written(question, begun, tuple(vocabulary[1:4]))


TASKS = (
    Needles("niah_single_1", haystack="noise"),
    Needles("niah_single_2"),
    Needles("niah_single_3", 64, value_kind="uuids"),
    Needles("niah_multikey_1", keys=4),
    Needles("niah_multikey_2", haystack="needles"),
    Needles("niah_multikey_3", 64, haystack="needles", key_kind="uuids", value_kind="uuids"),
    Needles("niah_multivalue", 128, values=4),
    Needles("niah_multiquery", 128, keys=4, asked=4),
    Tracking("vt"),
    CommonWords("cwe"),
    FrequentWords("fwe"),
)
