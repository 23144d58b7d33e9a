# SPDX-License-Identifier: Apache-2.0
"""The API server's /metrics: adds the counts of the engines' workers to vLLM's own text.

vLLM's text never waits for an engine. A scrape gets this process's last counts if they are younger than
``metrics_interval_s``. Otherwise the engines are polled in the background, and the scrape waits at most ``WAIT_S`` for
their answers before it gets the last counts. Counts are therefore late only for an engine in the middle of a step.
An engine that does not answer is shown with ``up`` 0 and its last counts.

``GET /metrics?sparse_prefill=fresh`` waits for counts polled after its arrival, for tools that compare two scrapes.
"""

import asyncio
import logging
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import suppress
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qsl

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from vllm_sparse_backend.config.metrics import FRESH_QUERY, METRICS, PREFIX, WORKER_METHOD
from vllm_sparse_backend.identity import LOGGER
from vllm_sparse_backend.serving.frontend.engine_counts import TIMEOUT_S, EngineReader, SiblingCounts
from vllm_sparse_backend.serving.frontend.engine_rpc import engine_calls, path_of, send_with_body
from vllm_sparse_backend.serving.registration import is_selected
from vllm_sparse_backend.serving.resolution import settings_of

logger = logging.getLogger(LOGGER)

WAIT_S = 0.02
"""Maximum wait of a scrape for the engines that it polls: an idle engine answers within a few ms."""

START_S = 2.0
"""Maximum wait for the first counts when a server starts, so that the first scrape has them."""


class MetricsPage:
    """The last counts of each engine as text, and their refresh."""

    def __init__(self) -> None:
        self._client: Any = None
        self._model_name, self._interval_s = "", 0.0
        self._siblings: SiblingCounts | None = None
        self._readers: dict[str, EngineReader] = {}
        self._down: frozenset[str] = frozenset()
        self._rendered: tuple[object, bytes] = (None, b"")

    def open(
        self, engine_client: Any, model_name: str, interval_s: float, siblings: SiblingCounts | None = None
    ) -> None:
        """Show the counts of a client's engines from now on."""
        self._client, self._model_name, self._interval_s = engine_client, model_name, interval_s
        self._siblings = siblings

    @property
    def is_open(self) -> bool:
        """Whether this server's engines have counts to show."""
        return self._client is not None

    async def start(self) -> None:
        """Poll the engines before the first scrape, and wait ``START_S`` at most for them."""
        try:
            if polls := self.refresh():
                await asyncio.wait(polls, timeout=START_S)
        except Exception:  # the server must start even if our counters fail
            logger.exception("sparse-prefill: no counters from the engines at start-up; /metrics asks again")

    def refresh(self) -> list[asyncio.Task[None]]:
        """Poll each engine whose counts are older than the interval."""
        calls = engine_calls(self._client, WORKER_METHOD)
        self._readers = {engine: self._readers.get(engine) or EngineReader() for engine in calls}
        polls = [
            reader.refresh(calls[engine], self._interval_s, self._publish) for engine, reader in self._readers.items()
        ]
        return [poll for poll in polls if poll is not None]

    async def text(self) -> bytes:
        """Return the engines' counts within ``WAIT_S``."""
        if polls := self.refresh():
            waited_from = max(reader.asked_at for reader in self._readers.values())
            if (left_s := waited_from + WAIT_S - time.monotonic()) > 0:
                await asyncio.wait(polls, timeout=left_s)
        return self._render()

    async def fresh_text(self) -> bytes:
        """Poll the engines and return the counts."""
        called_at = time.monotonic()
        deadline = called_at + self._interval_s + 2 * TIMEOUT_S
        while time.monotonic() < deadline:
            polls = self.refresh()
            readers = self._readers.values()
            late = [reader for reader in readers if reader.finished_at < called_at and not reader.is_silent]
            if not late:
                break
            wake_at = min(deadline, *(reader.next_change(self._interval_s) for reader in late))
            pause_s = max(wake_at - time.monotonic(), 0)
            if polls:
                await asyncio.wait(polls, timeout=pause_s, return_when=asyncio.FIRST_COMPLETED)
            else:
                await asyncio.sleep(pause_s)
        return self._render()

    def _publish(self) -> None:
        if self._siblings is not None:
            known = {engine: reader.counts for engine, reader in self._readers.items()}
            self._siblings.publish({engine: counts for engine, counts in known.items() if counts is not None})

    def _render(self) -> bytes:
        """Return the page's text, formatted again only if a count or ``up`` has changed."""
        if self._siblings is not None:
            for engine, counts in self._siblings.newest().items():
                if engine in self._readers:
                    self._readers[engine].take(counts)
        problems = {engine: reader.problem() for engine, reader in self._readers.items()}
        down = frozenset(engine for engine, problem in problems.items() if problem is not None)
        for engine in sorted(down - self._down):
            logger.warning("sparse-prefill: no new metrics from engine %s: %s", engine, problems[engine])
        self._down = down
        moments = {engine: reader.counts and reader.counts.moment for engine, reader in self._readers.items()}
        if self._rendered[0] != (moments, down):
            text: bytes = generate_latest(SimpleNamespace(collect=self._families))
            self._rendered = (moments, down), text
        return self._rendered[1]

    def _families(self) -> Iterator[Metric]:
        for name, metric in METRICS.items():
            samples = dict(self._samples(name))
            if not samples:
                continue
            new = CounterMetricFamily if metric.type == "counter" else GaugeMetricFamily
            family = new(PREFIX + name, metric.help, labels=metric.all_labels)
            for labels, value in samples.items():
                family.add_metric((self._model_name, *labels), value)
            yield family

    def _samples(self, name: str) -> Iterator[tuple[tuple[str, ...], float]]:
        """Yield a metric's values by its labels, without the model's."""
        for engine, reader in self._readers.items():
            if name == "up":
                yield (engine,), float(engine not in self._down)
            elif reader.counts is not None:
                for labels, value in reader.counts.totals.get(name, {}).items():
                    yield (engine, *labels), value


