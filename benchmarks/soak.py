# SPDX-License-Identifier: Apache-2.0
"""A soak test: many clients send requests of all lengths and levels, with shared prefixes and aborts, for a long time.

    python -m benchmarks.soak MODEL [--seconds 600] [--settings JSON]      (or --url of a running server)

Nothing is timed. The test checks that every request is answered with finite log-probabilities; that the memory of the
server does not grow; that its counters show no event that must not happen; and that an audit after the load finds the
counts that its requests must give (``benchmarks.counters``).
"""

import math
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from benchmarks.counters import Audit, Reading, Served, audit, read_counters, wait_until_idle
from vllm_sparse_backend.cli.commands import run_alone
from vllm_sparse_backend.cli.common import MaybeModel, ServerArgs, exit_on_sigterm, failures, levels_of, split
from vllm_sparse_backend.config.request_levels import FIELD
from vllm_sparse_backend.evaluation.client import Endpoint, Prompts, RequestError
from vllm_sparse_backend.evaluation.report import BenchError
from vllm_sparse_backend.evaluation.vllm_server import Server, Settings, device_name, sparse_args, split_args

SAMPLE_S = 1.0
"""Seconds between two readings of the server's memory."""

MOST_GROWTH = 0.03
LEAST_S_TO_GROW = 300.0
"""Shorter tests report growth but do not fail for it, because memory grows in a server's first minutes."""

WARM_SHARE = 0.25
"""Share of the time after which memory must not grow: by then, caches, buffers and threads exist."""

MOST_SHOWN = 10

SERVER_ENV = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "8"}
"""Environment of servers that this test starts: on a CPU, torch caches a compiled product for each of the last 1,024
shapes, which looks like a memory leak for minutes."""

LONGEST = 131_072
ROOM_TOKENS = 32
"""Tokens of a server beyond the longest prompt, for the answer."""

MOST_OUTPUT_TOKENS = 16
SHARED_PREFIXES = 8
PREFIX_SHARE = 0.5
"""Share of requests that begin with a part of a shared prefix."""

NOTHING_SPARSE = "nothing ran sparse, expected sparse rows; set --longest above min_tokens, or lower it in --settings"


@dataclass(frozen=True)
class Asking:
    """Requests of the clients."""

    seconds: float
    clients: int
    longest: int
    levels: tuple[object, ...]
    """Levels of the requests, equally often; None for no level."""
    abort_share: float = 0.1
    """Share of requests that the client aborts after one or two tokens."""
    least_requests: int = 0
    """The load goes on until this many requests have ended, even if the time is over."""


@dataclass
class Outcome:
    """Results of the load."""

    requests_by_level: Counter[str] = field(default_factory=Counter)
    num_aborted: int = 0
    errors: list[str] = field(default_factory=list)
    resident_bytes: list[tuple[float, int]] = field(default_factory=list)
    """Memory of the server's processes: (seconds since the beginning, bytes), every ``SAMPLE_S``."""

    def growth(self, seconds: float) -> float | None:
        """Return the growth of memory after warm-up: median of the second half over that of the first half, minus 1.

        None if there are too few samples.
        """
        warm = [size for at, size in self.resident_bytes if at >= WARM_SHARE * seconds]
        half = len(warm) // 2
        return median(warm[half:]) / median(warm[:half]) - 1 if half else None


@dataclass(frozen=True)
class Request:
    prompt: list[int]
    output_tokens: int
    level: object
    stop_after: int | None


class Client:
    """Draws random requests, equal for equal numbers."""

    def __init__(self, asking: Asking, prefixes: Sequence[list[int]], prompts: Prompts, number: int) -> None:
        self.asking, self.prefixes, self.prompts = asking, prefixes, prompts
        self.random = random.Random(number)

    def next(self) -> Request:
        asking, drawn = self.asking, self.random
        # Short and long lengths are equally frequent, by powers of two.
        length = round(math.exp(drawn.uniform(0, math.log(asking.longest))))
        prefix: list[int] = []
        if drawn.random() < PREFIX_SHARE:
            prefix = drawn.choice(self.prefixes)[: drawn.randint(0, length - 1)]
        output = drawn.randint(1, MOST_OUTPUT_TOKENS)
        stop_after = drawn.randint(1, 2) if drawn.random() < asking.abort_share else None
        prompt = prefix + self.prompts.take(length - len(prefix))
        return Request(prompt, output, drawn.choice(asking.levels), stop_after)


