# SPDX-License-Identifier: Apache-2.0
"""A needle asked for at the prompt's end, by length and depth, in the lines that `eval answers` asks with.

Its value is generated, by decoding, which is dense: what is lost here was lost for every later token too.
"""

import random
from dataclasses import dataclass

from benchmarks.tasks.task import Prompts, Question, Written, spread
from vllm_sparse_backend.measure.answers import NAMES


@dataclass(frozen=True)
class Needle(Question):
    answer_tokens: int = 16
    others: int = 0
    """Facts of other names, spread over the text."""

    def write(self, units: int, rng: random.Random, depth: float, prompts: Prompts) -> Written:
        names = rng.sample(NAMES, 1 + self.others)
        values = [str(value) for value in rng.sample(range(1_000_000, 10_000_000), len(names))]
        facts = [_put(prompts.templates.fact, name, value) for name, value in zip(names, values)]
        depths = [depth, *(rng.random() for _ in range(self.others))]
        # A line that is stated is one of its own, as `eval answers` has it.
        text = "".join(spread(prompts.haystack.sentences(units, rng), [f"\n{fact}\n" for fact in facts], depths))
        asked = prompts.templates.question.partition("{value}")[0].rstrip()
        return Written(f"{text}\n{_put(asked, names[0], '')}", "", (values[0],), depth)


def _put(template: str, name: str, value: str) -> str:
    return template.replace("{name}", name).replace("{value}", value)


TASKS = (Needle("needle"), Needle("needle_multikey", others=23))
