# SPDX-License-Identifier: Apache-2.0
"""TTFT of new tokens after a cached prefix, for several settings in turn: the requests of agents and conversations.

    python -m benchmarks.cached_prefix TEXT.txt stock=http://localhost:8000 ours=http://localhost:8001

A setting is NAME=URL or NAME=URL@LEVEL; the first is the baseline, and naming its server twice shows the noise. Every
request has its own new tokens. Settings take turns, and the prefix is sent to each setting before a cell's requests, so
that it is cached.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.options import Json, numbers
from benchmarks.traffic import Settings, compare, endpoint_of, show_rows, texts_of
from vllm_sparse_backend.evaluation.client import Endpoint, Prompts


def measure(
    endpoints: Sequence[Endpoint], texts: Prompts, new: Sequence[int], cached: Sequence[int], times: int
) -> Iterator[dict[str, Any]]:
    for cached_tokens in cached:
        prefix = texts.take(cached_tokens)
        for new_tokens in new:
            for endpoint in endpoints:
                endpoint.ask(prefix + texts.take(new_tokens), 1)
            seconds: dict[str, list[list[float]]] = {endpoint.name: [] for endpoint in endpoints}
            for _ in range(times):
                # Each request has its own text: a server that is named twice would find a shared text in its cache.
                for endpoint in endpoints:
                    answer = endpoint.ask(prefix + texts.take(new_tokens), 1)
                    seconds[endpoint.name].append([answer.first_token_s])
            yield compare({"cached": cached_tokens, "new": new_tokens}, seconds, "p50")


def main(
    text: Path,
    settings: Settings,
    new: Annotated[str, typer.Option(help="New tokens.")] = "200,500,1000,2000,4000,8000",
    cached: Annotated[str, typer.Option(help="Cached tokens.")] = "8000,16000,30000,60000,100000",
    times: Annotated[int, typer.Option(help="Requests of each cell and setting.", min=2)] = 15,
    out: Json = None,
) -> None:
    """Measure median TTFT of new tokens after cached tokens."""
    endpoints = [endpoint_of(setting) for setting in settings]
    show_rows(measure(endpoints, texts_of(text, endpoints[0]), numbers(new), numbers(cached), times), out)


if __name__ == "__main__":
    typer.run(main)
