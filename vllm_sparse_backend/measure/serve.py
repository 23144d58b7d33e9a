# SPDX-License-Identifier: Apache-2.0
"""`bench serve`: TTFT and TPOT of several servers, all of which get the same prompts.

Servers that run already are asked in turn, each prompt there and back; those that are started are asked one after the
other, each with the whole device to itself, its levels in turn.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from vllm_sparse_backend.measure.client import Prompts
from vllm_sparse_backend.measure.contestants import Contestant, opened
from vllm_sparse_backend.measure.latency import Length, Taken, ask_in_turn, case_of, repeats_of
from vllm_sparse_backend.measure.report import BenchError, Report
from vllm_sparse_backend.measure.scrape import Pairs
from vllm_sparse_backend.measure.server import max_positions

LENGTHS = (1024, 8192, 32768, 65536, 131072)


@dataclass(frozen=True)
class Asking:
    """What every server is asked."""

    lengths: tuple[Length, ...]
    output_tokens: int
    most_repeats: int
    text: str | None

    @property
    def longest(self) -> int:
        """Tokens of the longest request, its answer included."""
        return max(length.new_tokens + length.cached_tokens for length in self.lengths) + self.output_tokens

    @property
    def steps(self) -> int:
        """Requests that each server gets."""
        return sum(repeats_of(length, self.most_repeats) + 1 for length in self.lengths)


def fitting(model: Path | None, output_tokens: int) -> list[int]:
    """Of the usual lengths those that the model has positions for."""
    most = None if model is None else max_positions(model)
    return [length for length in LENGTHS if most is None or length + output_tokens <= most]


def compare(contestants: Sequence[Contestant], asking: Asking, report: Report, step: Callable[[], None]) -> None:
    """Cases of every server but the first, beside the first's. Raises BenchError, or ServerError."""
    first: dict[Length, Taken] = {}
    labels = [one.label for one in contestants[1:]]
    if not labels or len(set(labels)) < len(labels):
        raise BenchError(f"servers to compare to the first: {', '.join(labels) or 'none'}; expected each --label once")
    how = (asking.output_tokens, asking.most_repeats, step)
    for _, group in groupby(contestants, key=lambda one: one.is_running or one.open):
        with opened(members := list(group)) as servers:
            prompts = Prompts.of(servers[0], asking.text)  # each time the same
            for length, taken in ask_in_turn(servers, asking.lengths, prompts, *how):
                for one, of_server in zip(members, taken, strict=True):
                    if first.setdefault(length, of_server) is not of_server:
                        report.add_case(case_of(one.label, length, first[length], of_server))
    for label in labels:
        density = Pairs.of_cases(case for case in report.cases if case["label"] == label).density
        report.add_case({"part": "density", "label": label, "density": density})
