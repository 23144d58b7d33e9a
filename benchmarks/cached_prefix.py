# SPDX-License-Identifier: Apache-2.0
"""TTFT of new tokens after a cached prefix, for several settings in turn: the requests of agents and conversations.

    python -m benchmarks.cached_prefix PROMPTS.json stock=http://localhost:8000 ours=http://localhost:8001

PROMPTS.json is written by ``benchmarks.trained_models prompts``. A setting is NAME=URL or NAME=URL@LEVEL; the first is
the baseline, and naming its server twice shows the noise. Every request has its own new tokens. Settings take turns,
and the prefix is sent to each setting before a cell's requests, so that it is cached.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, stdev
from typing import Annotated

import typer

from benchmarks.trained_models import endpoint_of
from vllm_sparse_backend.evaluation.client import Endpoint

MEDIAN_ERROR = math.sqrt(math.pi / 2)
"""Standard error of a median divided by that of a mean, for normal samples."""


@dataclass(frozen=True)
class Cell:
    """TTFT of one setting at one number of new and cached tokens."""

    setting: str
    new_tokens: int
    cached_tokens: int
    seconds: float
    """Median TTFT."""
    ratio: float
    """The baseline's median TTFT divided by this one's."""
    ratio_error: float

    @staticmethod
    def of(setting: str, new_tokens: int, cached_tokens: int, seconds: list[float], baseline: list[float]) -> "Cell":
        ratio = median(baseline) / median(seconds)
        errors = [MEDIAN_ERROR * stdev(x) / median(x) / math.sqrt(len(x)) for x in (seconds, baseline)]
        return Cell(setting, new_tokens, cached_tokens, median(seconds), ratio, ratio * math.hypot(*errors))


class Texts:
    """Pieces of the prompts' tokens. No two start at the same place."""

    def __init__(self, path: Path) -> None:
        self.ids = [token for prompt in json.loads(path.read_text()) for token in prompt["ids"]]
        self.start = 0

    def take(self, tokens: int) -> list[int]:
        self.start = (self.start + 100_003) % (len(self.ids) - tokens)
        return self.ids[self.start : self.start + tokens]


def measure(
    endpoints: Sequence[Endpoint], texts: Texts, new: Sequence[int], cached: Sequence[int], times: int
) -> Iterator[Cell]:
    for cached_tokens in cached:
        prefix = texts.take(cached_tokens)
        for new_tokens in new:
            for endpoint in endpoints:
                endpoint.ask(prefix + texts.take(new_tokens), 1)
            seconds: dict[str, list[float]] = {endpoint.name: [] for endpoint in endpoints}
            for _ in range(times):
                tail = texts.take(new_tokens)
                for endpoint in endpoints:
                    seconds[endpoint.name].append(endpoint.ask(prefix + tail, 1).first_token_s)
            baseline = seconds[endpoints[0].name]
            for endpoint in endpoints:
                yield Cell.of(endpoint.name, new_tokens, cached_tokens, seconds[endpoint.name], baseline)


def main(
    prompts: Path,
    settings: Annotated[list[str], typer.Argument(metavar="NAME=URL[@LEVEL]...")],
    new: Annotated[str, typer.Option(help="New tokens.")] = "200,500,1000,2000,4000,8000",
    cached: Annotated[str, typer.Option(help="Cached tokens.")] = "8000,16000,30000,60000,100000",
    times: Annotated[int, typer.Option(help="Requests of each cell and setting.", min=2)] = 15,
    out: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Measure median TTFT of new tokens after cached tokens."""
    endpoints = [endpoint_of(text) for text in settings]
    cells = []
    new_tokens, cached_tokens = ([int(number) for number in text.split(",")] for text in (new, cached))
    for cell in measure(endpoints, Texts(prompts), new_tokens, cached_tokens, times):
        cells.append(cell)
        print(
            f"{cell.cached_tokens:>7} + {cell.new_tokens:<6} {cell.setting:10} {1000 * cell.seconds:8.1f} ms  "
            f"{cell.ratio:.3f} ± {cell.ratio_error:.3f}",
            flush=True,
        )
    if out:
        out.write_text(json.dumps([asdict(cell) for cell in cells]))


if __name__ == "__main__":
    typer.run(main)
