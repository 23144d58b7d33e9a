# SPDX-License-Identifier: Apache-2.0
"""Compares a server's counters on /metrics with the requests that it received.

If requests come one at a time, all counts follow from the configuration: how the scheduler cuts a prompt into chunks,
how each chunk runs and why, and its causal pairs. Counters must then match exactly. This module computes them from the
plan and the documentation (``docs/metrics.md``), not from the code that counts.
"""

import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from vllm_sparse_backend.config.crossover_table import Lengths
from vllm_sparse_backend.config.fallback import Fallback
from vllm_sparse_backend.config.layer_weights import mean_layer_weights
from vllm_sparse_backend.config.model_check import read_config
from vllm_sparse_backend.config.model_shape import ModelShape
from vllm_sparse_backend.config.plan import Plan
from vllm_sparse_backend.config.profile import EXACT, ON
from vllm_sparse_backend.config.request_levels import FIELD, LevelPolicy
from vllm_sparse_backend.config.resolved import Resolved
from vllm_sparse_backend.config.settings import KEY
from vllm_sparse_backend.evaluation.client import Endpoint, Prompts, RequestError
from vllm_sparse_backend.evaluation.metrics_scrape import MetricsReport, parse_metrics
from vllm_sparse_backend.evaluation.report import BenchError
from vllm_sparse_kernels import TILE_TOKENS

HITS = "vllm:prefix_cache_hits_total"
"""vLLM's own metric: prompt tokens found in its prefix cache."""
AT_WORK = ("vllm:num_requests_running", "vllm:num_requests_waiting")

AUDIT_TOKENS = 3
"""Tokens of each answer in an audit."""

MORE_TOKENS = 76
"""Tokens of the audit's prompts past a border: not a multiple of pages."""

READS = 3
"""Repeated reads of a page that lacks counters, because an engine may be late."""

IDLE_TIMEOUT_S = 120.0
QUIET_S = 10.0
"""Seconds; longer than any step."""

Counts = Counter[tuple[str, ...]]
"""Rows by ("rows", path, reason), and pairs over all heads by ("pairs", layer)."""


class Reading(NamedTuple):
    """A server's counters at one moment."""

    report: MetricsReport
    counts: Counts
    cached_tokens: int


def read_counters(server: Endpoint) -> Reading:
    """Read a server's counters. Raises BenchError if they are missing, or if an engine did not answer."""
    for _ in range(READS):
        report = parse_metrics(text := server.metrics())
        answered = list(report.by("up", "engine").values())
        if answered and all(answered):
            break
        time.sleep(1.0)
    else:
        what = f"{answered.count(0)} engines that did not answer" if answered else "no counters of ours"
        raise BenchError(f"{server.url}/metrics: {what}; expected a server with --attention-backend sparse-prefill")
    counts: Counts = Counter({("rows", *kind): rows for kind, rows in report.rows.items()})
    counts.update({("pairs", str(layer)): pairs.causal for layer, pairs in report.layers.items()})
    return Reading(report, counts, int(total(text, HITS)))


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
class Served:
    """The settings of a server on which its counters depend."""

    plans: Mapping[str, Plan]
    lengths: Mapping[str, Lengths]
    chunk_tokens: int
    """Tokens of a step: --max-num-batched-tokens."""

    @staticmethod
    def of(
        settings: Mapping[str, Any], model: Path, device: str, engines: Collection[str], chunk_tokens: int
    ) -> "Served":
        """Return the settings of a server. Raises ConfigurationError as a server does at start-up.

        ``settings`` is the object under ``sparse_prefill``; ``engines`` are those of its layers, as on its /metrics.
        """
        shape = ModelShape.from_folder(model)
        weights = mean_layer_weights(read_config(model), shape, str(model))
        resolved = Resolved.from_additional_config({KEY: settings}, shape, weights, device)
        known = {"portable" if name == "torch" else name for name in engines} - {"dense"}
        lengths = {level: resolved.lengths(level, known) for level in resolved.plans}
        return Served(resolved.plans, lengths, chunk_tokens)

    def level(self, level: object) -> str:
        """Return the name of a request's level; ``level`` is the value in the request."""
        plan = self.plans[ON]
        return LevelPolicy(plan.level_names, plan.level).level_of({} if level is None else {FIELD: level}).name

    def dense_layers(self) -> int:
        """Return the number of layers that are dense at all levels."""
        return sum(not any(of_level) for of_level in zip(*(plan.layers for plan in self.plans.values()), strict=True))

    def expected(self, prompt_tokens: int, request_level: object, cached_tokens: int) -> Counts:
        """Return the counts of a request that runs alone, whose first ``cached_tokens`` are in the prefix cache."""
        counts: Counts = Counter({("rows", "decode", ""): AUDIT_TOKENS - 1})
        level = self.level(request_level)
        for start in range(cached_tokens, prompt_tokens, self.chunk_tokens):
            end = min(start + self.chunk_tokens, prompt_tokens)
            path, reason = self._kind(start, end, level)
            counts["rows", path, reason] += 1
            if path == "sparse":
                plan, first = self.plans[level], max(start, self.lengths[level].min_tokens)
                pairs = plan.shape.num_heads * (end * (end + 1) - first * (first + 1)) // 2
                counts.update({("pairs", str(layer)): pairs for layer, heads in enumerate(plan.layers) if heads})
        return counts

    def _kind(self, start: int, end: int, level: str) -> tuple[str, str]:
        """Return the path and reason of a row that prefills positions [start, end)."""
        if end - start == 1:
            return "decode", ""
        if level == EXACT:
            return "dense", Fallback.REQUESTED.value
        reason = self.lengths[level].dense_reason(end - start, end)
        return ("sparse", "") if reason is None else ("dense", reason.value)


