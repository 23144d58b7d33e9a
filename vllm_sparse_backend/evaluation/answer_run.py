# SPDX-License-Identifier: Apache-2.0
"""`eval answers`: sends the same prompts to several servers, started one after the other or already running."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from vllm_sparse_backend.evaluation.agreement import TOP, NextTokens
from vllm_sparse_backend.evaluation.answers import Prompt, TokenScores, build_prompt
from vllm_sparse_backend.evaluation.client import Endpoint, RequestError
from vllm_sparse_backend.evaluation.compared_servers import Contestant, groups, opened
from vllm_sparse_backend.evaluation.metrics_scrape import parse_metrics
from vllm_sparse_backend.evaluation.prompt_texts import prose, read_prompt_text
from vllm_sparse_backend.evaluation.report import BenchError, Progress, Report
from vllm_sparse_backend.evaluation.tasks import TASKS

Case = dict[str, Any]


class PromptKey(NamedTuple):
    task: str
    tokens: int
    prompt: int
    """Index among prompts of this task and length."""


SEED = 0
"""Seed of facts and their places."""

FACT_TOKENS = 120
"""Minimum tokens of a prompt per fact: statement and question take about 50, and lines fill at most half."""

TEXT_POSITIONS = 512
"""Positions of a prompt outside answers whose next-token distributions are compared: evenly spaced."""


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
    tasks: tuple[str, ...] = ("facts",)

    @staticmethod
    def from_text(
        text: Path | None, lengths: Sequence[int], count: int, facts: int, tasks: Sequence[str] = ("facts",)
    ) -> "AnswerWorkload":
        """Return the workload over a text file or folder, or over generated prose if ``text`` is None."""
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

    def sample_tokens(self, endpoint: Endpoint) -> list[int]:
        """Tokenize the text with a server's tokenizer, to compare it with another's."""
        return endpoint.tokenize(self.text[:2000], special=True)

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


def ask(endpoint: Endpoint, prompt: Prompt) -> Case:
    """Send a prompt, and return its case. A failed or incomplete request has an ``error`` and no answers."""
    case: Case = {"sha256": prompt.sha256, "error": None}
    began = time.perf_counter()
    try:
        returned = endpoint.prompt_logprobs(prompt.token_ids, TOP)
        scores = TokenScores.of(prompt.token_ids, returned)
    except RequestError as error:
        return case | {"error": str(error)}
    text_places = prompt.text_places
    sample = text_places[:: max(1, len(text_places) // TEXT_POSITIONS)]
    return case | {
        "seconds": round(time.perf_counter() - began, 3),
        "nats": math.fsum(-scores.logprobs[place] for place in text_places),
        "others": len(text_places),
        "ranks": scores.of_answers(prompt),
        "next_tokens": {
            part: str(NextTokens.of(returned, places))
            for part, places in (("text", sample), ("answers", prompt.answer_places))
        },
    }


def missing_requests(
    contestants: Sequence[Contestant], workload: AnswerWorkload, report: Report
) -> dict[str, list[PromptKey]]:
    """Return, by label, the prompts that a report lacks. Raises BenchError if two servers share a label."""
    labels = [contestant.label for contestant in contestants]
    if len(set(labels)) < len(labels):
        raise BenchError(f"--label: given {', '.join(labels)}, expected each label only once")
    answered = {(case["label"], PromptKey(case["task"], case["tokens"], case["prompt"])) for case in report.cases}
    return {label: [key for key in workload.wanted if (label, key) not in answered] for label in labels}


def ask_all(contestants: Sequence[Contestant], workload: AnswerWorkload, report: Report, progress: Progress) -> None:
    """Add a case for each server and prompt that the report lacks. Raises BenchError or ServerError."""
    todo = missing_requests(contestants, workload, report)
    progress.begin(report.bench, sum(map(len, todo.values())))
    prompts: dict[PromptKey, Prompt] = {}
    sample: list[int] = []
    for group in groups([contestant for contestant in contestants if todo[contestant.label]]):
        with opened(group, progress) as endpoints:
            for contestant, endpoint in zip(group, endpoints, strict=True):
                tokens = workload.sample_tokens(endpoint)
                if not prompts:  # the first server that is ready makes the prompts for all servers
                    sample, prompts = tokens, workload.build_prompts(endpoint)
                if tokens != sample:
                    raise BenchError(
                        f"{contestant.label}: its tokenizer differs from the first server's, so prompts would differ"
                    )
                wanted = {prompt_key: prompts[prompt_key] for prompt_key in todo[contestant.label]}
                for case in _ask_server(contestant, endpoint, wanted):
                    report.add_case(case)
                    progress.step()
                    progress.print(f"{name_case(case)}: {describe_case(case)}")


def _ask_server(contestant: Contestant, endpoint: Endpoint, prompts: Mapping[PromptKey, Prompt]) -> Iterator[Case]:
    """Yield a case for each prompt, with its density and the reasons for dense rows if the server counts them."""
    about = {name: getattr(contestant, name) for name in ("label", "what", "model", "level")}
    before = parse_metrics(endpoint.metrics())
    for key, prompt in prompts.items():
        case = {**about, **key._asdict(), **ask(endpoint, prompt)}
        after = parse_metrics(endpoint.metrics())
        if before.samples and after.samples:
            counts = after - before
            dense = {reason: count for (path, reason), count in counts.rows.items() if path == "dense"}
            case |= {**counts.pairs.figures, "dense_rows": dense}
        yield case
        before = after


def describe_case(case: Case) -> str:
    """Return the outcome of a request in a few words."""
    if case["error"] is not None:
        return f"failed: {case['error']}"
    return f"{sum(right_answers(case))} of {len(case['ranks'])} right, {case['seconds']:.1f} s"


def name_case(case: Case) -> str:
    """Return the server and the prompt of a request."""
    return f"{case['label']}, {case['task']}, {case['tokens']:,} tokens, prompt {case['prompt'] + 1}"


def right_answers(case: Case) -> list[bool]:
    """Return for each answer whether it is right: all of its tokens have rank 1."""
    return [all(rank == 1 for rank in ranks) for ranks in case["ranks"]]
