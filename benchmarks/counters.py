# SPDX-License-Identifier: Apache-2.0
"""What a server counted on its /metrics against what it was sent.

Of requests that come one at a time, all that is counted follows from the configuration: how the scheduler cuts a
prompt into chunks, what each chunk runs on and why, its tiles, and the pairs that a causal mask allows it. So counters
must say so **to the last unit**; this module works it out from the plan and the documentation (``docs/metrics.md``),
not from the code that counts. Under load, chunks are cut as the batch has room, requests are broken off and preempted:
there only **bounds** hold, and they are called so.
"""

import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from vllm_sparse_backend.config.crossover_table import Thresholds, load_crossover
from vllm_sparse_backend.config.fallback import Fallback
from vllm_sparse_backend.config.model_shape import ModelShape
from vllm_sparse_backend.config.plan import DEFAULT, Plan, layer_by_level
from vllm_sparse_backend.config.profile import EXACT
from vllm_sparse_backend.config.request_levels import FIELD, Choices
from vllm_sparse_backend.config.settings import KEY, load_config
from vllm_sparse_backend.evaluation.client import Endpoint, Prompts, RequestError
from vllm_sparse_backend.evaluation.metrics_scrape import MetricsReport, parse_metrics
from vllm_sparse_backend.evaluation.report import BenchError
from vllm_sparse_kernels import TILE_TOKENS
from vllm_sparse_kernels.rows import ceil_div

SPARSE, DENSE, DECODE = "sparse", "dense", "decode"

HITS = "vllm:prefix_cache_hits_total"
"""vLLM's own: tokens of prompts that were found in its prefix cache."""
PREEMPTIONS = "vllm:num_preemptions_total"
AT_WORK = ("vllm:num_requests_running", "vllm:num_requests_waiting")

AUDIT_TOKENS = 3
"""Of each answer in an audit."""

MORE_TOKENS = 76
"""By so many the audit's prompts pass a border: a number that is no multiple of pages and tiles."""

LOOKS = 3
"""At a page that has not all counters: an engine may be late for once."""

IDLE_TIMEOUT_S = 120.0
QUIET_S = 10.0
"""Longer than any step takes."""


@dataclass
class Counts:
    """Of a server since it started, or between two looks at it."""

    rows: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By path and reason."""
    tiles: Counter[int] = field(default_factory=Counter)
    """By layer."""
    causal_pairs: Counter[int] = field(default_factory=Counter)
    """By layer, of all heads."""

    @staticmethod
    def of(report: MetricsReport) -> "Counts":
        return Counts(
            Counter(report.rows),
            Counter({layer: counts.tiles for layer, counts in report.layers.items()}),
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
        """One line for each counter that is not what is expected."""
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
        """Raises BenchError where the server has none of our counters, or not all of its engines answered."""
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
        """What must never happen to a server, and did since it started."""
        report = self.report
        counted = {
            "kernels compiled while serving": report.by("compilations", "when")["serving"],
            "tensors past the arena": report.by("arena_overflows").total(),
            "layers that the guard turned dense": report.by("guard_trips").total(),
        }
        return [f"{what}: {count}, expected none" for what, count in counted.items() if count]


def wait_until_idle(server: Endpoint, timeout_s: float = IDLE_TIMEOUT_S) -> None:
    """Until requests whose clients have gone are off the server: it says so, or has counted nothing for a while.

    Raises BenchError if it goes on counting.
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
    raise BenchError(f"{server.url}: still at work {timeout_s:.0f} s after the last request was answered")


@dataclass(frozen=True)
class Sent:
    """A request that the server had for itself."""

    prompt_tokens: int
    output_tokens: int
    level: object = None


