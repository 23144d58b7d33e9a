# SPDX-License-Identifier: Apache-2.0
"""`eval answers`: sends the same prompts to several servers, started one after the other or already running."""

import time
from collections.abc import Mapping, Sequence

from vllm_sparse_backend.evaluation.agreement import TOP
from vllm_sparse_backend.evaluation.answer_prompts import Prompt, PromptKey
from vllm_sparse_backend.evaluation.answer_scores import CASE, AnsweredPrompt, PromptScores, read_cases
from vllm_sparse_backend.evaluation.answer_workload import AnswerWorkload
from vllm_sparse_backend.evaluation.client import Endpoint, RequestError
from vllm_sparse_backend.evaluation.compared_servers import Contestant, groups, opened
from vllm_sparse_backend.evaluation.metrics_scrape import parse_metrics
from vllm_sparse_backend.evaluation.report import BenchError, CaseReport
from vllm_sparse_backend.progress import Progress

SAMPLE_CHARS = 2000
"""Characters of the text by which tokenizers of servers are compared."""


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
