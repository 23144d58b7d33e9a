# SPDX-License-Identifier: Apache-2.0
"""Compares a server's counters on /metrics with the requests that it received.

If requests come one at a time, all counts follow from the configuration: how the scheduler cuts a prompt into chunks,
how each chunk runs and why, and its causal pairs. Counters must then match **exactly**. This module computes
them from the plan and the documentation (``docs/metrics.md``), not from the code that counts. Under load, the batch's
free room determines chunks, and requests are aborted and preempted. Then only **bounds** hold.
"""

import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from vllm_sparse_backend.config.crossover_table import Thresholds
from vllm_sparse_backend.config.fallback import Fallback
from vllm_sparse_backend.config.model_shape import ModelShape
from vllm_sparse_backend.config.plan import Plan, layer_by_level
from vllm_sparse_backend.config.profile import EXACT, ON
from vllm_sparse_backend.config.request_levels import FIELD, LevelPolicy
from vllm_sparse_backend.config.resolved import Resolved
from vllm_sparse_backend.config.settings import KEY
from vllm_sparse_backend.evaluation.client import Endpoint, Prompts, RequestError
from vllm_sparse_backend.evaluation.metrics_scrape import MetricsReport, parse_metrics
from vllm_sparse_backend.evaluation.report import BenchError
from vllm_sparse_kernels import TILE_TOKENS

SPARSE, DENSE, DECODE = "sparse", "dense", "decode"

HITS = "vllm:prefix_cache_hits_total"
"""vLLM's own metric: prompt tokens found in its prefix cache."""
PREEMPTIONS = "vllm:num_preemptions_total"
AT_WORK = ("vllm:num_requests_running", "vllm:num_requests_waiting")

AUDIT_TOKENS = 3
"""Tokens of each answer in an audit."""

MORE_TOKENS = 76
"""Tokens of the audit's prompts past a border: not a multiple of pages."""

LOOKS = 3
"""Repeated reads of a page that lacks counters, because an engine may be late."""

IDLE_TIMEOUT_S = 120.0
QUIET_S = 10.0
"""Seconds; longer than any step."""


@dataclass
class Counts:
    """Counts of a server since it started, or between two reads."""

    rows: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Rows by path and reason."""
    causal_pairs: Counter[int] = field(default_factory=Counter)
    """Pairs by layer, over all heads."""

    @staticmethod
    def of(report: MetricsReport) -> "Counts":
        return Counts(
            Counter(report.rows),
            Counter({layer: counts.causal_pairs for layer, counts in report.layers.items()}),
        )

    def add(self, other: "Counts", times: int = 1) -> None:
        for name, mine in vars(self).items():
            for key, count in vars(other)[name].items():
                mine[key] += times * count

    def since(self, before: "Counts") -> "Counts":
        difference = Counts()
        difference.add(self)
        difference.add(before, -1)
        return difference

    def rows_of(self, path: str) -> int:
        return sum(count for (row_path, _), count in self.rows.items() if row_path == path)

    def differences(self, expected: "Counts") -> list[str]:
        """Return one line for each counter that differs from its expected value."""
        off = self.since(expected)
        return [
            f"{name} {key if isinstance(key, int) else ' '.join(key).strip()}: counted {mine[key]:,}, expected "
            f"{vars(expected)[name][key]:,}"
            for name, mine in vars(self).items()
            for key, by in sorted(vars(off)[name].items())
            if by
        ]


@dataclass(frozen=True)
class Look:
    """A server's counters at one moment."""

    report: MetricsReport
    counts: Counts
    cached_tokens: int
    preemptions: int

    @staticmethod
    def at(server: Endpoint) -> "Look":
        """Read a server's counters. Raises BenchError if they are missing, or if an engine did not answer."""
        for _ in range(LOOKS):
            report = parse_metrics(text := server.metrics())
            answered = list(report.by("up", "engine").values())
            if answered and all(answered):
                break
            time.sleep(1.0)
        else:
            what = f"{answered.count(0)} engines that did not answer" if answered else "no counters of ours"
            raise BenchError(f"{server.url}/metrics: {what}; expected a server with --attention-backend sparse-prefill")
        return Look(report, Counts.of(report), int(total(text, HITS)), int(total(text, PREEMPTIONS)))

    def faults(self) -> list[str]:
        """Return a line for each event that should never happen, but did since the server started."""
        report = self.report
        counted = {
            "kernels compiled while serving": report.by("compilations", "when")["serving"],
            "tensors past the arena": report.by("arena_overflows").total(),
        }
        return [f"{what}: {count}, expected none" for what, count in counted.items() if count]


