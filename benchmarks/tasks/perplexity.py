# SPDX-License-Identifier: Apache-2.0
"""Perplexity by position: how likely a text's own tokens are after all that lies before them.

A prefill that loses what is far away shows at late positions first. From vLLM's ``prompt_logprobs``, of the operator's
text or, without one, of this project's sources.
"""

import hashlib
import math
import time
from dataclasses import dataclass
from typing import ClassVar

from benchmarks.tasks.task import Prompts, Task
from vllm_sparse_backend.measure.answers import bucket, own_tokens
from vllm_sparse_backend.measure.contestants import Case
from vllm_sparse_backend.measure.endpoint import Endpoint, RequestError
from vllm_sparse_backend.measure.report import BenchError


@dataclass(frozen=True)
class Perplexity(Task):
    name: str
    whole_text: ClassVar[bool] = True

    def check(self, endpoint: Endpoint, prompts: Prompts, length: int) -> None:
        spare = len(prompts.text_ids) - length
        if spare < 16 * prompts.per_length:
            most = length + 16 * prompts.per_length
            raise BenchError(f"{self.name}: text: given {len(prompts.text_ids):,} tokens, expected at least {most:,}")

    def ask(self, endpoint: Endpoint, prompts: Prompts, length: int, number: int) -> Case:
        ids = self.prompt(prompts, length, number)
        case: Case = {"sha256": hashlib.sha256(" ".join(map(str, ids)).encode()).hexdigest(), "error": None}
        began = time.perf_counter()
        try:
            _, logprobs = own_tokens(ids, endpoint.prompt_logprobs(ids))
        except RequestError as error:
            return case | {"error": str(error)}
        by_place: dict[tuple[int, int], list[float]] = {}
        for place in range(1, len(ids)):
            by_place.setdefault(bucket(place), []).append(-logprobs[place])
        positions = [[*bounds, math.fsum(nats), len(nats)] for bounds, nats in sorted(by_place.items())]
        return case | {"positions": positions, "seconds": round(time.perf_counter() - began, 3)}

    def prompt(self, prompts: Prompts, length: int, number: int) -> list[int]:
        """A stretch of the text; those of a length begin in different places."""
        room = length - 1 - len(prompts.begin_ids)  # one token is generated
        part = (len(prompts.text_ids) - room) // prompts.per_length
        start = part * number + prompts.rng(self.name, length, number).randrange(part)
        return [*prompts.begin_ids, *prompts.text_ids[start : start + room]]


TASKS = (Perplexity("perplexity"),)
