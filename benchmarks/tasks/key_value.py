# SPDX-License-Identifier: Apache-2.0
"""Key-value retrieval (Liu et al., 2023: "Lost in the Middle"): a JSON object of uuids, one of which is asked for."""

import json
import random
import uuid
from dataclasses import dataclass

from benchmarks.tasks.task import Prompts, Question, Written


@dataclass(frozen=True)
class KeyValue(Question):
    answer_tokens: int = 64

    def write(self, units: int, rng: random.Random, depth: float, prompts: Prompts) -> Written:
        made = [str(uuid.UUID(int=rng.getrandbits(128), version=4)) for _ in range(2 * units)]
        pairs = list(zip(made[::2], made[1::2]))
        key, value = pairs[round(depth * (units - 1))]
        data = json.dumps(dict(pairs), indent=0)
        question = (
            "Extract the value corresponding to the specified key in the JSON object below.\n\n"
            f'JSON data:\n{data}\n\nKey: "{key}"\nCorresponding value:'
        )
        return Written(question, "", (value,), depth)


TASKS = (KeyValue("key_value"),)
