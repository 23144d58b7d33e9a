# SPDX-License-Identifier: Apache-2.0
"""What a task is: it writes prompts of a length, asks a server, and says what of the answer was right."""

import math
import random
import re
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import ClassVar

from vllm_sparse_backend.measure.answers import Templates
from vllm_sparse_backend.measure.contestants import Case
from vllm_sparse_backend.measure.endpoint import Endpoint, RequestError
from vllm_sparse_backend.measure.report import BenchError
from vllm_sparse_backend.measure.texts import prose

CHAT_TOKENS = 64
"""What a chat template may add to a message."""


@dataclass(frozen=True)
class Haystack:
    """What prompts are filled with: sentences, or lines, of a text, or sentences of prose made for each prompt.

    Each has the white space that follows it: code stays code.
    """

    text: str | None

    @cached_property
    def _sentences(self) -> list[str]:
        return re.findall(r".+?(?:[.!?]\s+|\n+|\Z)", self.text or "", re.DOTALL)

    def sentences(self, count: int, rng: random.Random) -> list[str]:
        """So many; a text's from a place of its own on, and from its beginning again where it ends."""
        if self.text is None:
            made = prose(9 * count, rng.getrandbits(64))  # none has more than nine words
            return re.findall(r"[^.]+\.\s", made)[:count]
        start, base = rng.randrange(len(self._sentences)), self._sentences
        return [base[(start + i) % len(base)] for i in range(count)]


@dataclass(frozen=True)
class Prompts:
    """How prompts of one run become what a server is asked."""

    seed: int
    per_length: int
    haystack: Haystack
    templates: Templates
    chat: bool
    tokenizes: bool
    """Whether the servers count tokens; where they do not, lengths are estimated from the usage that they report."""
    begin_ids: Sequence[int]
    text_ids: Sequence[int]
    """Of the text whose perplexity is asked; empty where none is."""

    def rng(self, *of: object) -> random.Random:
        return random.Random("/".join(map(str, (self.seed, *of))))

    def depth(self, number: int) -> float:
        """Where the prompt of that number has what is asked for: those of a length are spread from 0 to 1."""
        return number / (self.per_length - 1) if self.per_length > 1 else 0.5

    def encode(self, endpoint: Endpoint, text: str) -> str | list[int]:
        if self.chat or not self.tokenizes:
            return text
        return [*self.begin_ids, *endpoint.tokenize(text, special=False)]

    def count(self, endpoint: Endpoint, text: str) -> int:
        """Tokens of a prompt. Raises RequestError where the server does not say."""
        if self.tokenizes:
            return len(self.begin_ids) + len(endpoint.tokenize(text, special=False))
        found = endpoint.complete(text, 1, self.chat).prompt_tokens
        if found is None:
            raise RequestError("the server has no /tokenize and reports no usage: prompts of a length cannot be made")
        return found


class Task(ABC):
    """Its parameters are fields of the dataclass that derives from it."""

    name: str
    whole_text: ClassVar[bool] = False
    """Whether it asks about ``Prompts.text_ids``, and needs a server with vLLM's ``prompt_logprobs``."""

    @abstractmethod
    def check(self, endpoint: Endpoint, prompts: Prompts, length: int) -> None:
        """Raise BenchError where no prompts of that length can be made."""

    @abstractmethod
    def ask(self, endpoint: Endpoint, prompts: Prompts, length: int, number: int) -> Case:
        """The case of one request of at most ``length`` tokens, its answer included.

        A request that fails has its ``error`` and nothing that could be counted.
        """


@dataclass(frozen=True)
class Written:
    """A prompt as text, and what its answer should hold."""

    question: str
    """The prompt up to where its answer begins: a user's message."""
    begun: str
    """How the answer begins; a prompt that is no chat ends with it."""
    expected: tuple[str, ...]
    depth: float | None = None
    """Of the one thing that is asked for: 0 at the text's beginning, 1 at its end."""

    def prompt(self, chat: bool) -> str:
        return self.question if chat else self.question + self.begun