def soak(server: Endpoint, asking: Asking, prompts: Prompts, resident_bytes: Callable[[], int] | None) -> Outcome:
    """Let all clients send requests until the time is over, and wait for the last answers."""
    outcome, lock = Outcome(), threading.Lock()
    prefixes = [prompts.take(asking.longest) for _ in range(SHARED_PREFIXES)]
    began = time.monotonic()

    def run(client: Client) -> None:
        while True:
            with lock:
                num_requests = outcome.requests_by_level.total()
                if time.monotonic() - began >= asking.seconds and num_requests >= asking.least_requests:
                    return
                request = client.next()
            error = _send(server, request)
            with lock:
                outcome.requests_by_level[str(request.level)] += 1
                outcome.num_aborted += request.stop_after is not None
                if error is not None:
                    outcome.errors.append(f"{len(request.prompt)} tokens at level {request.level}: {error}")

    clients = [Client(asking, prefixes, prompts, i) for i in range(asking.clients)]
    threads = [threading.Thread(target=run, args=(client,), daemon=True) for client in clients]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        if resident_bytes is not None:
            outcome.resident_bytes.append((time.monotonic() - began, resident_bytes()))
        time.sleep(SAMPLE_S)
    return outcome


def _send(server: Endpoint, request: Request) -> str | None:
    """Send a request, and return its error, if any."""
    more: dict[str, Any] = {} if request.level is None else {"vllm_xargs": {FIELD: request.level}}
    try:
        server.ask(request.prompt, request.output_tokens, request.stop_after, **more)
    except RequestError as error:
        return str(error)
    return None


@dataclass
class Checked:
    """Results of a soak test with the server's counters. ``problems`` has the reasons of a failure."""

    outcome: Outcome
    after: Reading
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
    before = read_counters(server)
    outcome = soak(server, asking, prompts, resident_bytes)
    done = Checked(outcome, before, problems=outcome.errors[:MOST_SHOWN])
    growth = outcome.growth(asking.seconds)
    if growth is not None and growth > MOST_GROWTH and asking.seconds >= LEAST_S_TO_GROW:
        done.problems.append(f"the server's memory grew by {growth:.2%}, expected at most {MOST_GROWTH:.0%}")
    try:
        wait_until_idle(server)
        done.after = read_counters(server)
        if not (done.after.counts - before.counts)["rows", "sparse", ""]:
            done.problems.append(NOTHING_SPARSE)
        if served is not None:
            done.audit = audit(server, served, prompts, asking.levels, asking.longest)
            done.problems += done.audit.differences[:MOST_SHOWN]
            done.after = read_counters(server)
    except (BenchError, RequestError) as error:  # the results so far are still reported
        done.problems.append(str(error))
    report = done.after.report
    faults = {
        "kernels compiled while serving": report.by("compilations", "when")["serving"],
        "tensors past the arena": report.by("arena_overflows").total(),
    }
    done.problems += [f"{what}: {count}, expected none" for what, count in faults.items() if count]
    return done


def served_by(server: Endpoint, settings: Mapping[str, Any], model: Path | None, chunk_tokens: int) -> Served:
    """Return a server's settings. ``model`` is the folder that it serves; None to ask the server.

    Raises BenchError if that is not a folder on this machine.
    """
    folder = model or Path(server.root or server.model)
    if not folder.is_dir():
        raise BenchError(
            f"{server.url} serves {folder}, expected a folder on this machine for the audit; or remove --settings"
        )
    engines = read_counters(server).report.attention
    return Served.of(settings, folder, device_name(), engines, chunk_tokens)


