# SPDX-License-Identifier: Apache-2.0
"""The counts of one engine as an API server process last read them, and how processes of one server share them.

An engine answers between two of its steps, so an answer may take as long as a step does. ``EngineReader`` therefore
asks in the background, at most one question at a time, and keeps the last answer for whoever reads /metrics.

Several API server processes behind one port read at different moments. Prometheus takes a counter that falls for a
restart, so a process must never show older counts than another one has shown: ``SiblingCounts`` hands them on by files.
"""

import asyncio
import json
import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from vllm_sparse_backend.config.metrics import METRICS
from vllm_sparse_backend.identity import LOGGER
from vllm_sparse_backend.serving.frontend.engine_rpc import Call

logger = logging.getLogger(LOGGER)

TIMEOUT_S = 4.0
"""Seconds without an answer after which an engine is shown as down."""

LOOKS_S = (0.05, 0.1, 0.2, 0.4, 0.8)
"""Pauses between further calls while a worker's counts are on their way from its device."""

Answers = list[dict[str, Any]]
"""For each worker of an engine: ``samples.worker_samples``."""

Totals = Mapping[str, Mapping[tuple[str, ...], float]]
"""By metric, then by the values of its labels without model and engine."""


class EngineCounts(NamedTuple):
    """An engine's counts at some moment, summed over its workers."""

    moment: int
    """``answer_moment`` of the answer: of two answers of an engine the later one has the higher value."""
    totals: Totals


def engine_totals(workers: Answers) -> dict[str, dict[tuple[str, ...], float]]:
    """Sum the workers' samples by metric and labels, as ``Metric.per_rank`` and ``Metric.seen_by_all`` say."""
    totals: dict[str, dict[tuple[str, ...], float]] = {}
    for name, metric in METRICS.items():
        sums: dict[tuple[str, ...], float] = {}
        for worker in _speakers(name, workers):
            rank = (str(worker["rank"]),) if metric.per_rank else ()
            for sample, labels, value in worker["samples"]:
                if sample == name:
                    key = (*rank, *labels)
                    sums[key] = sums.get(key, 0.0) + value
        if sums:
            totals[name] = sums
    return totals


def _speakers(name: str, workers: Answers) -> Answers:
    """The workers whose samples count. Every pipeline stage with a layer that can go sparse sees all rows: the first
    one speaks for them, as it sees each row before later ones do."""
    if not METRICS[name].seen_by_all:
        return workers
    with_some = [worker for worker in workers if any(sample == name for sample, _, _ in worker["samples"])]
    return sorted(with_some, key=lambda worker: int(worker["rank"]))[:1]


