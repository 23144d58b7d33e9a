# SPDX-License-Identifier: Apache-2.0
"""Time to first token and per later token of servers, asked in turn: ABBA, one request at a time."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from vllm_sparse_backend.measure.endpoint import Answer, Endpoint, Prompts, RequestError
from vllm_sparse_backend.measure.pairs import Pairs
from vllm_sparse_backend.measure.report import Report

COLUMNS = {
    "case": "prompt",
    "repeats": "times",
    "stock_first_s": "stock: first token, s",
    "ours_first_s": "ours",
    "times_sooner": "times sooner",
    "density": "density",
    "stock_token_ms": "stock: per later token, ms",
    "ours_token_ms": "ours",
    "token_ratio": "stock ÷ ours",
    "stock_paused_s": "stock: paused a request, s",
    "ours_paused_s": "ours",
    "failures": "failed",
}

MOST_TO_WARM_UP = 32768
"""Tokens of a prompt: a longer one warms up no better."""


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
    pairs: Pairs = field(default_factory=Pairs)
    """Of one of the requests that were timed."""

    @property
    def first_s(self) -> float | None:
        return median(answer.first_token_s for answer in self.answers) if self.answers else None

    @property
    def waits_s(self) -> list[float]:
        """For all later tokens of all answers."""
        return [wait for answer in self.answers for wait in answer.waits_s]

    @property
    def token_s(self) -> float | None:
        """What a later token takes: the median of all. A mean is made by the few for which a whole server pauses."""
        return median(self.waits_s) if self.waits_s else None

    @property
    def paused_s(self) -> float | None:
        """For how long a request's later tokens paused, in the mean: what waits were longer than ten of the median."""
        if (usual := self.token_s) is None:
            return None
        return sum(wait for wait in self.waits_s if wait > 10 * usual) / len(self.answers)


def repeats_of(length: Length, most: int) -> int:
    """Fewer of the long ones: they take longer and vary less. Short first tokens of 30 ms drown in noise otherwise."""
    return min(most, max(3, 200_000 // max(1, length.new_tokens)))


def compare(
    stock: Endpoint,
    ours: Mapping[str, Endpoint],
    lengths: Sequence[Length],
    prompts: Prompts,
    output_tokens: int,
    most_repeats: int,
    report: Report,
    on_case: Callable[[dict[str, Any]], None],
) -> list[dict[str, Any]]:
    """Stock and, by label, what is compared with it, all in turn. A length that either never answered gets no ratio."""
    cases = []
    servers = [stock, *ours.values()]
    for length, (of_stock, *of_ours) in ask_in_turn(servers, lengths, prompts, output_tokens, most_repeats):
        cases += report_cases(length, of_stock, dict(zip(ours, of_ours, strict=True)), report, on_case)
    return cases


def ask_in_turn(
    servers: Sequence[Endpoint], lengths: Sequence[Length], prompts: Prompts, output_tokens: int, most_repeats: int
) -> Iterator[tuple[Length, list[Taken]]]:
    """Each prompt of all servers, there and back. Prompts depend on what was taken of ``prompts`` before, no more."""
    prefixes = {n: prompts.take(n) for n in {length.cached_tokens for length in lengths} if n}
    for length in lengths:
        asked = [(server, Taken()) for server in servers]
        prefix = prefixes.get(length.cached_tokens, [])
        for i in range(-1, repeats_of(length, most_repeats)):  # the first warms up
            prompt = prefix + prompts.take(length.new_tokens if i >= 0 else min(length.new_tokens, MOST_TO_WARM_UP))
            for server, taken in asked if i % 2 else asked[::-1]:
                before = Pairs.of(server) if i == 0 else Pairs()
                _ask(server, prefix, prompt, output_tokens, taken, timed=i >= 0)
                if i == 0:
                    taken.pairs = Pairs.of(server) - before
        yield length, [taken for _, taken in asked]


def report_cases(
    length: Length,
    of_stock: Taken,
    ours: Mapping[str, Taken],
    report: Report,
    on_case: Callable[[dict[str, Any]], None],
) -> list[dict[str, Any]]:
    """Cases and figures of one length, by label."""
    cases = []
    for label, taken in ours.items():
        case = case_of(label, length, of_stock, taken)
        report.add_case(case)
        _add_figures(report, label, length, case)
        cases.append(case)
        on_case(case)
    return cases


def _ask(server: Endpoint, prefix: list[int], prompt: list[int], output_tokens: int, taken: Taken, timed: bool) -> None:
    try:
        if prefix:
            server.ask(prefix, 1)
        answer = server.ask(prompt, output_tokens)
    except RequestError as error:
        taken.failures.append(str(error))  # one that warms up counts too: it should have been answered
        return
    if timed:
        taken.answers.append(answer)


def case_of(label: str, length: Length, stock: Taken, ours: Taken) -> dict[str, Any]:
    case: dict[str, Any] = {
        "part": "latency", "label": label, "case": str(length), "new_tokens": length.new_tokens,
        "cached_tokens": length.cached_tokens, "repeats": len(ours.answers),
        "stock_first_s": stock.first_s, "ours_first_s": ours.first_s,
        "stock_token_ms": None if stock.token_s is None else stock.token_s * 1e3,
        "ours_token_ms": None if ours.token_s is None else ours.token_s * 1e3,
        "stock_paused_s": stock.paused_s, "ours_paused_s": ours.paused_s,
        "density": ours.pairs.density, "kept_pairs": ours.pairs.kept, "causal_pairs": ours.pairs.causal,
        "failures": len(stock.failures) + len(ours.failures),
        "said": [*(f"stock: {said}" for said in stock.failures), *(f"ours: {said}" for said in ours.failures)][:10],
        "answers": {
            name: [(answer.first_token_s, answer.waits_s) for answer in taken.answers]
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
        if case["density"] is not None:
            report.add_figure(f"{about}: density of its sparse rows", case["density"], "share", "lower")
    if "token_ratio" in case:
        report.add_figure(f"{about}: per output token, times faster", case["token_ratio"], "ratio", "higher")
