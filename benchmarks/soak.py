# SPDX-License-Identifier: Apache-2.0
"""A soak test: many clients send requests of all lengths and levels, with shared prefixes and aborts, for a long time.

    python -m benchmarks.soak MODEL [--seconds 600] [--settings JSON]      (or --url of a running server)

Nothing is timed. The test checks that every request is answered with finite log-probabilities; that the memory of the
server and of its devices does not grow; that its counters show no event that must not happen; and that they agree with
the requests (``benchmarks.counters``), within bounds under load and exactly in an audit after it.
"""

import itertools
import math
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from benchmarks.counters import Audit, Bound, Look, Served, audit, wait_until_idle
from benchmarks.figures import Report
from benchmarks.options import Json, Results
from vllm_sparse_backend.cli.commands import run_alone
from vllm_sparse_backend.cli.common import (
    ServedModel,
    ServerArgs,
    Text,
    exit_on_sigterm,
    failures,
    levels_of,
    split,
)
from vllm_sparse_backend.config.fallback import Fallback
from vllm_sparse_backend.config.profile import EXACT
from vllm_sparse_backend.config.request_levels import FIELD
from vllm_sparse_backend.evaluation.client import Endpoint, Prompts, RequestError
from vllm_sparse_backend.evaluation.metrics_scrape import parse_metrics
from vllm_sparse_backend.evaluation.prompt_texts import read_prompt_text
from vllm_sparse_backend.evaluation.report import BenchError
from vllm_sparse_backend.evaluation.vllm_server import Server, Settings, device_name, sparse_args, split_args

SAMPLE_S = 1.0
"""Seconds between two readings of the server's memory."""

SCRAPE_S = 5.0
"""Seconds between two readings of device memory on /metrics. Workers answer between two steps."""

MOST_GROWTH = 0.03
LEAST_S_TO_GROW = 300.0
"""Shorter tests report growth but do not fail for it, because memory grows in a server's first minutes."""

MOST_SHOWN = 10

SERVER_ENV = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "8"}
"""Environment of servers that this test starts: on a CPU, torch caches a compiled product for each of the last 1,024
shapes, which looks like a memory leak for minutes."""

LONGEST = 131_072
ROOM_TOKENS = 32
"""Tokens of a server beyond the longest prompt, for the answer."""

NOTHING_SPARSE = "nothing ran sparse, expected sparse rows; set --longest above min_tokens, or lower it in --settings"

WARM_SHARE = 0.25
"""Share of the time after which memory must not grow: by then, caches, buffers and threads exist."""


@dataclass(frozen=True)
class Asking:
    """Requests of the clients. Equal seeds give equal requests, apart from timing."""

    seconds: float
    clients: int
    shortest: int
    longest: int
    levels: tuple[object, ...] = (None, 0, 1)
    """Levels of the requests, equally often; None for no level."""
    shared_prefixes: int = 8
    prefix_share: float = 0.5
    """Share of requests that begin with a part of a shared prefix."""
    abort_share: float = 0.1
    """Share of requests that the client aborts after one or two tokens."""
    most_output_tokens: int = 16
    seed: int = 0
    most_requests: int | None = None
    """The load ends after this many requests, even if time is left; None for no limit."""
    least_requests: int = 0
    """The load goes on until this many requests have ended, even if the time is over."""


Samples = list[tuple[float, int]]
"""List of (seconds since the beginning, bytes)."""


@dataclass
class Outcome:
    """Results of the load."""

    requests_by_level: Counter[str] = field(default_factory=Counter)
    """Requests by level."""
    broken_off: int = 0
    tokens: int = 0
    """Tokens of prompts and answers."""
    output_asked: int = 0
    output_received: int = 0
    """Bounds of the tokens of answers. The number is between the bounds if requests are aborted."""
    exact_alone: int = 0
    """Exact requests of at least 64 tokens with unique beginnings, which no cache contains."""
    by_length: Counter[tuple[int, str]] = field(default_factory=Counter)
    """Number of prompts by length and level."""
    errors: list[str] = field(default_factory=list)
    resident_bytes: Samples = field(default_factory=list)
    """Memory of the server's processes, every ``SAMPLE_S``."""
    device_bytes: Samples = field(default_factory=list)
    """Device memory of the workers, every ``SCRAPE_S``; empty on CPUs."""

    @property
    def num_requests(self) -> int:
        return sum(self.requests_by_level.values())

    def add(self, request: "Request", error: str | None, received: int) -> None:
        self.requests_by_level[str(request.level)] += 1
        self.broken_off += request.stop_after is not None
        self.by_length[len(request.prompt), str(request.level)] += 1
        if error is not None:
            self.errors.append(f"{len(request.prompt)} tokens at level {request.level}: {error}")
            return
        self.tokens += len(request.prompt) + received
        self.output_asked += request.output_tokens
        self.output_received += received
        self.exact_alone += request.level in (0, EXACT) and not request.shared_tokens and len(request.prompt) >= 64


