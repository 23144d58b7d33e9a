# SPDX-License-Identifier: Apache-2.0
"""Many clients for a long time: requests of all lengths and levels, over shared prefixes, some of them broken off.

Nothing is timed here. What is looked at is whether every request is answered as asked, and whether the server's memory
stays what it is.
"""

import math
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from vllm_sparse_backend.bench.endpoint import Endpoint, Prompts, RequestError
from vllm_sparse_backend.bench.report import Report
from vllm_sparse_backend.settings.requests import FIELD

SAMPLE_S = 1.0
"""Between two looks at the server's memory."""

MOST_GROWTH = 0.03
MOST_SHOWN = 10

WARM_SHARE = 0.25
"""Of the time, after which memory is expected to stay: caches, buffers and threads are there by then."""


@dataclass(frozen=True)
class Asking:
    """What clients send; equal seeds send alike, but for what the clock decides."""

    seconds: float
    clients: int
    shortest: int
    longest: int
    levels: tuple[object, ...] = (None, 0, 1)
    """What requests ask for, each as often; None asks for nothing."""
    shared_prefixes: int = 8
    prefix_share: float = 0.5
    """Of requests begin like others: with up to as many tokens as one of the shared prefixes has."""
    abort_share: float = 0.1
    """Of requests are broken off by their client after a token or two."""
    most_output_tokens: int = 16
    seed: int = 0


@dataclass
class Outcome:
    """What came of it. ``resident_bytes``: (seconds since the beginning, the server's memory) each ``SAMPLE_S``."""

    asked: Counter[str] = field(default_factory=Counter)
    """By level, as requests have it."""
    broken_off: int = 0
    tokens: int = 0
    errors: list[str] = field(default_factory=list)
    resident_bytes: list[tuple[float, int]] = field(default_factory=list)

    @property
    def num_requests(self) -> int:
        return sum(self.asked.values())

    def growth(self, seconds: float) -> float | None:
        """By how much memory grew from the first half to the second, once warm: medians; None of too few samples."""
        warm = [(at, taken) for at, taken in self.resident_bytes if at >= WARM_SHARE * seconds]
        middle = (1 + WARM_SHARE) / 2 * seconds
        early, late = ([taken for at, taken in warm if (at >= middle) == is_late] for is_late in (False, True))
        return median(late) / median(early) - 1 if early and late else None


@dataclass(frozen=True)
class Request:
    prompt: list[int]
    output_tokens: int
    level: object
    stop_after: int | None


class Client:
    """Draws requests, one after the other."""

    def __init__(self, asking: Asking, prefixes: Sequence[list[int]], prompts: Prompts, number: int) -> None:
        self.asking, self.prefixes, self.prompts = asking, prefixes, prompts
        self.random = random.Random(f"{asking.seed}/{number}")

    def next(self) -> Request:
        asking, drawn = self.asking, self.random
        # As many short ones as long ones, by powers of two.
        length = round(math.exp(drawn.uniform(math.log(asking.shortest), math.log(asking.longest))))
        prefix: list[int] = []
        if drawn.random() < asking.prefix_share:
            prefix = drawn.choice(self.prefixes)[: drawn.randint(0, max(0, length - 1))]
        output = drawn.randint(1, asking.most_output_tokens)
        stop_after = drawn.randint(1, 2) if drawn.random() < asking.abort_share else None
        prompt = prefix + self.prompts.take(length - len(prefix))
        return Request(prompt, output, drawn.choice(asking.levels), stop_after)


def soak(
    server: Endpoint,
    asking: Asking,
    prompts: Prompts,
    resident_bytes: Callable[[], int] | None = None,
    on_second: Callable[[Outcome], None] = lambda outcome: None,
) -> Outcome:
    """Let all clients send until the time is up, and wait for the last answers."""
    outcome, lock = Outcome(), threading.Lock()
    prefixes = [prompts.take(asking.longest) for _ in range(asking.shared_prefixes)]
    began = time.monotonic()

    def run(client: Client) -> None:
        while time.monotonic() - began < asking.seconds:
            with lock:
                request = client.next()
            error, tokens = _send(server, request)
            with lock:
                outcome.asked[str(request.level)] += 1
                outcome.broken_off += request.stop_after is not None
                outcome.tokens += tokens
                outcome.errors += [f"{len(request.prompt)} tokens at level {request.level}: {error}"] * (
                    error is not None
                )

    clients = [Client(asking, prefixes, prompts, i) for i in range(asking.clients)]
    threads = [threading.Thread(target=run, args=(client,), daemon=True) for client in clients]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        if resident_bytes is not None:
            outcome.resident_bytes.append((time.monotonic() - began, resident_bytes()))
        on_second(outcome)
        time.sleep(SAMPLE_S)
    return outcome


def _send(server: Endpoint, request: Request) -> tuple[str | None, int]:
    """(what went wrong, tokens of the prompt and of its answer)."""
    more: dict[str, Any] = {} if request.level is None else {"vllm_xargs": {FIELD: request.level}}
    try:
        answer = server.ask(request.prompt, request.output_tokens, request.stop_after, **more)
    except RequestError as error:
        return str(error), 0
    return None, len(request.prompt) + answer.tokens


def lines(asking: Asking, outcome: Outcome) -> list[str]:
    """What came of it, for people."""
    by_level = ", ".join(f"{level}: {count}" for level, count in sorted(outcome.asked.items()))
    said = [
        f"{outcome.num_requests} requests of {asking.clients} clients in {asking.seconds:g} s, by level {by_level}; "
        f"{outcome.broken_off} broken off; {outcome.tokens} tokens; {len(outcome.errors)} errors"
    ]
    if (growth := outcome.growth(asking.seconds)) is not None:
        said.append(f"the server's memory grew by {growth:.2%}, to {outcome.resident_bytes[-1][1] / 1e9:.2f} GB")
    return said


def add_figures(report: Report, asking: Asking, outcome: Outcome) -> list[str]:
    """As figures of a results file; what is wrong, where something is."""
    about = f"soak, {asking.clients} clients, {asking.shortest:,} to {asking.longest:,} tokens, {asking.seconds:g} s"
    report.add_case({"part": "soak", "requests": outcome.num_requests, "errors": outcome.errors[:MOST_SHOWN]})
    report.add_figure(f"{about}: requests", outcome.num_requests, "requests", "higher")
    report.add_figure(f"{about}: errors", len(outcome.errors), "requests", "lower")
    problems = list(outcome.errors[:MOST_SHOWN])
    if not outcome.num_requests:
        problems.append("no request was sent")
    if (growth := outcome.growth(asking.seconds)) is not None:
        report.add_figure(f"{about}: growth of the server's memory", growth, "share", "lower")
        if growth > MOST_GROWTH:
            problems.append(f"the server's memory grew by {growth:.2%}, expected at most {MOST_GROWTH:.0%}")
    return problems
