# SPDX-License-Identifier: Apache-2.0
"""Time to first token and per later token of two servers, asked in turn: ABBA, one request at a time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from vllm_sparse_backend.bench.endpoint import Answer, Endpoint, Prompts, RequestError
from vllm_sparse_backend.bench.report import Report

COLUMNS = {
    "case": "prompt",
    "repeats": "times",
    "stock_first_s": "stock: first token, s",
    "ours_first_s": "ours",
    "times_sooner": "times sooner",
    "stock_token_ms": "stock: per later token, ms",
    "ours_token_ms": "ours",
    "token_ratio": "stock ÷ ours",
    "failures": "failed",
}


@dataclass(frozen=True)
class Length:
    """``new_tokens`` after ``cached_tokens``, which are sent alone just before, so that a prefix cache has them."""

    new_tokens: int
    cached_tokens: int = 0

    def __str__(self) -> str:
        after = f" new after {self.cached_tokens:,} cached" if self.cached_tokens else " tokens"
        return f"{self.new_tokens:,}{after}"


@dataclass
class Taken:
    """Answers of one server, and what went wrong."""

    answers: list[Answer] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @property
    def first_s(self) -> float | None:
        return median(answer.first_token_s for answer in self.answers) if self.answers else None

    @property
    def token_s(self) -> float | None:
        later = [answer.per_token_s for answer in self.answers if answer.per_token_s is not None]
        return median(later) if later else None


def repeats_of(length: Length, most: int) -> int:
    """Fewer of the long ones: they take longer and vary less. Short first tokens of 30 ms drown in noise otherwise."""
    return max(3, min(most, 200_000 // max(1, length.new_tokens)))


def compare(
    servers: Sequence[Endpoint],
    lengths: Sequence[Length],
    prompts: Prompts,
    output_tokens: int,
    most_repeats: int,
    report: Report,
    label: str,
    on_case: Callable[[dict[str, Any]], None],
) -> list[dict[str, Any]]:
    """Two servers, stock first. A length that no request of one of them answered gets no ratio."""
    cases = []
    prefixes = {n: prompts.take(n) for n in {length.cached_tokens for length in lengths} if n}
    for length in lengths:
        repeats = repeats_of(length, most_repeats)
        taken = {server.name: Taken() for server in servers}
        for i in range(-1, repeats):  # the first warms up
            prefix = prefixes.get(length.cached_tokens, [])
            prompt = prefix + prompts.take(length.new_tokens)
            for server in servers if i % 2 else servers[::-1]:
                _ask(server, prefix, prompt, output_tokens, taken[server.name], counted=i >= 0)
        case = case_of(label, length, repeats, *(taken[server.name] for server in servers))
        report.add_case(case)
        _add_figures(report, label, length, case)
        cases.append(case)
        on_case(case)
    return cases


def _ask(
    server: Endpoint, prefix: list[int], prompt: list[int], output_tokens: int, taken: Taken, counted: bool
) -> None:
    try:
        if prefix:
            server.ask(prefix, 1)
        answer = server.ask(prompt, output_tokens)
    except RequestError as error:
        taken.failures.append(str(error))  # one that warms up counts too: it should have been answered
        return
    if counted:
        taken.answers.append(answer)


def case_of(label: str, length: Length, repeats: int, stock: Taken, ours: Taken) -> dict[str, Any]:
    case: dict[str, Any] = {
        "part": "latency", "label": label, "case": str(length), "new_tokens": length.new_tokens,
        "cached_tokens": length.cached_tokens, "repeats": repeats,
        "stock_first_s": stock.first_s, "ours_first_s": ours.first_s,
        "stock_token_ms": None if stock.token_s is None else stock.token_s * 1e3,
        "ours_token_ms": None if ours.token_s is None else ours.token_s * 1e3,
        "failures": len(stock.failures) + len(ours.failures),
        "said": [*(f"stock: {said}" for said in stock.failures), *(f"ours: {said}" for said in ours.failures)][:10],
        "answers": {
            name: [(answer.first_token_s, answer.per_token_s) for answer in taken.answers]
            for name, taken in (("stock", stock), ("ours", ours))
        },
    }  # fmt: skip
    if stock.first_s and ours.first_s:
        case["times_sooner"] = stock.first_s / ours.first_s
    if stock.token_s and ours.token_s:
        case["token_ratio"] = stock.token_s / ours.token_s
    return case


def _add_figures(report: Report, label: str, length: Length, case: dict[str, Any]) -> None:
    about = f"vllm serve, {label}, {length}"
    if "times_sooner" in case:
        report.add_figure(f"{about}: first token, times sooner", case["times_sooner"], "ratio", "higher")
        report.add_figure(f"{about}: first token", case["ours_first_s"], "s", "lower")
    if "token_ratio" in case:
        report.add_figure(f"{about}: per output token, times faster", case["token_ratio"], "ratio", "higher")