def growth(samples: Samples, seconds: float) -> float | None:
    """Return the relative growth of memory after warm-up: median of the second half over that of the first half.

    None if there are too few samples.
    """
    warm = [taken for at, taken in samples if at >= WARM_SHARE * seconds]
    half = len(warm) // 2
    return median(warm[half:]) / median(warm[:half]) - 1 if half else None


@dataclass(frozen=True)
class Request:
    prompt: list[int]
    output_tokens: int
    level: object
    stop_after: int | None
    shared_tokens: int = 0
    """Number of the prompt's first tokens that come from a shared prefix."""


class Client:
    """Draws random requests."""

    def __init__(self, asking: Asking, prefixes: Sequence[list[int]], prompts: Prompts, number: int) -> None:
        self.asking, self.prefixes, self.prompts = asking, prefixes, prompts
        self.random = random.Random(f"{asking.seed}/{number}")

    def next(self) -> Request:
        asking, drawn = self.asking, self.random
        # Short and long lengths are equally frequent, by powers of two.
        length = round(math.exp(drawn.uniform(math.log(asking.shortest), math.log(asking.longest))))
        prefix: list[int] = []
        if drawn.random() < asking.prefix_share:
            prefix = drawn.choice(self.prefixes)[: drawn.randint(0, max(0, length - 1))]
        output = drawn.randint(1, asking.most_output_tokens)
        stop_after = drawn.randint(1, 2) if drawn.random() < asking.abort_share else None
        prompt = prefix + self.prompts.take(length - len(prefix))
        return Request(prompt, output, drawn.choice(asking.levels), stop_after, len(prefix))


def soak(
    server: Endpoint,
    asking: Asking,
    prompts: Prompts,
    resident_bytes: Callable[[], int] | None = None,
) -> Outcome:
    """Let all clients send requests until the time is over, and wait for the last answers."""
    outcome, lock = Outcome(), threading.Lock()
    prefixes = [prompts.take(asking.longest) for _ in range(asking.shared_prefixes)]
    numbers = itertools.count() if asking.most_requests is None else iter(range(asking.most_requests))
    began = time.monotonic()

    def run(client: Client) -> None:
        while True:
            with lock:
                is_over = time.monotonic() - began >= asking.seconds and outcome.num_requests >= asking.least_requests
                if is_over or next(numbers, None) is None:
                    return
                request = client.next()
            error, received = _send(server, request)
            with lock:
                outcome.add(request, error, received)

    clients = [Client(asking, prefixes, prompts, i) for i in range(asking.clients)]
    threads = [threading.Thread(target=run, args=(client,), daemon=True) for client in clients]
    for thread in threads:
        thread.start()
    over = threading.Event()
    watches = [(outcome.device_bytes, SCRAPE_S, lambda: parse_metrics(server.metrics()).by("device_bytes").total())]
    if resident_bytes is not None:
        watches.append((outcome.resident_bytes, SAMPLE_S, resident_bytes))
    # Each has its own thread, so that a slow answer of /metrics does not delay the other.
    with ThreadPoolExecutor(len(watches)) as pool:
        looks = [pool.submit(_watch, samples, look, every_s, began, over) for samples, every_s, look in watches]
        try:
            for thread in threads:
                thread.join()
        finally:
            over.set()
    for looked in looks:
        looked.result()
    return outcome


