# SPDX-License-Identifier: Apache-2.0
"""`eval answers`: makes prompts, and sends them to several servers, started one after the other or already running."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from random import Random

from vllm_sparse_backend.evaluation.agreement import TOP
from vllm_sparse_backend.evaluation.answer_prompts import Prompt, PromptKey, build_prompt
from vllm_sparse_backend.evaluation.answer_scores import CASE, AnsweredPrompt, PromptScores, read_cases
from vllm_sparse_backend.evaluation.client import Endpoint, RequestError
from vllm_sparse_backend.evaluation.compared_servers import Contestant, groups, opened
from vllm_sparse_backend.evaluation.metrics_scrape import parse_metrics
from vllm_sparse_backend.evaluation.report import BenchError, CaseReport
from vllm_sparse_backend.evaluation.tasks import TASKS
from vllm_sparse_backend.progress import Progress
from vllm_sparse_backend.prompts.texts import prose, read_prompt_text

SEED = 0
"""Seed of facts and their places."""

FACT_TOKENS = 120
"""Minimum tokens of a prompt per fact: statement and question take about 50, and lines fill at most half."""

SAMPLE_CHARS = 2000
"""Characters of the text by which tokenizers of servers are compared."""


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


def ask(endpoint: Endpoint, prompt: Prompt) -> PromptScores:
    """Send a prompt, and score its answers. Raises RequestError if the request failed or its answer is incomplete."""
    began = time.perf_counter()
    returned = endpoint.prompt_logprobs(prompt.token_ids, TOP)
    return PromptScores.of(prompt, returned, time.perf_counter() - began)


def ask_all(
    contestants: Sequence[Contestant], workload: AnswerWorkload, report: CaseReport, progress: Progress
) -> list[AnsweredPrompt]:
    """Add a case for each server and prompt that the report lacks, and return all. Raises BenchError or ServerError."""
    answered = {(prompt.label, prompt.key) for prompt in read_cases(report.cases)}
    missing = {
        contestant.label: [key for key in workload.wanted if (contestant.label, key) not in answered]
        for contestant in contestants
    }
    progress.begin(report.bench, sum(map(len, missing.values())))
    prompts: dict[PromptKey, Prompt] = {}
    sample: list[int] = []
    for group in groups([contestant for contestant in contestants if missing[contestant.label]]):
        with opened(group, progress) as endpoints:
            for contestant, endpoint in zip(group, endpoints, strict=True):
                tokens = endpoint.tokenize(workload.text[:SAMPLE_CHARS], special=True)
                if not prompts:  # the first server that is ready makes the prompts for all servers
                    sample, prompts = tokens, workload.build_prompts(endpoint)
                if tokens != sample:
                    raise BenchError(
                        f"{contestant.label}: its tokenizer differs from the first server's, so prompts would differ"
                    )
                wanted = {key: prompts[key] for key in missing[contestant.label]}
                _ask_server(contestant, endpoint, wanted, report, progress)
    return read_cases(report.cases)


def _ask_server(
    contestant: Contestant,
    endpoint: Endpoint,
    prompts: Mapping[PromptKey, Prompt],
    report: CaseReport,
    progress: Progress,
) -> None:
    """Add a case for each prompt, with its density and the reasons for dense rows if the server counts them."""
    before = parse_metrics(endpoint.metrics())
    for key, prompt in prompts.items():
        scores, error = None, None
        try:
            scores = ask(endpoint, prompt)
        except RequestError as failure:
            error = str(failure)
        after = parse_metrics(endpoint.metrics())
        pairs, dense_rows = None, None
        if before.samples and after.samples:
            counts = after - before
            pairs = counts.pairs
            dense_rows = {reason: count for (path, reason), count in counts.rows.items() if path == "dense"}
        before = after
        answered = AnsweredPrompt(
            label=contestant.label,
            level=contestant.level,
            key=key,
            error=error,
            scores=scores,
            pairs=pairs,
            dense_rows=dense_rows,
        )
        report.add_case(CASE.dump_python(answered, mode="json"))
        progress.step()
        progress.print(f"{answered}: {answered.outcome}")
