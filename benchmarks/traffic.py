# SPDX-License-Identifier: Apache-2.0
"""Shared by the programs for traffic: servers, texts of requests, reads of the prefix cache, ratios with errors."""

import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import stdev
from typing import Annotated, Any

import numpy as np
import typer
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.options import Json, show
from vllm_sparse_backend.cli.common import levels_of
from vllm_sparse_backend.evaluation.client import Endpoint, Prompts
from vllm_sparse_backend.evaluation.report import BenchError
from vllm_sparse_backend.prompts.texts import read_prompt_text

RESAMPLES = 1000
CACHE_TOLERANCE = 0.05
"""Difference from the expected share of cached tokens: blocks at the end of a prefix are not whole."""

Settings = Annotated[list[str], typer.Argument(metavar="NAME=URL[@LEVEL]...")]
Statistic = Callable[[Sequence[float]], float]
STATISTICS: Mapping[str, Statistic] = {
    "sum": lambda seconds: float(np.sum(seconds)),
    "p50": lambda seconds: float(np.percentile(seconds, 50)),
    "p99": lambda seconds: float(np.percentile(seconds, 99)),
}


def endpoint_of(text: str) -> Endpoint:
    """Connect to the server of a setting, at its level."""
    name, equals, where = text.partition("=")
    url, _, level = where.partition("@")
    if not equals:
        raise BenchError(f"given {text!r}, expected NAME=http://HOST:PORT or NAME=http://HOST:PORT@LEVEL")
    endpoint = Endpoint.connect(name, url)
    return endpoint.at_level(*levels_of([level])) if level else endpoint


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Options of programs that send stretches of a text to the servers of several settings."""

    text: Path
    settings: Settings
    seed: Annotated[int, typer.Option(help="Other seeds give other prompts.")] = 0
    out: Json = None

    def connect(self) -> tuple[list[Endpoint], Prompts]:
        """Connect to all servers, and tokenize the text with the first server's tokenizer."""
        endpoints = [endpoint_of(setting) for setting in self.settings]
        prompts = Prompts.of(endpoints[0], read_prompt_text(self.text))
        prompts.made = 100_000 * self.seed
        return endpoints, prompts


@dataclass(frozen=True)
class CacheReads:
    """Tokens of prompts, and how many of them a server read from its prefix cache, since it started."""

    cached: float
    total: float

    @staticmethod
    def of(endpoint: Endpoint) -> "CacheReads":
        samples = [x for family in text_string_to_metric_families(endpoint.metrics()) for x in family.samples]
        names = ("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total")
        return CacheReads(*(sum(x.value for x in samples if x.name == name) for name in names))

    def require(self, endpoint: Endpoint, requests: Iterable[tuple[int, int]]) -> None:
        """Raise BenchError if the tokens that were cached since this reading are not as expected.

        ``requests`` has each request's number of tokens, and how many of them an earlier request has too. A server that
        has seen the texts before reads more, and a server whose cache is too small reads less.
        """
        tokens, cached = map(sum, zip(*requests, strict=True))
        now = CacheReads.of(endpoint)
        if now.total == self.total:
            raise BenchError(f"{endpoint.name}: {endpoint.url}/metrics counts no reads of a prefix cache; turn it on")
        share = (now.cached - self.cached) / (now.total - self.total)
        if abs(share - cached / tokens) > CACHE_TOLERANCE:
            remedy = "use another --seed" if share > cached / tokens else "give the server a larger cache"
            raise BenchError(
                f"{endpoint.name}: {share:.1%} of the prompts' tokens came from the prefix cache, expected "
                f"{cached / tokens:.1%}; {remedy}"
            )


def ratio_with_error(
    baseline: Sequence[Sequence[float]], values: Sequence[Sequence[float]], statistic: Statistic
) -> tuple[float, float | None]:
    """Return the statistic of the baseline ÷ that of the values, and its standard error, if there are two units.

    Both have the same units (sessions, or time windows) in the same order. The error is from a bootstrap over units,
    which are drawn for both together.
    """

    def ratio(units: Sequence[int]) -> float:
        above, below = ([second for unit in units for second in samples[unit]] for samples in (baseline, values))
        return statistic(above) / statistic(below)

    units, rng = range(len(baseline)), random.Random(0)
    resampled = [ratio(rng.choices(units, k=len(units))) for _ in range(RESAMPLES)]
    return ratio(units), stdev(resampled) if len(units) > 1 else None


def compare(
    about: Mapping[str, Any], samples: Mapping[str, Sequence[Sequence[float]]], statistic: str
) -> dict[str, Any]:
    """Return a table's row: the statistic of each setting in seconds, and the first setting's ÷ each other's."""
    first, *others = samples
    row = {**about, "statistic": statistic}
    for name, units in samples.items():
        row[name] = STATISTICS[statistic]([second for unit in units for second in unit])
    for name in others:
        ratio = ratio_with_error(samples[first], samples[name], STATISTICS[statistic])
        row[f"{first} ÷ {name}"], row[f"± {name}"] = ratio
    return row


def show_rows(rows: Iterable[dict[str, Any]], out: Path | None, **more: Any) -> None:
    """Print rows, and write them and ``more`` as JSON."""
    shown = show("", rows)
    if not shown:
        raise BenchError("nothing was measured within the --budget, expected some results; raise it")
    if out:
        out.write_text(json.dumps({"rows": shown, **more}))
