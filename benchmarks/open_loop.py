# SPDX-License-Identifier: Apache-2.0
"""Open loop: short and long requests arrive at random times, whether or not the server has answered earlier ones.

    python -m benchmarks.open_loop capacity TEXT.txt stock=http://localhost:8000 ours=http://localhost:8001
    python -m benchmarks.open_loop latency TEXT.txt stock=http://localhost:8000 ours=http://localhost:8001 \\
        --capacity 1.2

A setting is NAME=URL or NAME=URL@LEVEL; the first is
the baseline. Arrivals are a Poisson process. Gaps and lengths come from one seed, so all settings get the same
arrivals, and another rate only scales the gaps. Every request has its own text. TTFT counts from the arrival time, and
"latest" is the longest time from an arrival to its request in milliseconds: how late this program was.

`capacity` finds the highest rate at which p99 TTFT of short requests stays below five seconds: 1 % of them may take
longer. It bisects, and a trial ends early if more did. The bounds of ``--between`` are not tried.

`latency` measures TTFT at shares of a capacity, one setting after the other, in reverse order at every second share.
Errors are from a bootstrap over blocks of requests.
"""

import math
import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from benchmarks.options import numbers
from benchmarks.traffic import CacheReads, Traffic, compare, show_rows
from vllm_sparse_backend.cli.commands import add_command
from vllm_sparse_backend.evaluation.client import Endpoint, Prompts
from vllm_sparse_backend.evaluation.report import BenchError

LIMIT_S = 5.0
SLOW_SHARE = 0.01
"""Share of short requests whose TTFT may exceed the limit."""

PRECISION = 1.05
"""Bisection ends when the rate that fails is at most this many times the rate that holds."""

BLOCKS = 20
"""Blocks of consecutive requests, which the bootstrap draws: waiting times of neighbours are not independent."""


@dataclass(frozen=True)
class Request:
    arrival_s: float
    kind: str
    prompt: list[int]


@dataclass(frozen=True)
class Answered:
    request: Request
    late_s: float
    """Time from the arrival to sending the request."""
    first_token_s: float
    """Time from the arrival to the first token."""

    @property
    def is_slow(self) -> bool:
        return self.request.kind == "short" and self.first_token_s > LIMIT_S


def send_all(endpoint: Endpoint, requests: Sequence[Request], tokens: int, most_slow: float) -> list[Answered]:
    """Send each request at its arrival time, and wait for all answers. More slow ones than ``most_slow`` end it."""
    before, began = CacheReads.of(endpoint), time.perf_counter()

    def send(request: Request) -> Answered:
        late_s = time.perf_counter() - began - request.arrival_s
        answer = endpoint.ask(request.prompt, tokens)
        whole_s = time.perf_counter() - began - request.arrival_s
        return Answered(request, late_s, whole_s - (answer.last_token_s - answer.first_token_s))

    answers: list[Future[Answered]] = []
    with ThreadPoolExecutor(len(requests)) as pool:  # a thread for each request: none waits for another's answer
        for request in requests:
            time.sleep(max(request.arrival_s - (time.perf_counter() - began), 0))
            answers.append(pool.submit(send, request))
            if sum(answer.done() and answer.result().is_slow for answer in answers) > most_slow:
                break
    before.require(endpoint, [(len(request.prompt), 0) for request in requests[: len(answers)]])
    return [answer.result() for answer in answers]


@dataclass(frozen=True, kw_only=True)
class OpenLoop(Traffic):
    """Options of both commands."""

    seconds: Annotated[float, typer.Option(help="Time in which requests arrive.")] = 180.0
    short: Annotated[str, typer.Option(help="Fewest and most tokens of short requests.")] = "500,2000"
    long: Annotated[str, typer.Option(help="Fewest and most tokens of long requests.")] = "30000,100000"
    long_share: Annotated[float, typer.Option(help="Share of long requests.")] = 0.05
    tokens: Annotated[int, typer.Option(help="Output tokens.")] = 100

    def draw(self, texts: Prompts, rate: float) -> list[Request]:
        """Return requests that arrive at ``rate`` per second. Other rates have the same lengths and scaled gaps."""
        rng = random.Random(self.seed)
        ranges = {"short": numbers(self.short), "long": numbers(self.long)}
        requests: list[Request] = []
        arrival_s = rng.expovariate(rate)
        while arrival_s < self.seconds:
            kind = "long" if rng.random() < self.long_share else "short"
            requests.append(Request(arrival_s, kind, texts.take(rng.randint(*ranges[kind]))))
            arrival_s += rng.expovariate(rate)
        if not requests:
            raise BenchError(f"--seconds: no request arrives in {self.seconds:g} s at {rate:g} per second; raise it")
        return requests


