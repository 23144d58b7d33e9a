# SPDX-License-Identifier: Apache-2.0
"""Adds the counts of the engines' workers to the API server's /metrics.

A GET /metrics first polls the engines, and waits at most ``WAIT_S`` for them: an idle engine answers within a few ms,
and an engine in the middle of a step answers later, for the next page. vLLM then writes its page, with our metrics
among its own, because they are ordinary metrics of ``prometheus_client``.

Several API server processes may share a port, and each polls when it is read. An engine's answer has what its workers
counted since their previous answer, to whichever process. vLLM's page sums the counters of all processes, so every
process shows the same totals, and no counter falls.

``GET /metrics?sparse_prefill=fresh`` waits for counts polled after its arrival, for tools that compare two scrapes.
"""

import asyncio
import functools
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import prometheus_client

from vllm_sparse_backend.config.metrics import FRESH_QUERY, METRICS, PREFIX, WORKER_METHOD
from vllm_sparse_backend.identity import logger

WAIT_S = 0.02
"""Maximum wait of a scrape for the engines that it polls."""

INTERVAL_S = 1.0
"""Minimum interval at which /metrics polls the engines."""

TIMEOUT_S = 4.0
"""Seconds without an answer after which /metrics shows an engine as down."""


Call = Callable[[], Awaitable[Any]]
"""Returns the new samples of all workers of an engine."""


def engine_calls(engine_client: Any) -> dict[str, Call]:
    """Return the call of each engine, by its number."""
    core = engine_client.engine_core
    numbers = [str(number) for number in getattr(core, "engine_ranks_managed", [0])]
    if len(numbers) == 1:
        return {numbers[0]: functools.partial(engine_client.collective_rpc, WORKER_METHOD)}
    # The client's ``collective_rpc`` calls all engines but returns only the first engine's answer.
    call = functools.partial(core._call_utility_async, "collective_rpc", WORKER_METHOD, None, (), None)
    return {number: functools.partial(call, engine=engine) for number, engine in zip(numbers, core.core_engines)}


@functools.cache
def exported_metrics() -> dict[str, Any]:
    """Return this process's metrics by name. The first call adds them to the registry of vLLM's page."""
    gauge = functools.partial(prometheus_client.Gauge, multiprocess_mode="mostrecent")
    kinds: dict[str, Any] = {"counter": prometheus_client.Counter, "gauge": gauge}
    return {name: kinds[metric.type](PREFIX + name, metric.help, metric.all_labels) for name, metric in METRICS.items()}


def engine_amounts(workers: Sequence[Mapping[str, Any]]) -> Counter[tuple[str, tuple[str, ...]]]:
    """Sum the workers' samples by metric and labels."""
    amounts: Counter[tuple[str, tuple[str, ...]]] = Counter()
    first_ranks: dict[str, int] = {}
    for worker in sorted(workers, key=lambda worker: worker["rank"]):
        for name, labels, value in worker["samples"]:
            # Every pipeline stage with a sparse layer sees all rows; the first such stage sees them before the others.
            if not METRICS[name].seen_by_all or first_ranks.setdefault(name, worker["rank"]) == worker["rank"]:
                amounts[name, tuple(labels)] += value
    return amounts


class EnginePoll:
    """Polls one engine in the background, at most once at a time, and adds its counts to this process's metrics."""

    def __init__(self, call: Call, model_name: str, engine: str) -> None:
        self.began_at = -math.inf
        """When the last poll began, by ``time.monotonic``."""
        self.task: asyncio.Task[None] | None = None
        self._call = call
        self._model_name, self._engine = model_name, engine
        self._failure: str | None = None
        self._is_down = False

    @property
    def is_running(self) -> bool:
        return self.task is not None and not self.task.done()

    def begin(self, interval_s: float) -> None:
        """Begin a poll, unless one is under way or the last began less than ``interval_s`` ago."""
        if not self.is_running and time.monotonic() - self.began_at >= interval_s:
            self.began_at = time.monotonic()
            self.task = asyncio.create_task(self._poll())

    async def poll_again(self, interval_s: float) -> None:
        """Wait for the poll under way, and then for two that begin afterwards.

        During the first, the device may still run the last step of earlier requests.
        """
        if self.is_running:
            await self._finish()
        await asyncio.sleep(self.began_at + interval_s - time.monotonic())
        for _ in range(2):
            self.begin(0)  # unless another reader began it
            await self._finish()
            await asyncio.sleep(WAIT_S)

    async def _finish(self) -> None:
        assert self.task is not None
        await asyncio.wait([self.task], timeout=TIMEOUT_S / 2)

    async def _poll(self) -> None:
        """Call the workers, and add their counts to this process's metrics."""
        try:
            workers = await self._call()
            exported = exported_metrics()
            for (name, labels), amount in engine_amounts(workers).items():
                sample = exported[name].labels(self._model_name, self._engine, *labels)
                if METRICS[name].type == "counter":
                    sample.inc(amount)
                else:
                    sample.set(amount)
            self._failure = None
        except Exception as error:  # other engines and vLLM's own metrics must still be shown
            self._failure = f"{type(error).__name__}: {error}"

    def show_state(self) -> None:
        """Export whether the engine answers, and log it once if it does not."""
        is_silent = self.is_running and time.monotonic() - self.began_at >= TIMEOUT_S
        problem = f"no answer after {TIMEOUT_S:.0f} s" if is_silent else self._failure
        if problem is not None and not self._is_down:
            logger.warning("sparse-prefill: no new metrics from engine %s: %s", self._engine, problem)
        self._is_down = problem is not None
        exported_metrics()["up"].labels(self._model_name, self._engine).set(float(not self._is_down))


class EnginePolls:
    """The polls of a server's engines."""

    def __init__(self, engine_client: Any, model_name: str, interval_s: float = INTERVAL_S) -> None:
        self._client = engine_client
        self._model_name, self._interval_s = model_name, interval_s
        self._polls: dict[str, EnginePoll] = {}

    async def refresh(self, is_fresh: bool = False) -> None:
        """Poll the engines, and wait at most ``WAIT_S`` for them; if ``is_fresh``, for counts polled from now on."""
        for engine, call in engine_calls(self._client).items():
            if engine not in self._polls:
                self._polls[engine] = EnginePoll(call, self._model_name, engine)
        polls = self._polls.values()
        if is_fresh:
            await asyncio.gather(*(poll.poll_again(self._interval_s) for poll in polls))
        else:
            for poll in polls:
                poll.begin(self._interval_s)
            running = [poll.task for poll in polls if poll.task is not None and poll.is_running]
            wait_s = max(poll.began_at for poll in polls) + WAIT_S - time.monotonic()
            if running and wait_s > 0:
                await asyncio.wait(running, timeout=wait_s)
        for poll in polls:
            poll.show_state()


async def poll_for_page(polls: EnginePolls, scope: Mapping[str, Any]) -> None:
    """Poll the engines before a request for /metrics is answered."""
    try:
        is_fresh = FRESH_QUERY.encode() in scope.get("query_string", b"").split(b"&")
        await polls.refresh(is_fresh)
    except Exception:  # vLLM's own metrics must be served even if ours fail
        logger.exception("sparse-prefill: this answer to /metrics has no new counts")