@dataclass
class Audit:
    """Results of an audit. ``differences`` has one line for each counter of each level with an unexpected value."""

    num_requests: int = 0
    counted: Counts = field(default_factory=Counter)
    cached_tokens: int = 0
    differences: list[str] = field(default_factory=list)


def audit(server: Endpoint, served: Served, prompts: Prompts, levels: Sequence[object], longest: int) -> Audit:
    """Send prompts of all kinds at each level, one after the other, and compare the counters before and after.

    Prompts have at most ``longest`` tokens. The server must have no other requests. Raises RequestError if a request is
    not answered, and BenchError if the server's layers differ from the plan's.
    """
    done = Audit()
    prompts.made += time.time_ns() % (1 << 32)  # so that no prompt is in the cache from an earlier audit
    before = read_counters(server)
    if (dense := before.report.attention["dense"]) != served.dense_layers():
        raise BenchError(
            f"{server.url}: {dense} layers prefill dense, but {served.dense_layers()} by the given settings; expected "
            "the settings of the server, and a model all of whose layers can run sparse"
        )
    for level in levels:
        requests = list(_prompts(served, level, prompts, longest))
        arguments: dict[str, Any] = {} if level is None else {"vllm_xargs": {FIELD: level}}
        for prompt in requests:
            try:
                server.ask(prompt, AUDIT_TOKENS, **arguments)
            except RequestError as error:
                raise RequestError(f"audit, {len(prompt)} tokens at level {level}: {error}") from None
        after = read_counters(server)
        cached = after.cached_tokens - before.cached_tokens
        expected: Counts = Counter()
        for prompt in requests:  # only the last prompt has a prefix in common with another
            expected.update(served.expected(len(prompt), level, cached * (prompt is requests[-1])))
        counted = after.counts - before.counts
        done.num_requests += len(requests)
        done.cached_tokens += cached
        done.counted.update(counted)
        for name in sorted(counted.keys() | expected.keys()):
            if counted[name] != expected[name]:
                what = " ".join(name).strip()
                done.differences.append(
                    f"audit at level {level}: {what}: counted {counted[name]:,}, expected {expected[name]:,}"
                )
        before = after
    return done


def _prompts(served: Served, level: object, prompts: Prompts, longest: int) -> Iterator[list[int]]:
    """Yield a prompt below ``min_tokens``, a longer prompt, and two prompts of several chunks that begin alike.

    If requests and plans name a level differently, its prompts have the lengths of the server's own level.
    """
    lengths = served.lengths.get(served.level(level), served.lengths[ON])
    least, chunk = lengths.min_tokens, served.chunk_tokens
    past = max(lengths.min_query_tokens, TILE_TOKENS + 1) + MORE_TOKENS
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