@dataclass(frozen=True, kw_only=True)
class Capacity(OpenLoop):
    """Find each setting's capacity: the highest arrival rate at which short requests keep the limit."""

    between: Annotated[str, typer.Option(help="A rate that holds and one that does not, per second.")] = "0.25,8"
    budget: Annotated[float, typer.Option(help="Seconds for all trials of all settings.")] = 3600.0

    def run(self) -> None:
        show_rows(self.trials(), self.out)

    def trials(self) -> Iterator[dict[str, Any]]:
        """Yield one row for each trial. The last row of a setting has its capacity."""
        endpoints, texts = self.connect()
        began = time.monotonic()
        for i, endpoint in enumerate(endpoints):
            last_start = began + self.budget * (i + 1) / len(endpoints) - self.seconds
            low, high = map(float, self.between.split(","))
            while high / low > PRECISION and time.monotonic() < last_start:
                rate = math.sqrt(low * high)
                requests = self.draw(texts, rate)
                most_slow = SLOW_SHARE * sum(request.kind == "short" for request in requests)
                answers = send_all(endpoint, requests, self.tokens, most_slow)
                num_slow = sum(answer.is_slow for answer in answers)
                low, high = (low, rate) if num_slow > most_slow else (rate, high)
                yield {
                    "setting": endpoint.name, "rate": rate, "arrivals": len(requests), "sent": len(answers),
                    "slow": num_slow, "may be slow": most_slow, "latest, ms": latest_ms(answers),
                    "holds": low, "does not hold": high,
                }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Latency(OpenLoop):
    """Measure TTFT of short and of long requests at shares of a capacity."""

    capacity: Annotated[float, typer.Option(help="The baseline's capacity, in requests per second.")]
    at: Annotated[str, typer.Option(help="Shares of the capacity.")] = "0.5,0.8,1.1"

    def run(self) -> None:
        show_rows(self.rows(), self.out)

    def rows(self) -> Iterator[dict[str, Any]]:
        endpoints, texts = self.connect()
        for i, share in enumerate(map(float, self.at.split(","))):
            requests = self.draw(texts, share * self.capacity)
            order = endpoints[::-1] if i % 2 else endpoints
            by_name = {endpoint.name: send_all(endpoint, requests, self.tokens, math.inf) for endpoint in order}
            answers = {endpoint.name: by_name[endpoint.name] for endpoint in endpoints}
            latest = max(map(latest_ms, answers.values()))
            for kind in sorted({request.kind for request in requests}):
                seconds = {name: blocks(of_name, kind) for name, of_name in answers.items()}
                num_requests = sum(request.kind == kind for request in requests)
                about = {"of capacity": share, "latest, ms": latest, "kind": kind, "requests": num_requests}
                for statistic in ("p50", "p99"):
                    yield compare(about, seconds, statistic)


def blocks(answers: Sequence[Answered], kind: str) -> list[list[float]]:
    """Return the TTFT of one kind of request, in blocks by arrival."""
    seconds = [answer.first_token_s for answer in answers if answer.request.kind == kind]
    size = math.ceil(len(seconds) / BLOCKS)
    return [seconds[i : i + size] for i in range(0, len(seconds), size)]


def latest_ms(answers: Sequence[Answered]) -> float:
    return 1000 * max(answer.late_s for answer in answers)


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    add_command(app, Capacity)
    add_command(app, Latency)
    app()