def wait_until_idle(server: Endpoint, timeout_s: float = IDLE_TIMEOUT_S) -> None:
    """Wait until aborted requests have left the server: it reports no requests, or its counts stop changing.

    Raises BenchError if it continues to count.
    """
    began = quiet = time.monotonic()
    before = None
    while (now := time.monotonic()) - began < timeout_s:
        text = server.metrics()
        if text and not sum(total(text, name) for name in AT_WORK):
            return
        if (rows := parse_metrics(text).rows) != before:
            quiet, before = now, rows
        if now - quiet > QUIET_S:
            return
        time.sleep(0.5)
    raise BenchError(f"{server.url}: still busy {timeout_s:.0f} s after the last request was answered")


@dataclass(frozen=True)
class Sent:
    """A request that ran alone on the server."""

    prompt_tokens: int
    output_tokens: int
    level: object = None


@dataclass(frozen=True)
class Served:
    """The settings of a server on which its counters depend."""

    plans: Mapping[str, Plan]
    thresholds: Mapping[str, Thresholds]
    chunk_tokens: int
    """Tokens of a step: --max-num-batched-tokens."""

    @staticmethod
    def of(
        settings: Mapping[str, Any], model: Path, device: str, engines: Collection[str], chunk_tokens: int
    ) -> "Served":
        """Return the settings of a server. Raises ConfigurationError as a server does at start-up.

        ``settings`` is the object under ``sparse_prefill``; ``engines`` are those of its layers, as on its /metrics.
        """
        resolved = Resolved.from_additional_config({KEY: settings}, ModelShape.from_folder(model), device)
        known = {"portable" if name == "torch" else name for name in engines} - {DENSE}
        thresholds = {level: resolved.thresholds(level, known) for level in resolved.plans}
        return Served(resolved.plans, thresholds, chunk_tokens)

    def level(self, level: object) -> str:
        """Return the name of a request's level; ``level`` is the value in the request."""
        plan = self.plans[ON]
        return LevelPolicy(plan.level_names, plan.level).level_of({} if level is None else {FIELD: level}).name

    def dense_layers(self) -> int:
        """Return the number of layers that are dense at all levels."""
        plan = self.plans[ON]
        return sum(not layer_by_level(self.plans.values(), layer) for layer in range(plan.shape.num_layers))

    def expected(self, sent: Sent, cached_tokens: int = 0) -> Counts:
        """Return the expected counts of a request whose first ``cached_tokens`` are in the prefix cache."""
        counts = Counts()
        level = self.level(sent.level)
        for start in range(cached_tokens, sent.prompt_tokens, self.chunk_tokens):
            end = min(start + self.chunk_tokens, sent.prompt_tokens)
            path, reason = self._kind(start, end, level)
            counts.rows[path, reason] += 1
            if path == SPARSE:
                self._add_layers(counts, level, max(start, self.thresholds[level].min_tokens or 0), end)
        if sent.output_tokens > 1:
            counts.rows[DECODE, ""] += sent.output_tokens - 1
        return counts

    def _kind(self, start: int, end: int, level: str) -> tuple[str, str]:
        """Return the path and reason of a row that prefills positions [start, end)."""
        if end - start == 1:
            return DECODE, ""
        if level == EXACT:
            return DENSE, Fallback.REQUESTED.value
        reason = self.thresholds[level].dense_reason(end - start, end)
        return (SPARSE, "") if reason is None else (DENSE, reason.value)

    def _add_layers(self, counts: Counts, level: str, first: int, end: int) -> None:
        """Add the queries at positions [first, end) in every layer that is sparse at this level."""
        plan = self.plans[level]
        for layer, groups in enumerate(plan.layers):
            if groups is not None:
                counts.causal_pairs[layer] += plan.shape.num_heads * _pairs(first, end)

    def most_pairs(self, prompt_tokens: int, level: object) -> int:
        """Return an upper bound of a layer's causal pairs for a prompt that is computed once, with any chunks."""
        name = self.level(level)
        least = None if name == EXACT else self.thresholds[name].min_tokens
        if least is None or prompt_tokens <= least:
            return 0
        return self.plans[ON].shape.num_heads * _pairs(least, prompt_tokens)


