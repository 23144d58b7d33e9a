# SPDX-License-Identifier: Apache-2.0
"""Answers inside the prompt, asked of servers: started one after the other, or running; the same prompts for all."""

import hashlib
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from random import Random
from statistics import fmean, stdev

from vllm_sparse_backend.measure.answers import Facts, Prompt, Share, Templates, build_prompt, score, standard_error
from vllm_sparse_backend.measure.client import Endpoint, RequestError
from vllm_sparse_backend.measure.contestants import At, Case, densities
from vllm_sparse_backend.measure.report import BenchError
from vllm_sparse_backend.measure.texts import prose, read_text

SEED = 0
"""Of facts and places."""

COLUMNS = {
    "label": "server",
    "tokens": "tokens",
    "answers": "right",
    "share": "share",
    "standard_error": "± s.e.",
    "of_first": "of the first's",
    "perplexity": "perplexity",
    "perplexity_change": "change, %",
    "perplexity_change_error": "± s.e.",
    "density": "density, all lengths",
    "failed": "failed requests",
}


@dataclass(frozen=True)
class Asking:
    """All that makes the prompts, but for the tokenizer."""

    lengths: tuple[int, ...]
    count: int
    """Of each length."""
    facts: int
    text: str | None
    made: dict[At, Prompt] = field(default_factory=dict, compare=False)
    """Once a server is there to tokenize."""
    tokens: list[int] = field(default_factory=list, compare=False)
    """Of a piece of the text, by that server."""

    @staticmethod
    def about(text: Path | None, lengths: Sequence[int], count: int, facts: int) -> "Asking":
        # Eight characters are more than a token has on average, and what is read is tokenised by the server.
        read = None if text is None else read_text(text, 8 * max(lengths) * max(4, count))
        return Asking(tuple(dict.fromkeys(lengths)), count, facts, read)

    def require_room(self, model: Path) -> None:
        """Raise BenchError where a length cannot hold the facts, before a server starts, if the tokenizer is here."""
        if (file := model / "tokenizer.json").is_file() and find_spec("tokenizers"):
            from tokenizers import Tokenizer

            tokenizer = Tokenizer.from_file(str(file))

            def encode(text: str) -> list[int]:
                return list(tokenizer.encode(text, add_special_tokens=False).ids)

            Facts.draw(encode, self.facts, Templates(), Random(SEED)).room(min(self.lengths), 1)

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @cached_property
    def source(self) -> str:
        """A word of prose is a token at least: there are as many as stretches that begin apart take."""
        words = max(2 * self.longest, self.longest + 16 * self.count)
        return self.text if self.text is not None else prose(words, SEED)

    def key(self, *context: object) -> str:
        """Equal where the prompts are, and what they are asked in (``context``)."""
        made_of = {name: value for name, value in vars(self).items() if name not in ("made", "tokens", "source")}
        made_of |= {"text": self.source, "context": context}
        return hashlib.sha256(json.dumps(made_of).encode()).hexdigest()[:16]

    @property
    def wanted(self) -> list[At]:
        return list(product(self.lengths, range(self.count)))

    def make(self, endpoint: Endpoint) -> bool:
        """The prompts, by the first server's tokenizer; whether this one's gives the same. Raises BenchError."""
        sample = endpoint.tokenize(self.source[:2000], special=True)
        if not self.made:
            self.made.update(self.build_prompts(endpoint))
            self.tokens.extend(sample)
        return sample == self.tokens

    def ask(self, endpoint: Endpoint, at: At) -> Case:
        """A request that fails, or is not answered whole, has its ``error`` and no answers."""
        prompt = self.made[at]
        case: Case = {"sha256": prompt.sha256, "error": None}
        began = time.perf_counter()
        try:
            scores = score(prompt, endpoint.prompt_logprobs(prompt.token_ids))
        except RequestError as error:
            return case | {"error": str(error)}
        answers = [
            {"place": answer.begin, "distance": answer.distance, "ranks": ranks}
            for answer, ranks in zip(prompt.answers, scores.ranks)
        ]
        seconds = round(time.perf_counter() - began, 3)
        return case | {"seconds": seconds, "nats": scores.nats, "others": scores.others, "answers": answers}

    def build_prompts(self, endpoint: Endpoint) -> dict[At, Prompt]:
        """By length and number: each of a stretch of the text that begins elsewhere."""
        text_ids = endpoint.tokenize(self.source)
        begin_ids = endpoint.first_tokens()
        # Stretches begin in different places, so that no two prompts of a length begin alike.
        spare = len(text_ids) - self.longest
        if spare < 16 * self.count:
            most = self.longest + 16 * self.count
            raise BenchError(f"text: given {len(text_ids):,} tokens, expected at least {most:,} for such prompts")

        built: dict[At, Prompt] = {}
        for length in self.lengths:
            for i in range(self.count):
                rng = Random(f"{SEED}/{length}/{i}")
                start = spare * i // self.count + rng.randrange(spare // self.count)
                stretch = text_ids[start : start + length]
                prompt = (endpoint.tokenize, begin_ids, stretch, length, self.facts, Templates(), rng)
                built[length, i] = build_prompt(*prompt)
        return built


def right_answers(case: Case) -> list[bool]:
    """Right is an answer whose tokens are all of rank 1."""
    return [all(rank == 1 for rank in answer["ranks"]) for answer in case["answers"]]


def perplexity_change(first: Mapping[int, Case], second: Mapping[int, Case]) -> tuple[float | None, float | None]:
    """In per cent, of the prompts that both answered, and its standard error over these; by each prompt's number."""
    nats = [
        second[i]["nats"] / second[i]["others"] - case["nats"] / case["others"]
        for i, case in first.items()
        if i in second
    ]
    if not nats:
        return None, None
    ratio = math.exp(fmean(nats))
    return 100 * (ratio - 1), 100 * ratio * stdev(nats) / math.sqrt(len(nats)) if len(nats) > 1 else None


def summaries(cases: Sequence[Case], labels: Sequence[str], lengths: Sequence[int]) -> list[Case]:
    """For each label and length: right of asked, beside the first label's on the prompts that both answered."""
    asked = {(c["label"], c["tokens"], c["prompt"]): c for c in cases if c["part"] == "prompt"}
    density = densities(cases)
    rows = []
    for length in lengths:
        base = {i: c for (label, n, i), c in asked.items() if label == labels[0] and n == length and c["error"] is None}
        for label in labels:
            of = [c for (name, n, _), c in asked.items() if name == label and n == length]
            good = {c["prompt"]: c for c in of if c["error"] is None}
            shares = [Share(sum(right_answers(c)), len(c["answers"])) for c in good.values()]
            whole = Share(sum(one.right for one in shares), sum(one.asked for one in shares))
            both = base.keys() & good.keys()
            first = sum(sum(right_answers(base[i])) for i in both)
            others = sum(c["others"] for c in good.values())
            change, its_error = (None, None) if label == labels[0] else perplexity_change(base, good)
            rows.append({
                "label": label, "tokens": length, "answers": str(whole) or None, "right": whole.right,
                "asked": whole.asked, "share": whole.share if whole.asked else None,
                "standard_error": standard_error(shares) if whole.asked else None,
                "of_first": sum(sum(right_answers(good[i])) for i in both) / first if first else None,
                "perplexity": math.exp(sum(c["nats"] for c in good.values()) / others) if others else None,
                "perplexity_change": change, "perplexity_change_error": its_error,
                "density": density.get(label), "failed": len(of) - len(good),
            })  # fmt: skip
    return rows
