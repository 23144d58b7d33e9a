# SPDX-License-Identifier: Apache-2.0
"""`bench serve`: TTFT and TPOT of several servers on the same prompts.

Running servers alternate: each prompt goes through the servers in order and then in reverse order. Servers that this
command starts are measured one after the other, each with the whole device to itself. The levels of a server alternate.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from statistics import median
from typing import Any

from vllm_sparse_backend.evaluation.client import Endpoint, Prompts, RequestError, TimedAnswer
from vllm_sparse_backend.evaluation.compared_servers import Contestant, groups, opened
from vllm_sparse_backend.evaluation.metrics_scrape import Pairs, parse_metrics
from vllm_sparse_backend.evaluation.report import BenchError, CaseReport, line_of, table_of
from vllm_sparse_backend.progress import Progress

BASELINE_KEY, COMPARED_KEY = "stock", "ours"
"""Prefixes of a case's keys. The baseline is the first server, whose label need not be ``stock``."""

COLUMNS = {
    "case": "prompt",
    "ours_first_s": "TTFT, s",
    "stock_first_s": "baseline",
    "ttft_speed_up": "speed-up",
    "density": "density",
    "ours_token_ms": "TPOT, ms",
    "stock_token_ms": "baseline",
}

LENGTHS = (1024, 8192, 32768, 65536, 131072)
MOST_TO_WARM_UP = 32768
"""Maximum tokens of a warm-up prompt. A longer prompt does not warm up better."""


@dataclass(frozen=True)
class Length:
    """``new_tokens`` after ``cached_tokens``, which a separate request puts into the prefix cache just before."""

    new_tokens: int
    cached_tokens: int = 0

    def __str__(self) -> str:
        after = f" new after {self.cached_tokens:,} cached" if self.cached_tokens else " tokens"
        return f"{self.new_tokens:,}{after}"


@dataclass
class ServerResults:
    """Answers and failures of one server."""

    answers: list[TimedAnswer] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    """Errors of failed requests, including warm-up requests."""
    pairs: Pairs = field(default_factory=Pairs)
    """Pairs of one timed request."""

    def ask(self, server: Endpoint, prefix: Sequence[int], prompt: Sequence[int], max_tokens: int) -> None:
        """Send a prompt after a separate request that caches its ``prefix``, and add the answer or the failure."""
        try:
            if prefix:
                server.ask(prefix, 1)
            self.answers.append(server.ask(prompt, max_tokens))
        except RequestError as error:
            self.failures.append(str(error))

    @property
    def first_s(self) -> float | None:
        return median(answer.first_token_s for answer in self.answers) if self.answers else None

    @property
    def token_ms(self) -> float | None:
        """Median over requests of the mean time between tokens, in ms."""
        request_ms = [1e3 * taken for answer in self.answers if (taken := answer.token_s) is not None]
        return median(request_ms) if request_ms else None


