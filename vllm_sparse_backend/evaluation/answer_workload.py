# SPDX-License-Identifier: Apache-2.0
"""The prompts of ``eval answers``: their tasks, lengths, text and seed."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from random import Random

from vllm_sparse_backend.evaluation.answer_prompts import Prompt, PromptKey, build_prompt
from vllm_sparse_backend.evaluation.client import Endpoint
from vllm_sparse_backend.evaluation.report import BenchError
from vllm_sparse_backend.evaluation.tasks import TASKS
from vllm_sparse_backend.prompts.texts import prose, read_prompt_text

SEED = 0
"""Seed of facts and their places."""

FACT_TOKENS = 120
"""Minimum tokens of a prompt per fact: statement and question take about 50, and lines fill at most half."""


def require_room(lengths: Sequence[int], facts: int) -> None:
    """Raise BenchError before a server starts if a length is too short for the facts."""
    if facts > (most := min(lengths) // FACT_TOKENS):
        raise BenchError(f"--facts: given {facts}, expected at most {most} in a prompt of {min(lengths):,} tokens")


@dataclass(frozen=True)
class AnswerWorkload:
    """Everything that determines the prompts, except the tokenizer."""

    lengths: tuple[int, ...]
    count: int
    """Prompts of each length."""
    facts: int
    text: str
    tasks: tuple[str, ...]

    @staticmethod
    def from_text(
        text: Path | None, lengths: Sequence[int], count: int, facts: int, tasks: Sequence[str] = ("facts",)
    ) -> "AnswerWorkload":
        """Return the workload with prompts from a text file or folder, or from generated prose if ``text`` is None."""
        longest = max(lengths)
        if text is not None:
            # A token has fewer than eight characters on average. The server tokenises the whole text.
            source = read_prompt_text(text, 8 * longest * max(4, count))
        else:
            # Prose has at least one token per word, enough for separate stretches.
            source = prose(max(2 * longest, longest + 16 * count), SEED)
        return AnswerWorkload(tuple(dict.fromkeys(lengths)), count, facts, source, tuple(dict.fromkeys(tasks)))

    @property
    def longest(self) -> int:
        """Tokens of the longest request, including its answer of one token."""
        return max(self.lengths) + 1

    @property
    def wanted(self) -> list[PromptKey]:
        return [PromptKey(*key) for key in product(self.tasks, self.lengths, range(self.count))]

    def build_prompts(self, endpoint: Endpoint) -> dict[PromptKey, Prompt]:
        """Build all prompts with a server's tokenizer, each from a different stretch of the text."""
        text_ids = endpoint.tokenize(self.text)
        begin_ids = endpoint.first_tokens()
        # Stretches begin in different places, so that no two prompts of a length begin alike.
        longest, least_spare = max(self.lengths), 16 * self.count
        spare = len(text_ids) - longest
        if spare < least_spare:
            expected = f"at least {longest + least_spare:,} for such prompts"
            raise BenchError(f"text: given {len(text_ids):,} tokens, expected {expected}")

        built: dict[PromptKey, Prompt] = {}
        for key in self.wanted:
            rng = Random(f"{SEED}/{key.tokens}/{key.prompt}")
            start = spare * key.prompt // self.count + rng.randrange(spare // self.count)
            questions = TASKS[key.task](rng, self.facts, key.tokens)
            own_text = questions.text and endpoint.tokenize(questions.text)
            stretch = own_text or text_ids[start : start + key.tokens]
            try:
                built[key] = build_prompt(endpoint.tokenize, begin_ids, stretch, key.tokens, questions.threads, rng)
            except BenchError as error:
                raise BenchError(f"{key.task}: prompts for the tokenizer of {endpoint.model}: {error}") from None
        return built
