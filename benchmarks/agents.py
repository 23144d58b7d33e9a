# SPDX-License-Identifier: Apache-2.0
"""Agents: parallel sessions whose contexts grow turn by turn after a cached prefix, for several settings in turn.

    python -m benchmarks.agents TEXT.txt stock=http://localhost:8000 ours=http://localhost:8001 --to 40000,80000

A setting is NAME=URL or NAME=URL@LEVEL; the first is
the baseline. A session sends its next turn when the answer to the last one is complete: all of the text so far, and
600 to 6,000 new tokens. These stand for the last answer as well, so all settings get the same tokens. Each session's
first request is not counted. Settings run one after the other, in reverse order in every second round, and each round
has new texts. Turns that a setting does not complete before its share of ``--budget`` ends count for no setting.

The sum, p50 and p99 of TTFT are over turns. "Whole" is the sum over sessions of the time from a turn's request to its
last token. Errors are from a bootstrap over sessions.

If two servers do not fit on the card together, start one after the other, and compare the second with the first's run:

    python -m benchmarks.agents TEXT.txt stock=http://localhost:8000 --json stock.json
    python -m benchmarks.agents TEXT.txt ours=http://localhost:8000 --baseline stock.json
"""

import hashlib
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import TypeAdapter

from benchmarks.options import numbers, run_alone
from benchmarks.traffic import STATISTICS, CacheReads, Traffic, compare, show_rows
from vllm_sparse_backend.evaluation.client import Endpoint, Prompts, TimedAnswer
from vllm_sparse_backend.evaluation.report import BenchError


@dataclass(frozen=True)
class Session:
    """A session's text, and the number of its tokens that each request sends. The first request is the warm-up."""

    token_ids: list[int]
    ends: list[int]

    @staticmethod
    def draw(texts: Prompts, rng: random.Random, start: int, growth: tuple[int, int], to: int) -> "Session":
        ends = [start]
        while (end := ends[-1] + rng.randint(*growth)) <= to:
            ends.append(end)
        return Session(texts.take(ends[-1]), ends)


Answers = dict[str, list[list[TimedAnswer]]]
"""Of each setting, by session and turn."""


@dataclass(frozen=True)
class Times:
    """What a file of ``--json`` has in addition to the rows."""

    requests: str
    """Digest of all requests."""
    answers: Answers


def run_sessions(
    endpoint: Endpoint, sessions: Sequence[Session], tokens: int, deadline: float
) -> list[list[TimedAnswer]]:
    """Run all sessions in parallel, and return the answers to their turns. No turn starts after the deadline."""

    def run(session: Session) -> list[TimedAnswer]:
        answers = []
        for end in session.ends[1:]:
            if time.monotonic() >= deadline:
                break
            answers.append(endpoint.ask(session.token_ids[:end], tokens))
        return answers

    before = CacheReads.of(endpoint)
    with ThreadPoolExecutor(len(sessions)) as pool:
        list(pool.map(lambda session: endpoint.ask(session.token_ids[: session.ends[0]], tokens), sessions))
        answers = list(pool.map(run, sessions))
    before.require(endpoint, [
        (end, earlier)
        for session, done in zip(sessions, answers)
        for earlier, end in pairwise([0, *session.ends[: len(done) + 1]])
    ])  # fmt: skip
    return answers


def rows(
    answers: Mapping[str, Sequence[Sequence[TimedAnswer]]], sessions: Sequence[Session], limits: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """Yield the rows of the table: figures of the turns up to each limit that all settings completed."""
    completed = [min(map(len, of_session)) for of_session in zip(*answers.values())]
    for limit in limits:
        planned = [sum(end <= limit for end in session.ends[1:]) for session in sessions]
        counted = list(map(min, planned, completed))
        if not sum(counted):
            continue
        about = {"contexts to": limit, "turns": f"{sum(counted)} of {sum(planned)}"}
        turns = {name: [done[:n] for done, n in zip(of_name, counted)] for name, of_name in answers.items()}
        for figure, until, statistics in (("TTFT", "first_token_s", STATISTICS), ("whole", "last_token_s", ("sum",))):
            seconds = {name: [[getattr(turn, until) for turn in done] for done in turns[name]] for name in turns}
            for statistic in statistics:
                yield compare(about | {"figure": figure}, seconds, statistic)


@dataclass(frozen=True, kw_only=True)
class Agents(Traffic):
    """Measure TTFT and whole time of agents' sessions."""

    to: Annotated[str, typer.Option(help="Largest contexts. The table has the turns up to each.")] = "40000,80000"
    start: Annotated[int, typer.Option(help="Tokens of a session's first request, which is not counted.")] = 10_000
    growth: Annotated[str, typer.Option(help="Fewest and most new tokens of a turn.")] = "600,6000"
    sessions: Annotated[int, typer.Option(help="Parallel sessions.")] = 8
    tokens: Annotated[int, typer.Option(help="Output tokens of a turn.")] = 150
    rounds: Annotated[int, typer.Option(help="Times that each setting runs, each with new texts.")] = 1
    budget: Annotated[float, typer.Option(help="Seconds for all rounds. No turn starts later.")] = 600.0
    baseline: Annotated[
        Path | None, typer.Option(help="--json of a run of the same requests. Its first setting is the baseline.")
    ] = None

    def run(self) -> None:
        endpoints, texts = self.connect()
        limits = numbers(self.to)
        fewest, most = numbers(self.growth)
        rng, began = random.Random(self.seed), time.monotonic()
        rounds = [
            [Session.draw(texts, rng, self.start, (fewest, most), max(limits)) for _ in range(self.sessions)]
            for _ in range(self.rounds)
        ]
        sessions = [session for drawn in rounds for session in drawn]
        requests = hashlib.sha256(repr((self.tokens, sessions)).encode()).hexdigest()
        earlier = self.earlier(requests)
        answers: Answers = {endpoint.name: [] for endpoint in endpoints}
        runs_left = self.rounds * len(endpoints)
        for i, drawn in enumerate(rounds):
            for endpoint in endpoints[::-1] if i % 2 else endpoints:
                now = time.monotonic()
                share_s = (began + self.budget - now) / runs_left
                answers[endpoint.name] += run_sessions(endpoint, drawn, self.tokens, now + share_s)
                runs_left -= 1
        times = Times(requests, earlier | answers)
        show_rows(rows(times.answers, sessions, limits), self.out, **asdict(times))

    def earlier(self, requests: str) -> Answers:
        """Return the answers of ``--baseline``. Raises BenchError if they are not to these requests."""
        if self.baseline is None:
            return {}
        try:
            times = TypeAdapter(Times).validate_json(self.baseline.read_bytes())
        except (OSError, ValueError) as error:
            raise BenchError(f"--baseline: given {self.baseline}, expected this program's --json: {error}") from None
        if times.requests != requests:
            raise BenchError(f"--baseline: {self.baseline} has other requests; give both runs the same options")
        if same := times.answers.keys() & {setting.partition("=")[0] for setting in self.settings}:
            raise BenchError(f"--baseline: {self.baseline} has {', '.join(sorted(same))} too; rename the settings")
        return times.answers


if __name__ == "__main__":
    run_alone(Agents)
