# SPDX-License-Identifier: Apache-2.0
"""The counts that known requests must give, if they come one at a time.

They follow from the configuration and the causal mask: how the scheduler cuts a prompt into chunks, how each chunk runs
and why, and its pairs (``docs/metrics.md``).
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tests.helpers import scenario
from tests.helpers.servers import Server
from vllm_sparse_backend.config.crossover_table import Lengths
from vllm_sparse_backend.config.fallback import Fallback
from vllm_sparse_backend.config.keys import KEY
from vllm_sparse_backend.config.model_shape import ModelShape
from vllm_sparse_backend.config.plan import Plan
from vllm_sparse_backend.config.profile import EXACT, ON
from vllm_sparse_backend.config.request_levels import FIELD, LevelPolicy
from vllm_sparse_backend.config.resolved import Resolved
from vllm_sparse_backend.evaluation.metrics_scrape import parse_metrics

ANSWER_TOKENS = 3

Counts = Counter[tuple[str, ...]]
"""Rows by ("rows", path, reason), and pairs over all heads by ("pairs", layer)."""


class Reading(NamedTuple):
    counts: Counts
    cached_tokens: int


def read_counts(server: Server) -> Reading:
    page = scenario.fresh_page(server)
    report = parse_metrics(page)
    counts: Counts = Counter({("rows", *kind): rows for kind, rows in report.rows.items()})
    counts.update({("pairs", str(layer)): pairs.causal for layer, pairs in report.layers.items()})
    hits = re.findall(r"(?m)^vllm:prefix_cache_hits_total{.*} (\S+)$", page)
    return Reading(counts, int(sum(map(float, hits))))


@dataclass(frozen=True)
class Served:
    """The settings of a server on which its counters depend. Its lengths are numbers, not ``auto``."""

    plans: Mapping[str, Plan]
    lengths: Mapping[str, Lengths]
    chunk_tokens: int

    @staticmethod
    def of(settings: Mapping[str, Any], model: Path, chunk_tokens: int) -> "Served":
        resolved = Resolved.from_additional_config({KEY: settings}, ModelShape.from_folder(model), None, "CPU")
        return Served(
            resolved.plans, {level: resolved.lengths(level, ["portable"]) for level in resolved.plans}, chunk_tokens
        )

    def level(self, level: object) -> str:
        """Return the name of a request's level; ``level`` is the value in the request."""
        plan = self.plans[ON]
        return LevelPolicy(plan.level_names, plan.level).level_of({} if level is None else {FIELD: level}).name

    def expected(self, prompt_tokens: int, level: str, cached_tokens: int) -> Counts:
        """Return the counts of a request that runs alone, whose first ``cached_tokens`` are in the prefix cache."""
        counts: Counts = Counter({("rows", "decode", ""): ANSWER_TOKENS - 1})
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
        if level == EXACT:
            return "dense", Fallback.REQUESTED.value
        reason = self.lengths[level].dense_reason(end - start, end)
        return ("sparse", "") if reason is None else ("dense", reason.value)

    def prompts(self, seed: int) -> Iterator[list[int]]:
        """Yield a prompt below ``min_tokens``, a longer prompt, and two prompts of several chunks that begin alike."""
        least = self.lengths[ON].min_tokens
        for length in (least // 2, least + 205):
            yield scenario.prompt(length, seed + length)
        last = scenario.prompt(2 * self.chunk_tokens + 77, seed)
        yield last
        yield last[:-205] + scenario.prompt(206, seed + 1)[1:]


def audit(server: Server, served: Served, value: object, seed: int) -> tuple[Reading, Counts]:
    """Send prompts of all kinds at a level, one at a time; return what the server counted, and what it must count."""
    level, before, expected = served.level(value), read_counts(server), Counter[tuple[str, ...]]()
    prompts = list(served.prompts(seed))
    for prompt in prompts:
        scenario.ask(server, prompt, ANSWER_TOKENS, value)
    after = read_counts(server)
    cached_tokens = after.cached_tokens - before.cached_tokens
    for prompt in prompts:  # only the last prompt has a prefix in common with another
        expected.update(served.expected(len(prompt), level, cached_tokens * (prompt is prompts[-1])))
    return Reading(after.counts - before.counts, cached_tokens), expected