@dataclass(frozen=True)
class Question(Task):
    """A task whose answer is generated, greedily, and held against the texts that it should have in it.

    As RULER's ``string_match_all``: the share of them that occur in the answer, whatever their case.
    """

    name: str
    answer_tokens: int
    least_units: ClassVar[int] = 8
    """Of what fills the prompt: fewer make none."""

    @abstractmethod
    def write(self, units: int, rng: random.Random, depth: float, prompts: Prompts) -> Written:
        """A prompt of so many units; ``depth`` is where to place what is asked for, if the task does so."""

    def check(self, endpoint: Endpoint, prompts: Prompts, length: int) -> None:
        shortest = self._write(prompts, length, 0, self.least_units).prompt(prompts.chat)
        try:
            taken = prompts.count(endpoint, shortest)
        except RequestError as error:
            raise BenchError(f"{self.name}: {error}") from None
        if taken > (room := self._room(prompts, length)):
            raise BenchError(
                f"{self.name}: its shortest prompt takes {taken:,} tokens, expected at most {room:,} for prompts and "
                f"answers of {length:,}: leave it out of --tasks, or ask for longer ones"
            )

    def ask(self, endpoint: Endpoint, prompts: Prompts, length: int, number: int) -> Case:
        began = time.perf_counter()
        try:
            written = self.fitting(endpoint, prompts, length, number)
            text = written.prompt(prompts.chat)
            case: Case = {"sha256": sha256(text.encode()).hexdigest(), "depth": written.depth, "error": None}
            # Prompts of a task may begin alike: nothing of one may stand in for a prefill of the next.
            apart = {"cache_salt": uuid.uuid4().hex} if prompts.tokenizes else {}
            answer = endpoint.complete(prompts.encode(endpoint, text), self.answer_tokens, prompts.chat, **apart)
        except (RequestError, BenchError) as error:  # BenchError: of a server that tokenised before
            return {"error": str(error)}
        found = [expected.lower() in answer.text.lower() for expected in written.expected]
        case |= {"prompt_tokens": answer.prompt_tokens, "expected": list(written.expected), "answer": answer.text}
        return case | {"found": found, "seconds": round(time.perf_counter() - began, 3)}

    def fitting(self, endpoint: Endpoint, prompts: Prompts, length: int, number: int) -> Written:
        """The prompt of that number, with the most units that are found to fit: tokens grow with them, evenly.

        Where servers do not count tokens, from two short prompts alone, with a twentieth to spare.
        """
        room, least = self._room(prompts, length), self.least_units

        def count(written: Written) -> int:
            return prompts.count(endpoint, written.prompt(prompts.chat))

        few, more = (count(self._write(prompts, length, number, units)) for units in (least, 4 * least))
        per_unit = max((more - few) / (3 * least), 1e-3)
        if not prompts.tokenizes:
            return self._write(prompts, length, number, max(least, least + int(0.95 * (room - few) / per_unit)))
        units, best, most = max(least, least + int((room - few) / per_unit)), None, 0
        for _ in range(10):
            written = self._write(prompts, length, number, units)
            over = count(written) - room
            if over <= 0 and units > most:
                best, most = written, units
            if -max(2 * per_unit, room / 200) <= over <= 0:
                break
            units = max(least, units - math.ceil(over / per_unit)) if over > 0 else units + int(-over / per_unit)
        return best or self._write(prompts, length, number, least)

    def _write(self, prompts: Prompts, length: int, number: int, units: int) -> Written:
        return self.write(units, prompts.rng(self.name, length, number), prompts.depth(number), prompts)

    def _room(self, prompts: Prompts, length: int) -> int:
        return length - self.answer_tokens - (CHAT_TOKENS if prompts.chat else 0)


def spread(haystack: Sequence[str], needles: Sequence[str], depths: Sequence[float]) -> list[str]:
    """The haystack with each needle where its depth says, in the order of depths."""
    placed = sorted(zip(depths, needles))
    parts, at = [], 0
    for depth, needle in placed:
        cut = round(depth * len(haystack))
        parts += [*haystack[at:cut], needle]
        at = cut
    return [*parts, *haystack[at:]]