def _watch(samples: Samples, look: Callable[[], int], every_s: float, began: float, over: threading.Event) -> None:
    """Take samples until ``over`` is set. Zeros are not recorded."""
    while True:
        now = time.monotonic() - began
        if held := look():
            samples.append((now, held))
        if over.wait(every_s):
            return


def _send(server: Endpoint, request: Request) -> tuple[str | None, int]:
    """Send a request, and return (error or None, tokens of the answer)."""
    more: dict[str, Any] = {} if request.level is None else {"vllm_xargs": {FIELD: request.level}}
    try:
        answer = server.ask(request.prompt, request.output_tokens, request.stop_after, **more)
    except RequestError as error:
        return str(error), 0
    return None, answer.tokens


@dataclass
class Checked:
    """Results of a soak test with the server's counters. ``problems`` has the reasons of a failure."""

    outcome: Outcome
    before: Look
    after: Look
    bounds: list[Bound]
    audit: Audit | None = None
    """None if the server's settings are unknown, or if a request failed."""
    problems: list[str] = field(default_factory=list)


def soak_and_check(
    server: Endpoint,
    asking: Asking,
    prompts: Prompts,
    resident_bytes: Callable[[], int] | None = None,
    served: Served | None = None,
) -> Checked:
    """Run a soak test and check it. Raises BenchError before sending if the server has none of our counters."""
    before = Look.at(server)
    outcome = soak(server, asking, prompts, resident_bytes)
    done = Checked(outcome, before, before, [], problems=outcome.errors[:MOST_SHOWN])
    if not outcome.num_requests:
        done.problems.append("no request was sent")
    for what, samples in (("server's", outcome.resident_bytes), ("devices'", outcome.device_bytes)):
        grown = growth(samples, asking.seconds)
        if grown is not None and grown > MOST_GROWTH and asking.seconds >= LEAST_S_TO_GROW:
            done.problems.append(f"the {what} memory grew by {grown:.2%}, expected at most {MOST_GROWTH:.0%}")
    try:
        _look_at_counters(server, asking, prompts, served, done)
    except (BenchError, RequestError) as error:  # the results so far are still reported
        done.problems.append(str(error))
    done.problems += done.after.faults()
    return done


def _look_at_counters(server: Endpoint, asking: Asking, prompts: Prompts, served: Served | None, done: Checked) -> None:
    wait_until_idle(server)
    done.after = Look.at(server)
    if not done.after.counts.since(done.before.counts).rows_of("sparse"):
        done.problems.append(NOTHING_SPARSE)
    done.bounds = bounds(asking, done.outcome, done.before, done.after, served)
    done.problems += [str(bound) for bound in done.bounds if not bound.holds]
    if served is not None:
        done.audit = audit(server, served, prompts, asking.levels, asking.longest)
        done.problems += done.audit.differences[:MOST_SHOWN]
        done.after = Look.at(server)


def served_by(server: Endpoint, settings: Mapping[str, Any], model: Path | None, chunk_tokens: int) -> Served:
    """Return a server's settings. ``model`` is the folder that it serves; None to ask the server.

    Raises BenchError if that is not a folder on this machine.
    """
    folder = model or Path(server.root or server.model)
    if not folder.is_dir():
        raise BenchError(
            f"{server.url} serves {folder}, expected a folder on this machine for the audit; or remove --settings"
        )
    engines = Look.at(server).report.attention
    return Served.of(settings, folder, device_name(), engines, chunk_tokens)


def bounds(asking: Asking, outcome: Outcome, before: Look, after: Look, served: Served | None = None) -> list[Bound]:
    """Return the bounds of the counters for any chunks, from answered requests only.

    Each received token comes from a separate row. All tokens except a request's first come from decodes, unless the
    request was preempted and recomputed. For aborted requests the server may have computed more tokens. A prompt's last
    token, if alone in a chunk, counts as a decode.
    """
    if outcome.errors:
        return []
    counted, preempted = after.counts.since(before.counts), after.preemptions - before.preemptions
    alone = outcome.output_received - outcome.num_requests
    limits = [
        Bound("rows", sum(counted.rows.values()), outcome.output_received),
        Bound("decode rows", counted.rows_of("decode"), alone - preempted, outcome.output_asked + preempted),
        Bound("rows that are dense as requested", counted.rows["dense", Fallback.REQUESTED], outcome.exact_alone),
    ]
    if served is not None:
        levels = {str(level): level for level in asking.levels}
        once = [(served.most_pairs(n, levels[level]), times) for (n, level), times in outcome.by_length.items()]
        longest = asking.longest + asking.most_output_tokens
        again = preempted * max(served.most_pairs(longest, level) for level in asking.levels)
        most = sum(pairs * times for pairs, times in once) + again
        limits.append(Bound("causal pairs of a layer", max(counted.causal_pairs.values(), default=0), 0, most))
    return limits