class MetricsMiddleware:
    """ASGI middleware that adds a page's text to the app's answer to GET /metrics, and passes everything else through.

    vLLM's own text comes from different registries, depending on the number of processes. This works with all of them.
    """

    def __init__(self, app: Any, page: MetricsPage) -> None:
        self.app = app
        self.page = page

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if not (self.page.is_open and _asks_for_metrics(scope)):
            await self.app(scope, receive, send)
            return
        self._refresh()  # engines answer while vLLM writes its own text
        # Nothing can be added to a compressed answer, or to one in another format.
        plain = [(name, value) for name, value in scope["headers"] if name not in (b"accept", b"accept-encoding")]
        start: dict[str, Any] = {}
        body = bytearray()

        async def collect(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                start.update(message)
            elif message["type"] == "http.response.body":
                body.extend(message.get("body", b""))

        await self.app({**scope, "headers": plain}, receive, collect)
        headers = {name.lower(): value for name, value in start.get("headers", ())}
        if start.get("status") == 200 and headers.get(b"content-type", b"").startswith(b"text/plain"):
            body.extend(await self._text(asks_for_fresh(scope)))
        await send_with_body(send, start, bytes(body))

    def _refresh(self) -> None:
        with suppress(Exception):  # ``_text`` raises it again, and logs it
            self.page.refresh()

    async def _text(self, is_fresh: bool) -> bytes:
        try:
            return await (self.page.fresh_text() if is_fresh else self.page.text())
        except Exception:  # vLLM's own metrics must be served even if ours fail
            logger.exception("sparse-prefill: this answer to /metrics has no counters")
            return b""


def _asks_for_metrics(scope: Mapping[str, Any]) -> bool:
    return scope["type"] == "http" and scope["method"] == "GET" and path_of(scope) == "/metrics"


def asks_for_fresh(scope: Mapping[str, Any]) -> bool:
    """Return whether a request's query asks for fresh counts."""
    query = scope.get("query_string", b"").decode("latin-1")
    return FRESH_QUERY in (f"{name}={value}" for name, value in parse_qsl(query))


class MetricsEndpoint:
    """vLLM endpoint plugin that adds our counters to /metrics; each app of a server process has an instance."""

    name = "sparse_prefill"
    required_tasks = None

    def __init__(self) -> None:
        self.page = MetricsPage()

    def attach_router(self, app: Any) -> None:
        """Add the middleware."""
        app.add_middleware(MetricsMiddleware, page=self.page)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Open the page if the server runs this backend."""
        config = getattr(engine_client, "vllm_config", None)
        if config is not None and is_selected(config.attention_config):
            siblings = SiblingCounts.of_server(config)
            name = config.model_config.served_model_name
            self.page.open(engine_client, name, settings_of(config).metrics_interval_s, siblings)
            await self.page.start()
