# SPDX-License-Identifier: Apache-2.0
"""`bench serve`: TTFT, TPOT and a mixed load of several servers, all of which get the same prompts.

Servers that run already are asked in turn, each prompt there and back; those that are started are asked one after the
other, each with the whole device to itself, its levels in turn.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from vllm_sparse_backend.measure.client import Endpoint, Prompts
from vllm_sparse_backend.measure.contestants import Contestant, opened
from vllm_sparse_backend.measure.latency import Length, Taken, ask_in_turn, case_of, repeats_of
from vllm_sparse_backend.measure.load import Mix, require_pandas, run_load
from vllm_sparse_backend.measure.report import BenchError, Report
from vllm_sparse_backend.measure.scrape import Pairs
from vllm_sparse_backend.measure.server import max_positions

LENGTHS = (1024, 8192, 32768, 65536, 131072)
REQUESTS = 48
"""Of the mixed load, by default."""


@dataclass(frozen=True)
class Asking:
    """What every server is asked."""

    lengths: tuple[Length, ...]
    output_tokens: int
    most_repeats: int
    mix: Mix | None
    text: str | None

    @property
    def longest(self) -> int:
        """Tokens of the longest request, its answer included."""
        return max(length.new_tokens + length.cached_tokens for length in self.lengths) + self.output_tokens

    @property
    def steps(self) -> int:
        """Requests of one prompt that each server gets, and its load."""
        return sum(repeats_of(length, self.most_repeats) + 1 for length in self.lengths) + (self.mix is not None)


def fitting(model: Path | None, output_tokens: int) -> list[int]:
    """Of the usual lengths those that the model has positions for."""
    most = None if model is None else max_positions(model)
    return [length for length in LENGTHS if most is None or length + output_tokens <= most]


def mix_of(
    requests: int | None, rate: float | None, clients: int | None, lengths: Sequence[Length], output_tokens: int
) -> Mix | None:
    """The mixed load, if any: its long prompts are those of a quarter of the longest length or more.

    Raises BenchError where it was asked for, and cannot be.
    """
    if rate is not None and not rate > 0:
        raise BenchError(f"--rate: given {rate:g}, expected a number above 0")
    if rate is not None and clients is not None:
        raise BenchError("--rate, --concurrency: given both, expected one: clients wait for answers")
    if requests == 0:
        if rate is not None or clients is not None:
            raise BenchError("--rate, --concurrency: given with --requests 0, expected a mixed load to send so")
        return None
    plain = sorted(length.new_tokens for length in lengths if not length.cached_tokens)
    if not plain:
        raise BenchError("--lengths: expected one without a cached prefix, for the mixed load; or --requests 0")
    require_pandas()
    long = tuple(n for n in plain if 4 * n >= plain[-1])
    short = tuple(n for n in plain if n not in long) or long
    return Mix(requests or REQUESTS, rate, short, long, output_tokens=output_tokens, clients=clients)


@dataclass
class OfFirst:
    """What the first server did, which all others are compared to."""

    taken: dict[Length, Taken] = field(default_factory=dict)
    load: dict[str, Any] | None = None


def compare(contestants: Sequence[Contestant], asking: Asking, report: Report, step: Callable[[], None]) -> None:
    """Cases of every server but the first, beside the first's. Raises BenchError, or ServerError."""
    first, labels = OfFirst(), [one.label for one in contestants[1:]]
    if not labels or len(set(labels)) < len(labels):
        raise BenchError(f"servers to compare to the first: {', '.join(labels) or 'none'}; expected each --label once")
    for _, group in groupby(contestants, key=lambda one: one.is_running or one.open):
        with opened(members := list(group)) as servers:
            _ask(dict(zip(members, servers, strict=True)), first, asking, report, step)
    for label in labels:
        density = Pairs.of_cases(case for case in report.cases if case["label"] == label).density
        report.add_case({"part": "density", "label": label, "density": density})


def _ask(
    servers: Mapping[Contestant, Endpoint], first: OfFirst, asking: Asking, report: Report, step: Callable[[], None]
) -> None:
    """Latencies of all of them in turn, then the load of one after the other."""
    prompts = Prompts.of(next(iter(servers.values())), asking.text)  # each time the same
    how = (asking.output_tokens, asking.most_repeats, step)
    for length, taken in ask_in_turn([*servers.values()], asking.lengths, prompts, *how):
        for one, of_server in zip(servers, taken, strict=True):
            if length not in first.taken:
                first.taken[length] = of_server
            else:
                report.add_case(case_of(one.label, length, first.taken[length], of_server))
    if asking.mix is None:
        return
    mix = asking.mix.saturating({length.new_tokens: of.first_s for length, of in first.taken.items()})
    for one, case in zip(servers, run_load([*servers.values()], mix, prompts), strict=True):
        step()
        if first.load is None:
            first.load = case
        else:
            for server, sent in (("stock", first.load), ("ours", case)):
                report.add_case({**sent, "server": server, "label": one.label})