def lines(asking: Asking, done: Checked) -> list[str]:
    """Format the results for people."""
    outcome = done.outcome
    by_level = ", ".join(f"{level}: {count}" for level, count in sorted(outcome.requests_by_level.items()))
    said = [
        f"{outcome.num_requests} requests of {asking.clients} clients in {asking.seconds:g} s, by level {by_level}; "
        f"{outcome.broken_off} aborted; {outcome.tokens} tokens; {len(outcome.errors)} errors; "
        f"{done.after.preemptions - done.before.preemptions} preemptions"
    ]
    for what, samples in (("server's", outcome.resident_bytes), ("devices'", outcome.device_bytes)):
        if samples:
            apart = max((after - before for (before, _), (after, _) in pairwise(samples)), default=0.0)
            looks = f"{len(samples)} samples at most {apart:.0f} s apart"
            grown = growth(samples, asking.seconds)
            by = "is not known to have grown" if grown is None else f"grew by {grown:.2%}"
            said.append(f"the {what} memory {by}, to {samples[-1][1] / 1e9:.2f} GB; {looks}")
    if not outcome.device_bytes:
        said.append("no memory of devices: the server's workers report none")
    report = done.after.report
    rows = ", ".join(f"{' '.join(kind).strip()} {count:,}" for kind, count in sorted(report.rows.items()))
    said.append(f"rows: {rows}; density of the sparse rows {report.pairs.density or math.nan:.3f}")
    compiled, beyond = report.by("compilations", "when"), report.by("arena_overflows").total()
    said.append(
        f"compilations: {compiled['warmup']} at start-up, {compiled['serving']} while serving; past the arena: {beyond}"
    )
    said += [f"within bounds: {bound}" for bound in done.bounds if bound.holds]
    if done.audit is not None:
        counted = done.audit.counted
        said.append(
            f"audit: {done.audit.num_requests} requests one at a time, {done.audit.cached_tokens:,} of their tokens "
            f"cached; {sum(counted.rows.values()):,} rows and "
            f"{sum(counted.causal_pairs.values()):,} pairs counted; {len(done.audit.differences)} counters differ from "
            "what was sent"
        )
    return said


def add_figures(report: Report, asking: Asking, done: Checked, label: str = "") -> None:
    """Add figures of a results file. ``label`` describes the server."""
    outcome, counters = done.outcome, done.after.report
    what = f"soak, {label}, " if label else "soak, "
    about = f"{what}{asking.clients} clients, {asking.shortest:,} to {asking.longest:,} tokens, {asking.seconds:g} s"
    report.add_case({"part": "soak", "about": about, "said": lines(asking, done), "problems": done.problems})
    report.add_figure(f"{about}: requests", outcome.num_requests, "requests", "higher")
    report.add_figure(f"{about}: errors", len(outcome.errors), "requests", "lower", 0)
    for owner, samples in (("the server", outcome.resident_bytes), ("its devices", outcome.device_bytes)):
        if (grown := growth(samples, asking.seconds)) is not None:
            bar = MOST_GROWTH if asking.seconds >= LEAST_S_TO_GROW else None
            report.add_figure(f"{about}: growth of the memory of {owner}", grown, "share", "lower", bar)
    compiled = counters.by("compilations", "when")["serving"]
    report.add_figure(f"{about}: compilations while serving", compiled, "kernels", "lower", 0)
    overflows = counters.by("arena_overflows").total()
    report.add_figure(f"{about}: tensors past the arena", overflows, "tensors", "lower", 0)
    broken = sum(not bound.holds for bound in done.bounds)
    if done.bounds:
        report.add_figure(f"{about}: counters out of bounds", broken, "counters", "lower", 0)
    if done.audit is not None:
        off = len(done.audit.differences)
        report.add_figure(
            f"{about}: counters that differ from what was sent, in the audit", off, "counters", "lower", 0
        )