def _pairs(first: int, end: int) -> int:
    """Return the number of (query, key) pairs of one head's queries at positions [first, end)."""
    return (end * (end + 1) - first * (first + 1)) // 2


@dataclass(frozen=True)
class Bound:
    """Lower and upper bound of a counter, for concurrent requests."""

    what: str
    counted: int
    low: int
    high: int | None = None

    @property
    def holds(self) -> bool:
        return self.low <= self.counted and (self.high is None or self.counted <= self.high)

    def __str__(self) -> str:
        high = "" if self.high is None else f" and at most {self.high:,}"
        return f"{self.what}: {self.counted:,}, expected at least {self.low:,}{high}"


# --- the audit: known requests, one at a time ---


@dataclass
class Audit:
    """Results of an audit. ``differences`` has one line for each counter of each level with an unexpected value."""

    num_requests: int = 0
    counted: Counts = field(default_factory=Counts)
    cached_tokens: int = 0
    differences: list[str] = field(default_factory=list)


def audit(server: Endpoint, served: Served, prompts: Prompts, levels: Sequence[object], longest: int) -> Audit:
    """Send prompts of all kinds at each level, one after the other, and compare the counters before and after.

    Prompts have at most ``longest`` tokens. The server must have no other requests. Raises RequestError if a request is
    not answered, and BenchError if the server's layers differ from the plan's.
    """
    done = Audit()
    prompts.made += time.time_ns() % (1 << 32)  # so that no prompt is in the cache from an earlier audit
    before = Look.at(server)
    if (dense := before.report.attention["dense"]) != served.dense_layers():
        raise BenchError(
            f"{server.url}: {dense} layers prefill dense, but {served.dense_layers()} by the given settings; expected "
            "the settings of the server, and a model all of whose layers can run sparse"
        )
    for level in levels:
        expected, requests = Counts(), list(_prompts(served, level, prompts, longest))
        arguments: dict[str, Any] = {} if level is None else {"vllm_xargs": {FIELD: level}}
        for prompt in requests:
            try:
                server.ask(prompt, AUDIT_TOKENS, **arguments)
            except RequestError as error:
                raise RequestError(f"audit, {len(prompt)} tokens at level {level}: {error}") from None
        after = Look.at(server)
        cached = after.cached_tokens - before.cached_tokens
        for prompt in requests:  # only the last prompt has a prefix in common with another
            expected.add(served.expected(Sent(len(prompt), AUDIT_TOKENS, level), cached * (prompt is requests[-1])))
        counted = after.counts.since(before.counts)
        done.num_requests += len(requests)
        done.cached_tokens += cached
        done.counted.add(counted)
        done.differences += [f"audit at level {level}: {line}" for line in counted.differences(expected)]
        before = after
    return done


def _prompts(served: Served, level: object, prompts: Prompts, longest: int) -> Iterator[list[int]]:
    """Yield a prompt below ``min_tokens``, a longer prompt, and two prompts of several chunks that begin alike.

    If requests and plans name a level differently, its prompts have the lengths of the server's own level.
    """
    thresholds = served.thresholds.get(served.level(level), served.thresholds[ON])
    least, chunk = thresholds.min_tokens or 0, served.chunk_tokens
    past = max(thresholds.min_query_tokens, TILE_TOKENS + 1) + MORE_TOKENS
    several = (max(least, chunk) // chunk + 1) * chunk + MORE_TOKENS + 1
    for length in (least // 2, least + past):
        if 2 <= length <= longest:
            yield prompts.take(length)
    last = prompts.take(min(several, longest))
    yield last
    tail = min(past, len(last) // 2)
    yield last[: len(last) - tail] + prompts.take(tail)


def total(text: str, name: str) -> float:
    """Return the sum of the samples with exactly this name, such as a metric of vLLM's; 0 if there are none."""
    families = text_string_to_metric_families(text)
    return sum(sample.value for family in families for sample in family.samples if sample.name == name)
