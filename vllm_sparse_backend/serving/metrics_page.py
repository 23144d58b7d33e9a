# SPDX-License-Identifier: Apache-2.0
"""The server's side: asks every engine's workers what they counted, when somebody reads /metrics, and adds it there.

All of a server's processes ask all of its engines, so whichever of them answers says the same; and each reader is told
what was asked for after it came, so no counter ever falls from one process to the next. Readers at one time share one
question, and questions keep ``metrics_interval_s`` apart: a reader who comes earlier waits, and no reader can keep an
engine busy. An engine that does not answer in time shows with ``up`` 0, and with nothing that it said before.
"""

import asyncio
import logging
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from vllm_sparse_backend.identity import LOGGER, is_ours
from vllm_sparse_backend.serving.asking import Ask, answers_of, engines_of, path_of, send_whole
from vllm_sparse_backend.serving.resolution import settings_of
from vllm_sparse_backend.settings.metrics import METRICS, PREFIX, SWITCH_PATH, WORKER_METHOD

logger = logging.getLogger(LOGGER)

TIMEOUT_S = 4.0
"""For all of the engines' answers. Prometheus itself gives up after 10 seconds."""

LOOKS_S = (0.05, 0.1, 0.2, 0.4, 0.8)
"""So long after one another, workers are asked again whether counts that were on their way have arrived."""

Answers = list[dict[str, Any]]
"""Of each worker of an engine: ``samples.worker_samples``."""


class MetricsPage:
    """The question that is under way, and the next one."""

    def __init__(self) -> None:
        self._client: Any = None
        self._model_name, self._interval_s = "", 0.0
        self._silent: set[str] = set()
        self._next: asyncio.Task[bytes] | None = None
        self._turn = asyncio.Lock()
        self._asked: dict[str, asyncio.Task[Answers]] = {}
        self._due = 0.0

    def open(self, engine_client: Any, model_name: str, interval_s: float) -> None:
        self._client, self._model_name, self._interval_s = engine_client, model_name, interval_s

    @property
    def is_open(self) -> bool:
        """Whether this server's engines have something to say."""
        return self._client is not None

    async def text(self) -> bytes:
        """What the engines say now, in Prometheus's text format."""
        if self._next is None:
            self._next = asyncio.create_task(self._ask_all())
        return await asyncio.shield(self._next)

    async def _ask_all(self) -> bytes:
        async with self._turn:
            await asyncio.sleep(max(self._due - time.monotonic(), 0))
            # Who comes from here on waits for the next question: this one's answer may be older than others were told.
            self._next, self._due = None, time.monotonic() + self._interval_s
            asks = engines_of(self._client, WORKER_METHOD)
            asked = {engine: self._ask_anew(engine, ask) for engine, ask in asks.items()}
            answers, failed = await answers_of(asked, TIMEOUT_S)
            for engine in failed.keys() - self._silent:
                logger.warning("sparse-prefill: engine %s does not tell its counters: %s", engine, failed[engine])
            self._silent = set(failed)
            return generate_latest(SimpleNamespace(collect=lambda: self._families(answers)))

    async def _ask_anew(self, engine: str, ask: Ask) -> Answers:
        """While an earlier answer is late nothing else is asked; once it is there, it is old."""
        if (late := self._asked.get(engine)) is not None:
            await asyncio.wait([late])
        self._asked[engine] = asyncio.create_task(_ask_until_arrived(ask))
        return await asyncio.shield(self._asked[engine])

    def _families(self, answers: Mapping[str, Answers]) -> Iterator[Metric]:
        totals = {name: dict(total(name, answers)) for name in METRICS}
        totals["up"] = {(engine,): float(engine in answers) for engine in (*answers, *self._silent)}
        for name, metric in METRICS.items():
            if not totals[name]:
                continue
            new = CounterMetricFamily if metric.type == "counter" else GaugeMetricFamily
            family = new(PREFIX + name, metric.help, labels=metric.all_labels)
            for labels, value in totals[name].items():
                family.add_metric((self._model_name, *labels), value)
            yield family


def total(name: str, answers: Mapping[str, Answers]) -> Mapping[tuple[str, ...], float]:
    """A metric of all engines' workers, by its labels' values but the model's name: added up within an engine, or as
    ``Metric`` says."""
    found: dict[tuple[str, ...], float] = {}
    for engine, workers in answers.items():
        for worker in _speakers(name, workers):
            own = (str(worker["rank"]),) if METRICS[name].per_rank else ()
            for sample, labels, value in worker["samples"]:
                if sample == name:
                    key = (engine, *own, *labels)
                    found[key] = found.get(key, 0) + value
    return found


def _speakers(name: str, workers: Answers) -> Answers:
    """Those whose samples count. Every pipeline stage with a layer that can go sparse sees all rows: of these the first
    is taken, which sees each row before later ones do."""
    if not METRICS[name].seen_by_all:
        return workers
    with_some = [worker for worker in workers if any(sample == name for sample, _, _ in worker["samples"])]
    return sorted(with_some, key=lambda worker: int(worker["rank"]))[:1]


async def _ask_until_arrived(ask: Ask) -> Answers:
    """Counts on a device set out when they are asked for, and arrive when its work before them is done."""
    answers = await ask(True)
    for seconds in LOOKS_S:
        if not any(worker["behind"] for worker in answers):
            break
        await asyncio.sleep(seconds)
        answers = await ask(False)
    return answers


class MetricsMiddleware:
    """ASGI middleware: adds a page's text to what the app answers to GET /metrics, and touches nothing else.

    vLLM's own text may come from one of several registries, by how many processes serve: here all are alike.
    """

    def __init__(self, app: Any, page: MetricsPage) -> None:
        self.app = app
        self.page = page

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if not (self.page.is_open and _asks_for_metrics(scope)):
            await self.app(scope, receive, send)
            return
        # What comes compressed, or in another format, could not be added to.
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
            body.extend(await self._text())
        await send_whole(send, start, bytes(body))

    async def _text(self) -> bytes:
        try:
            return await self.page.text()
        except Exception:  # whatever it is, vLLM's own metrics are not to go with ours
            logger.exception("sparse-prefill: no counters on /metrics this time")
            return b""


def _asks_for_metrics(scope: Mapping[str, Any]) -> bool:
    return scope["type"] == "http" and scope["method"] == "GET" and path_of(scope) == "/metrics"


class MetricsEndpoint:
    """An endpoint plugin as vLLM defines it, of each app that a server process builds."""

    name = "sparse_prefill"
    required_tasks = None

    def __init__(self) -> None:
        self.page = MetricsPage()

    def attach_router(self, app: Any) -> None:
        self.app = app
        app.add_middleware(MetricsMiddleware, page=self.page)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        config = getattr(engine_client, "vllm_config", None)
        if config is not None and is_ours(config.attention_config.backend):
            settings = settings_of(config)
            self.page.open(engine_client, config.model_config.served_model_name, settings.metrics_interval_s)
            if settings.switch:
                from vllm_sparse_backend.serving.switch import Switch

                self.app.router.add_route(SWITCH_PATH, Switch(engine_client).answer, methods=["POST"])
