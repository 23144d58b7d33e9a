# SPDX-License-Identifier: Apache-2.0
"""The last counts of an engine in an API server process, and a way to share them with sibling processes.

An engine answers between two steps, so an answer may take as long as a step. ``EngineReader`` therefore polls in the
background, with at most one poll at a time, and keeps the last counts for /metrics.

Several API server processes behind a port poll at different times. Prometheus interprets a falling counter as a
restart, so a process must never show older counts than another has shown: ``SiblingCounts`` shares them through files.
"""

import asyncio
import json
import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from vllm_sparse_backend.config.metrics import METRICS
from vllm_sparse_backend.identity import LOGGER
from vllm_sparse_backend.serving.frontend.engine_rpc import Call

logger = logging.getLogger(LOGGER)

TIMEOUT_S = 4.0
"""Seconds without an answer after which /metrics shows an engine as down."""

LOOKS_S = (0.05, 0.1, 0.2, 0.4, 0.8)
"""Pauses in seconds between further calls, while a worker copies its counts from the device."""

Answers = list[dict[str, Any]]
"""For each worker of an engine: ``worker_samples.worker_samples``."""

Totals = Mapping[str, Mapping[tuple[str, ...], float]]
"""Counts by metric, then by the values of its labels without model and engine."""


class EngineCounts(NamedTuple):
    """An engine's counts at some moment, summed over its workers."""

    moment: int
    """``answer_moment`` of the answer: higher for later answers of the same engine."""
    totals: Totals


def engine_totals(workers: Answers) -> dict[str, dict[tuple[str, ...], float]]:
    """Sum the workers' samples by metric and labels, as ``Metric.per_rank`` and ``Metric.seen_by_all`` specify."""
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
    """Return the workers whose samples count.

    Every pipeline stage with a layer that can run sparse sees all rows. The first such stage sees each row before the
    others, so its counts are used.
    """
    if not METRICS[name].seen_by_all:
        return workers
    with_some = [worker for worker in workers if any(sample == name for sample, _, _ in worker["samples"])]
    return sorted(with_some, key=lambda worker: int(worker["rank"]))[:1]


class EngineReader:
    """The last counts of an engine, and its current poll, if any."""

    def __init__(self) -> None:
        self.counts: EngineCounts | None = None
        self.finished_at = -math.inf
        """When the last finished poll started, by ``time.monotonic``; -inf before the first."""
        self.asked_at = -math.inf
        """When the last poll started."""
        self._waiting_since: float | None = None
        self._failure: str | None = "has not answered yet"
        self._poll: asyncio.Task[None] | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether a poll is under way."""
        return self._poll is not None and not self._poll.done()

    @property
    def is_silent(self) -> bool:
        """Whether a call has had no answer for ``TIMEOUT_S``."""
        return self._waiting_since is not None and time.monotonic() - self._waiting_since >= TIMEOUT_S

    def next_change(self, interval_s: float) -> float:
        """Return when the next poll is due, or when the poll under way times out."""
        if not self.is_waiting:
            return self.asked_at + interval_s
        return math.inf if self._waiting_since is None else self._waiting_since + TIMEOUT_S

    def refresh(self, call: Call, interval_s: float, on_counts: Callable[[], None]) -> asyncio.Task[None] | None:
        """Start a poll if none is under way and the last is ``interval_s`` old."""
        if self.is_waiting:
            return self._poll
        now = time.monotonic()
        if now - self.asked_at < interval_s:
            return None
        self.asked_at = self._waiting_since = now
        self._poll = asyncio.create_task(self._read(call, on_counts))
        return self._poll

    def problem(self) -> str | None:
        """Return why the engine is shown as down."""
        return f"no answer after {TIMEOUT_S:.0f} s" if self.is_silent else self._failure

    def take(self, counts: EngineCounts) -> bool:
        """Keep counts if they are newer than the current counts."""
        is_newer = self.counts is None or counts.moment > self.counts.moment
        if is_newer:
            self.counts = counts
        return is_newer

    async def _read(self, call: Call, on_counts: Callable[[], None]) -> None:
        """Poll the engine. The first call starts copies on the devices, which finish after the work queued earlier."""
        try:
            is_behind = await self._call(call, True, on_counts)
            for pause_s in LOOKS_S:
                if not is_behind:
                    break
                await asyncio.sleep(pause_s)
                is_behind = await self._call(call, False, on_counts)
        except Exception as error:  # the page must still show other engines and vLLM's text
            self._failure = f"{type(error).__name__}: {error}"
        finally:
            self._waiting_since = None
            self.finished_at = self.asked_at

    async def _call(self, call: Call, start: bool, on_counts: Callable[[], None]) -> bool:
        """Call the workers and keep their counts; return whether newer counts are being copied."""
        self._waiting_since = time.monotonic()
        workers: Answers = await call(start)
        self._waiting_since = self._failure = None
        if self.take(EngineCounts(answer_moment(workers), engine_totals(workers))):
            on_counts()
        return any(worker["behind"] for worker in workers)


def answer_moment(workers: Answers) -> int:
    """Return when an engine answered, by its first worker's clock: it answers all API processes in turn."""
    return int(workers[0]["moment"])


class SiblingCounts:
    """Counts that the API server processes of a server have read, in a file for each process.

    A process writes its file before it shows counts, and reads the others' files before it answers. Every answer is
    therefore at least as new as all earlier answers of any process. Files that cannot be read or written are skipped.
    """

    def __init__(self, folder: Path, server_id: int, process_id: int) -> None:
        self._file = folder / f"sparse_prefill_{server_id}_{process_id}.json"
        self._pattern = f"sparse_prefill_{server_id}_*.json"
        self._cache: dict[Path, tuple[tuple[int, int], dict[str, EngineCounts]]] = {}
        self._has_warned = False

    @staticmethod
    def of_server(vllm_config: Any) -> "SiblingCounts | None":
        """Return the counts of a server with several API processes, in the folder of vLLM's shared metrics."""
        folder = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
        if not folder or getattr(vllm_config.parallel_config, "_api_process_count", 1) < 2:
            return None
        return SiblingCounts(Path(folder), os.getppid(), os.getpid())

    def publish(self, engines: Mapping[str, EngineCounts]) -> None:
        """Write this process's counts."""
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
        aside = self._file.with_suffix(".new")
        try:
            aside.write_text(json.dumps(data))
            aside.replace(self._file)
        except OSError as error:
            with suppress(OSError):
                aside.unlink(missing_ok=True)
            self._warn(f"cannot write {self._file}: {error}")

    def newest(self) -> dict[str, EngineCounts]:
        """Read the newest counts of other processes."""
        newest: dict[str, EngineCounts] = {}
        for path in self._file.parent.glob(self._pattern):
            if path == self._file:
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