class EngineReader:
    """One engine's last counts, and the question under way, of which there is at most one."""

    def __init__(self) -> None:
        self.counts: EngineCounts | None = None
        self.finished_at = -math.inf
        """When the last question that has ended was put, by ``time.monotonic``; -inf before the first."""
        self.asked_at = -math.inf
        """When the last question was put."""
        self._waiting_since: float | None = None
        self._failure: str | None = "has not answered yet"
        self._question: asyncio.Task[None] | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether a question is under way."""
        return self._question is not None and not self._question.done()

    @property
    def is_silent(self) -> bool:
        """Whether a call has had no answer for ``TIMEOUT_S``."""
        return self._waiting_since is not None and time.monotonic() - self._waiting_since >= TIMEOUT_S

    def next_change(self, interval_s: float) -> float:
        """When the next question is due, or the one under way has had no answer for too long, by ``time.monotonic``."""
        if not self.is_waiting:
            return self.asked_at + interval_s
        return math.inf if self._waiting_since is None else self._waiting_since + TIMEOUT_S

    def refresh(self, call: Call, interval_s: float, on_counts: Callable[[], None]) -> asyncio.Task[None] | None:
        """Return the question under way, or put a new one where the last is ``interval_s`` old; None if it is not.

        Args:
            call: Calls a method of all of the engine's workers.
            interval_s: Least seconds between two questions.
            on_counts: Called whenever ``counts`` has become newer.
        """
        if self.is_waiting:
            return self._question
        now = time.monotonic()
        if now - self.asked_at < interval_s:
            return None
        self.asked_at = self._waiting_since = now
        self._question = asyncio.create_task(self._read(call, on_counts))
        return self._question

    def problem(self) -> str | None:
        """Why the engine is shown as down, or None while it answers."""
        return f"no answer after {TIMEOUT_S:.0f} s" if self.is_silent else self._failure

    def take(self, counts: EngineCounts) -> bool:
        """Keep these counts unless the present ones are as new; return whether they were kept."""
        is_newer = self.counts is None or counts.moment > self.counts.moment
        if is_newer:
            self.counts = counts
        return is_newer

    async def _read(self, call: Call, on_counts: Callable[[], None]) -> None:
        """Counts on a device set out when they are asked for, and arrive when the work before them is done."""
        try:
            is_behind = await self._call(call, True, on_counts)
            for pause_s in LOOKS_S:
                if not is_behind:
                    break
                await asyncio.sleep(pause_s)
                is_behind = await self._call(call, False, on_counts)
        except Exception as error:  # an engine that fails must not keep others, or vLLM's part, from the page
            self._failure = f"{type(error).__name__}: {error}"
        finally:
            self._waiting_since = None
            self.finished_at = self.asked_at

    async def _call(self, call: Call, start: bool, on_counts: Callable[[], None]) -> bool:
        """Call the workers once and keep what they counted; return whether newer counts are on their way."""
        self._waiting_since = time.monotonic()
        workers: Answers = await call(start)
        self._waiting_since = self._failure = None
        if self.take(EngineCounts(answer_moment(workers), engine_totals(workers))):
            on_counts()
        return any(worker["behind"] for worker in workers)


def answer_moment(workers: Answers) -> int:
    """When the engine's core gave this answer, by the clock of its host; without a core's stamp, the time now."""
    return next((int(worker["moment"]) for worker in workers if "moment" in worker), time.monotonic_ns())


class SiblingCounts:
    """Counts that the API server processes of one server have read, in a file for each process.

    A process writes its file before it shows the counts, and looks at the others' before it answers: what any of them
    has shown, all later answers are at least as new as. A file that cannot be read or written is left out.
    """

    def __init__(self, folder: Path, server_id: int, process_id: int) -> None:
        self._own = folder / f"sparse_prefill_{server_id}_{process_id}.json"
        self._pattern = f"sparse_prefill_{server_id}_*.json"
        self._cache: dict[Path, tuple[tuple[int, int], dict[str, EngineCounts]]] = {}
        self._has_warned = False

    @staticmethod
    def of_server(vllm_config: Any) -> "SiblingCounts | None":
        """For a server of several API processes, in the folder that vLLM shares its own metrics by; otherwise None."""
        folder = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
        if not folder or getattr(vllm_config.parallel_config, "_api_process_count", 1) < 2:
            return None
        return SiblingCounts(Path(folder), os.getppid(), os.getpid())

    def publish(self, engines: Mapping[str, EngineCounts]) -> None:
        """Write this process's counts, by engine."""
        data = {
            engine: {
                "moment": counts.moment,
                "totals": [
                    [name, list(labels), value]
                    for name, sums in counts.totals.items()
                    for labels, value in sums.items()
                ],
            }
            for engine, counts in engines.items()
        }
        aside = self._own.with_suffix(".new")
        try:
            aside.write_text(json.dumps(data))
            aside.replace(self._own)
        except OSError as error:
            self._warn(f"cannot write {self._own}: {error}")

    def newest(self) -> dict[str, EngineCounts]:
        """The newest counts of each engine that other processes have read."""
        newest: dict[str, EngineCounts] = {}
        for path in self._own.parent.glob(self._pattern):
            if path == self._own:
                continue
            for engine, counts in self._read(path).items():
                if engine not in newest or counts.moment > newest[engine].moment:
                    newest[engine] = counts
        return newest

    def _read(self, path: Path) -> dict[str, EngineCounts]:
        try:
            status = path.stat()
            version = (status.st_ino, status.st_mtime_ns)
            known = self._cache.get(path)
            if known is None or known[0] != version:
                known = self._cache[path] = version, _parse(path.read_text())
        except (OSError, ValueError, KeyError, TypeError) as error:
            self._warn(f"cannot read {path}: {error}")
            return {}
        return known[1]

    def _warn(self, problem: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "sparse-prefill: API server processes cannot share counts, so counters on /metrics may differ from "
                "process to process: %s (logged once)", problem,
            )  # fmt: skip


def _parse(text: str) -> dict[str, EngineCounts]:
    engines = {}
    for engine, data in json.loads(text).items():
        totals: dict[str, dict[tuple[str, ...], float]] = {}
        for name, labels, value in data["totals"]:
            totals.setdefault(name, {})[tuple(labels)] = value
        engines[engine] = EngineCounts(data["moment"], totals)
    return engines