@dataclass(frozen=True)
class Served:
    """What a server was started with, as far as its counters depend on it."""

    plans: Mapping[str, Plan]
    thresholds: Mapping[str, Thresholds]
    chunk_tokens: int
    """Tokens of a step: --max-num-batched-tokens."""

    @staticmethod
    def of(
        settings: Mapping[str, Any], model: Path, device: str, engines: Collection[str], chunk_tokens: int
    ) -> "Served":
        """settings: the object under ``sparse_prefill``; engines: that its layers use, as its /metrics name them.

        Raises ConfigurationError as a server would at its start.
        """
        config = load_config({KEY: settings})
        plans = Plan.by_level(config, ModelShape.from_folder(model))
        table = load_crossover(config.crossover)
        known = {"portable" if name == "torch" else name for name in engines} - {DENSE}
        return Served(
            plans, {level: plan.thresholds(table, device, known) for level, plan in plans.items()}, chunk_tokens
        )

    def level(self, level: object) -> str:
        """Of a request that asks for this."""
        plan = self.plans[DEFAULT]
        return DEFAULT if level is None else Choices(plan.level_names, plan.level).named_by(level).name

    def dense_layers(self) -> int:
        """Layers that are dense at all levels."""
        plan = self.plans[DEFAULT]
        return sum(not layer_by_level(self.plans.values(), layer) for layer in range(plan.shape.num_layers))

    def expected(self, sent: Sent, cached_tokens: int = 0) -> Counts:
        """What is counted of a request that finds its prompt's first ``cached_tokens`` in the cache."""
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
        """The path and reason of a row that prefills positions [start, end)."""
        if end - start == 1:
            return DECODE, ""
        if level == EXACT:
            return DENSE, Fallback.REQUESTED.value
        thresholds = self.thresholds[level]
        if thresholds.min_tokens is None:
            return DENSE, Fallback.NEVER_FASTER.value
        if end <= thresholds.min_tokens:
            return DENSE, Fallback.TOO_SHORT.value
        if end - max(start, thresholds.min_tokens) < thresholds.min_query_tokens:
            return DENSE, Fallback.SHORT_QUERY.value
        return SPARSE, ""

    def _add_layers(self, counts: Counts, level: str, first: int, end: int) -> None:
        """Queries at positions [first, end) in every layer that this level has sparse."""
        plan, queries = self.plans[level], end - first
        for layer, groups in enumerate(plan.layers):
            if groups is not None:
                counts.tiles[layer] += ceil_div(queries, TILE_TOKENS)
                counts.causal_pairs[layer] += plan.shape.num_heads * _pairs(first, end)

    def most_pairs(self, prompt_tokens: int, level: object) -> int:
        """Causal pairs that a layer can count of a prompt that is computed once, however it is cut."""
        name = self.level(level)
        least = None if name == EXACT else self.thresholds[name].min_tokens
        if least is None or prompt_tokens <= least:
            return 0
        return self.plans[DEFAULT].shape.num_heads * _pairs(least, prompt_tokens)


def _pairs(first: int, end: int) -> int:
    """(query, key) pairs of one head's queries at positions [first, end)."""
    return (end * (end + 1) - first * (first + 1)) // 2


@dataclass(frozen=True)
class Bound:
    """What a counter must lie between, of requests that were sent all at once."""

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
    """``differences``: one line for each counter of each level that is not what follows from what was sent."""

    num_requests: int = 0
    counted: Counts = field(default_factory=Counts)
    cached_tokens: int = 0
    differences: list[str] = field(default_factory=list)


def audit(server: Endpoint, served: Served, prompts: Prompts, levels: Sequence[object], longest: int) -> Audit:
    """Send each level prompts of all kinds, one after the other, and compare the counters before and after.

    ``longest``: of a prompt. The server must be idle, and stay so but for this. Raises RequestError where a request is
    not answered, BenchError where the server has other layers than the plan.
    """
    done = Audit()
    prompts.made += time.time_ns() % (1 << 32)  # so that none is left in the cache by an earlier audit
    before = Look.at(server)
    if (dense := before.report.attention["dense"]) != served.dense_layers():
        raise BenchError(
            f"{server.url}: {dense} layers prefill dense, and its configuration has {served.dense_layers()} such; "
            "expected the settings that it was started with, and a model all of whose layers can go sparse"
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
        for prompt in requests:  # of these, only the last begins like another
            expected.add(served.expected(Sent(len(prompt), AUDIT_TOKENS, level), cached * (prompt is requests[-1])))
        counted = after.counts.since(before.counts)
        done.num_requests += len(requests)
        done.cached_tokens += cached
        done.counted.add(counted)
        done.differences += [f"audit at level {level}: {line}" for line in counted.differences(expected)]
        before = after
    return done


def _prompts(served: Served, level: object, prompts: Prompts, longest: int) -> Iterator[list[int]]:
    """Prompts below ``min_tokens``, past it, of several chunks; at last one that begins like the one before.

    The levels that requests ask for by other names than the plans' have the lengths of the server's own.
    """
    thresholds = served.thresholds.get(served.level(level), served.thresholds[DEFAULT])
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
    """The sum of a metric's samples of exactly that name, such as one of vLLM's own; 0 where there is none."""
    families = text_string_to_metric_families(text)
    return sum(sample.value for family in families for sample in family.samples if sample.name == name)