def repeats_of(length: Length, most: int) -> int:
    """Return the number of repeats of a length: more for short prompts, whose TTFT varies more."""
    return min(most, max(3, 200_000 // length.new_tokens))


def case_of(
    length: Length, baseline_label: str, baseline: ServerResults, label: str, compared: ServerResults
) -> dict[str, Any]:
    """Return the case that compares a server with the baseline. A server without answers has no ratios."""
    pairs = compared.pairs
    case: dict[str, Any] = {
        "label": label, "first": baseline_label, "case": str(length), "new_tokens": length.new_tokens,
        "cached_tokens": length.cached_tokens, "repeats": len(compared.answers),
        "density": pairs.density, "kept_pairs": pairs.kept, "causal_pairs": pairs.causal,
        "failures": len(baseline.failures) + len(compared.failures), "said": [], "answers": {},
    }  # fmt: skip
    for key, name, results in ((BASELINE_KEY, baseline_label, baseline), (COMPARED_KEY, COMPARED_KEY, compared)):
        case["said"] += [f"{name}: {said}" for said in results.failures[:10]]
        case["answers"][key] = [vars(answer) for answer in results.answers]
        case |= {f"{key}_first_s": results.first_s, f"{key}_token_ms": results.token_ms}
    if baseline.first_s and compared.first_s:
        case["ttft_speed_up"] = baseline.first_s / compared.first_s
    if baseline.token_ms and compared.token_ms:
        case["tpot_speed_up"] = baseline.token_ms / compared.token_ms
    return case


def tables(cases: Sequence[Mapping[str, Any]]) -> str:
    """Return a Markdown table for each server."""
    by_label: dict[str, list[Mapping[str, Any]]] = {}
    for case in cases:
        by_label.setdefault(case["label"], []).append(case)
    return "\n".join(
        table_of(
            f"{label}, one request at a time; baseline: {of_label[0]['first']}",
            COLUMNS,
            of_label,
            "density: empty if nothing ran sparse",
        )
        for label, of_label in by_label.items()
    )


@dataclass(frozen=True)
class ServeWorkload:
    """The requests that every server gets."""

    lengths: tuple[Length, ...]
    output_tokens: int
    most_repeats: int
    text: str | None

    @property
    def longest(self) -> int:
        """Tokens of the longest request, including its answer."""
        return max(length.new_tokens + length.cached_tokens for length in self.lengths) + self.output_tokens

    @property
    def num_requests(self) -> int:
        """Requests that each server gets."""
        return sum(repeats_of(length, self.most_repeats) + 1 for length in self.lengths)


def alternate_requests(
    servers: Sequence[Endpoint], workload: ServeWorkload, prompts: Prompts, progress: Progress
) -> Iterator[tuple[Length, list[ServerResults]]]:
    """Send each prompt to all servers, every second prompt in reverse order (ABBA).

    Yields each length with the results of every server. Prompts depend only on the prompts taken from ``prompts``
    before.
    """
    prefixes = {n: prompts.take(n) for n in {length.cached_tokens for length in workload.lengths} if n}
    for length in workload.lengths:
        prefix = prefixes.get(length.cached_tokens, [])
        warm_up = prefix + prompts.take(min(length.new_tokens, MOST_TO_WARM_UP))
        repeats = repeats_of(length, workload.most_repeats)
        first_prompt, *other_prompts = [prefix + prompts.take(length.new_tokens) for _ in range(repeats)]

        results = [ServerResults() for _ in servers]
        forth = list(zip(servers, results, strict=True))
        orders = cycle((forth, forth[::-1]))
        for server, result in next(orders):
            result.ask(server, prefix, warm_up, workload.output_tokens)
            result.answers.clear()  # a warm-up request must be answered, but its time does not count
            progress.step()
        for server, result in next(orders):
            before = parse_metrics(server.metrics())
            result.ask(server, prefix, first_prompt, workload.output_tokens)
            result.pairs = (parse_metrics(server.metrics()) - before).pairs
            progress.step()
        for prompt in other_prompts:
            for server, result in next(orders):
                result.ask(server, prefix, prompt, workload.output_tokens)
                progress.step()
        yield length, results


def compare_servers(
    contestants: Sequence[Contestant], workload: ServeWorkload, report: CaseReport, progress: Progress
) -> None:
    """Add a case for every server after the first, compared with the first. Raises BenchError or ServerError."""
    baseline = contestants[0]
    if len(contestants) == 1:
        raise BenchError(
            "--url: given one server, expected at least two, of which the first is the baseline, or two levels of one "
            "server of this backend, each with --level"
        )
    progress.begin(report.bench, len(contestants) * workload.num_requests)
    baseline_results: dict[Length, ServerResults] = {}
    for group in groups(contestants):
        with opened(group, progress) as servers:
            prompts = Prompts.of(servers[0], workload.text)  # each time the same
            for length, results in alternate_requests(servers, workload, prompts, progress):
                for contestant, result in zip(group, results, strict=True):
                    if contestant is baseline:
                        baseline_results[length] = result
                        continue
                    case = case_of(length, baseline.label, baseline_results[length], contestant.label, result)
                    report.add_case(case)
                    progress.print(f"{contestant.label}: {line_of(COLUMNS, case)}")