def resident_bytes_of(pid: int) -> int:
    """Return the memory of a process and its children. Needs psutil, which comes with vLLM."""
    import psutil

    parent = psutil.Process(pid)
    total = 0
    for process in (parent, *parent.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):  # processes may end in the meantime
            total += process.memory_info().rss
    return total


@dataclass(frozen=True, kw_only=True)
class Soak:
    """Run a soak test.

    Exit code 1 if a request fails or has an invalid log-probability, memory of the server or its devices grows by more
    than 3 %, a kernel is compiled, a tensor does not fit into the arena, nothing ran sparse, or counters do not agree
    with the requests.
    """

    model: ServedModel = None
    url: Annotated[str | None, typer.Option(help="A running server with this backend.")] = None
    settings: Annotated[
        str | None,
        typer.Option(help="The sparse_prefill object as JSON, or a profile; with --url for the audit of its counters."),
    ] = None
    seconds: Annotated[float, typer.Option(help="Duration of the load, in seconds.", min=1.0)] = 600.0
    clients: Annotated[int, typer.Option(help="Concurrent requests.", min=1)] = 16
    shortest: Annotated[int, typer.Option(help="Tokens of the shortest prompt.", min=1)] = 16
    longest: Annotated[
        int | None,
        typer.Option(help="Tokens of the longest prompt. Default: 131,072, or what the model allows.", min=2),
    ] = None
    levels: Annotated[str, typer.Option(help="Levels of the requests, comma-separated; '' for none.")] = "0,1"
    aborts: Annotated[float, typer.Option(help="Share of aborted requests.", min=0.0, max=1.0)] = 0.1
    chunk: Annotated[int, typer.Option(help="The server's --max-num-batched-tokens.", min=128)] = 8192
    text: Text = None
    more_args: ServerArgs = ""
    seed: Annotated[int, typer.Option(help="Seed of lengths, levels and prefixes.")] = 0
    json_path: Json = None
    results: Results = None

    def run(self) -> None:
        """Run the test, and show the results."""
        exit_on_sigterm()
        with failures():
            if (self.model is None) == (self.url is None):
                raise BenchError("soak: expected either a MODEL to serve or --url")
            levels = tuple(levels_of(split(self.levels)))
            report = Report("soak", device_name(), self.json_path, self.results)
            settings = Settings.parse(self.settings or "{}", model=self.model)
            text = read_prompt_text(self.text) if self.text else None
            with ExitStack() as stack:
                url, resident_bytes = self.url or "", None
                if self.model is not None:
                    args = ["--max-num-batched-tokens", str(self.chunk), *split_args(self.more_args)]
                    if self.longest is not None:
                        args = ["--max-model-len", str(self.longest + ROOM_TOKENS), *args]
                    server = stack.enter_context(
                        Server(self.model, (*args, *sparse_args(settings.values)), env=SERVER_ENV)
                    )
                    url, resident_bytes = server.url, partial(resident_bytes_of, server.pid)
                endpoint = Endpoint.connect("server", url)
                longest = self.longest or min(LONGEST, (endpoint.max_model_len or LONGEST) - ROOM_TOKENS)
                if self.shortest > longest:
                    raise BenchError(
                        f"--shortest: given {self.shortest}, expected at most {longest}, the longest prompt"
                    )
                asking = Asking(
                    self.seconds, self.clients, self.shortest, longest, (None, *levels), abort_share=self.aborts,
                    seed=self.seed,
                )  # fmt: skip
                endpoint.require_room(longest + asking.most_output_tokens)
                served = (
                    served_by(endpoint, settings.values, self.model, self.chunk)
                    if self.model or self.settings
                    else None
                )
                done = soak_and_check(endpoint, asking, Prompts.of(endpoint, text), resident_bytes, served)
            add_figures(report, asking, done, f"{Path(self.model or endpoint.model).name}, {settings}")
            print("\n".join([*lines(asking, done), *done.problems]))
            raise typer.Exit(bool(done.problems))


if __name__ == "__main__":
    run_alone(Soak)
