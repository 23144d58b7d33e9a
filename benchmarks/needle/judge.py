# SPDX-License-Identifier: Apache-2.0
"""Answers of the trained model with dense attention, to the prompts of `sparse-prefill eval answers` and to needles.

As in eval, an answer is right if each of its seven digits is the model's first choice after the digits before it.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.needle.tokens import STYLES, encode
from vllm_sparse_backend.evaluation.answers import NAMES, Line, Prompt, Share, Templates, build_prompt
from vllm_sparse_backend.evaluation.prompt_texts import prose

DEPTHS = tuple(i / 10 for i in range(11))
DISTRACTORS = 7

Ranks = Callable[[list[int]], torch.Tensor]


@dataclass(frozen=True)
class Question:
    ids: list[int]
    spans: list[tuple[int, int]]
    """First token of each answer, and the token after its last token."""


class Judge:
    """Scores answers. ``first_choice`` returns the most likely next token after each token of a prompt [tokens]."""

    def __init__(self, tokenizer: Any, first_choice: Ranks, seed: int) -> None:
        self.encode = lambda text: encode(tokenizer, text)
        self.first_choice = first_choice
        self.seed = seed
        self.text = [i for line in prose(40_000, seed).splitlines(True) for i in self.encode(line)]

    def right(self, question: Question) -> list[bool]:
        chosen = self.first_choice(question.ids).tolist()
        return [chosen[begin - 1 : end - 1] == question.ids[begin:end] for begin, end in question.spans]

    def inside(self, tokens: int, prompts: int, facts: int) -> dict[str, Any]:
        """Score answers inside the prompt, in total and by the distance from fact to answer."""
        judged: list[tuple[int, bool]] = []
        for i in range(prompts):
            prompt = self._inside_prompt(tokens, facts, random.Random(f"{self.seed}/{tokens}/{i}"))
            right = self.right(Question(prompt.token_ids, [(answer.begin, answer.end) for answer in prompt.answers]))
            judged += [(answer.distance, is_right) for answer, is_right in zip(prompt.answers, right)]
        distances = sorted({bucket(distance) for distance, _ in judged})
        return {
            "tokens": tokens,
            "facts": facts,
            "share": _share([right for _, right in judged]),
            "by_distance": {
                f"{low} to {high}": _share([right for distance, right in judged if bucket(distance) == (low, high)])
                for low, high in distances
            },
        }

    def _inside_prompt(self, tokens: int, facts: int, rng: random.Random) -> Prompt:
        start = rng.randrange(len(self.text) - tokens)
        return build_prompt(self.encode, [0], self.text[start:], tokens, facts, Templates(), rng)

    def at_end(self, tokens: int, prompts: int) -> dict[str, Any]:
        """Score a question at the prompt's end, with its fact at each of DEPTHS."""
        by_depth = {
            f"{depth:.1f}": _share([
                self.right(self.needle(tokens, depth, False, random.Random(f"{self.seed}/{tokens}/{depth}/{i}")))[0]
                for i in range(prompts)
            ])
            for depth in DEPTHS
        }  # fmt: skip
        return {"tokens": tokens, "share": sum(by_depth.values()) / len(by_depth), "by_depth": by_depth}

    def two_hops(self, tokens: int, prompts: int) -> dict[str, Any]:
        """Score a question about an alias at the prompt's end. The alias and the fact may be anywhere."""
        seeds = [random.Random(f"{self.seed}/{tokens}/hops/{i}") for i in range(prompts)]
        return {
            "tokens": tokens,
            "share": _share([self.right(self.needle(tokens, rng.random(), True, rng))[0] for rng in seeds]),
        }

    def needle(self, tokens: int, depth: float, through_alias: bool, rng: random.Random) -> Question:
        templates = Templates()
        alias, *names = rng.sample(NAMES, DISTRACTORS + 2)
        values = [str(rng.randrange(1_000_000, 10_000_000)) for _ in names]
        facts = [Line.of(self.encode, templates.fact, name, v).token_ids for name, v in zip(names, values)]
        placed = [(depth, facts[0]), *((rng.random(), fact) for fact in facts[1:])]
        if through_alias:
            text = STYLES[0][1].replace("{name}", alias).replace("{other}", names[0])
            placed.append((rng.random(), self.encode(f"\n{text}\n")))
        question = Line.of(self.encode, templates.question, alias if through_alias else names[0], values[0])
        tail = question.token_ids[: question.end]
        room = tokens - 1 - len(tail) - sum(len(line) for _, line in placed)
        if room < 0:
            raise ValueError(f"a prompt: given {tokens:,} tokens, expected at least {tokens - room:,} for its lines")
        start = rng.randrange(len(self.text) - tokens)
        ids, at = [0], 0
        for place, line in sorted(placed):
            cut = int(place * room)
            ids += self.text[start + at : start + cut] + line
            at = cut
        ids += self.text[start + at : start + room] + tail
        return Question(ids, [(tokens - question.end + question.begin, tokens)])


def _share(right: Sequence[bool]) -> float:
    return Share(sum(right), len(right)).share


def bucket(distance: int) -> tuple[int, int]:
    """Return the bounds [lower, upper) of a distance's bucket: below 1,024, below 2,048 and so on."""
    upper = max(1024, 1 << distance.bit_length())
    return (0 if upper == 1024 else upper // 2), upper