def lines(asking: Asking, done: Checked) -> list[str]:
    """Format the results for people."""
    outcome, report = done.outcome, done.after.report
    by_level = ", ".join(f"{level}: {count}" for level, count in sorted(outcome.requests_by_level.items()))
    rows = ", ".join(f"{' '.join(kind).strip()} {count:,}" for kind, count in sorted(report.rows.items()))
    said = [
        f"{outcome.requests_by_level.total()} requests of {asking.clients} clients in {asking.seconds:g} s, by level "
        f"{by_level}; {outcome.num_aborted} aborted; {len(outcome.errors)} errors",
        f"rows: {rows}; density of the sparse rows {report.pairs.density or math.nan:.3f}",
    ]
    growth = outcome.growth(asking.seconds)
    if growth is not None:
        said.append(f"the server's memory grew by {growth:.2%}, to {outcome.resident_bytes[-1][1] / 1e9:.2f} GB")
    if done.audit is not None:
        said.append(
            f"audit: {done.audit.num_requests} requests one at a time, {done.audit.cached_tokens:,} of their tokens "
            f"cached; {len(done.audit.differences)} counters differ from what was sent"
        )
    return said


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

    Exit code 1 if a request fails or has an invalid log-probability, memory of the server grows by more than 3 %, a
    kernel is compiled, a tensor does not fit into the arena, nothing ran sparse, or counters do not agree with the
    requests.
    """

    model: MaybeModel = None
    url: Annotated[str | None, typer.Option(help="A running server with this backend.")] = None
    settings: Annotated[
        str | None,
        typer.Option(help="The sparse_prefill object as JSON, or a profile; with --url for the audit of its counters."),
    ] = None
    seconds: Annotated[float, typer.Option(help="Duration of the load, in seconds.", min=1.0)] = 600.0
    clients: Annotated[int, typer.Option(help="Concurrent requests.", min=1)] = 16
    longest: Annotated[
        int | None,
        typer.Option(help="Tokens of the longest prompt. Default: 131,072, or what the model allows.", min=2),
    ] = None
    levels: Annotated[str, typer.Option(help="Levels of the requests, comma-separated; '' for none.")] = "0,1"
    chunk: Annotated[int, typer.Option(help="The server's --max-num-batched-tokens.", min=128)] = 8192
    server_args: ServerArgs = ""

    def run(self) -> None:
        """Run the test, and show the results."""
        exit_on_sigterm()
        with failures():
            if (self.model is None) == (self.url is None):
                raise BenchError("soak: expected either a MODEL to serve or --url")
            settings = Settings.parse(self.settings or "{}", model=self.model)
            with ExitStack() as stack:
                url, resident_bytes = self.url or "", None
                if self.model is not None:
                    args = ["--max-num-batched-tokens", str(self.chunk), *split_args(self.server_args)]
                    if self.longest is not None:
                        args = ["--max-model-len", str(self.longest + ROOM_TOKENS), *args]
                    server = stack.enter_context(
                        Server(self.model, (*args, *sparse_args(settings.values)), env=SERVER_ENV)
                    )
                    url, resident_bytes = server.url, partial(resident_bytes_of, server.pid)
                endpoint = Endpoint.connect("server", url)
                longest = self.longest or min(LONGEST, (endpoint.max_model_len or LONGEST) - ROOM_TOKENS)
                endpoint.require_room(longest + MOST_OUTPUT_TOKENS)
                asking = Asking(self.seconds, self.clients, longest, (None, *levels_of(split(self.levels))))
                served = None
                if self.model or self.settings:
                    served = served_by(endpoint, settings.values, self.model, self.chunk)
                done = soak_and_check(endpoint, asking, Prompts.of(endpoint), resident_bytes, served)
            print("\n".join([*lines(asking, done), *done.problems]))
            raise typer.Exit(bool(done.problems))


if __name__ == "__main__":
    run_alone(Soak)
