# SPDX-License-Identifier: Apache-2.0
"""TTFT of new tokens after a cached prefix, for several settings in turn: the requests of agents and conversations.

    python -m benchmarks.cached_prefix TEXT.txt stock=http://localhost:8000 ours=http://localhost:8001

A setting is NAME=URL or NAME=URL@LEVEL; the first is the baseline, and naming its server twice shows the noise. Every
request has its own new tokens. Settings take turns, and the prefix is sent to each setting before a cell's requests, so
that it is cached.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from benchmarks.options import numbers, run_alone
from benchmarks.traffic import Traffic, compare, show_rows


@dataclass(frozen=True, kw_only=True)
class CachedPrefix(Traffic):
    """Measure median TTFT of new tokens after cached tokens."""

    new: Annotated[str, typer.Option(help="New tokens.")] = "200,500,1000,2000,4000,8000"
    cached: Annotated[str, typer.Option(help="Cached tokens.")] = "8000,16000,30000,60000,100000"
    times: Annotated[int, typer.Option(help="Requests of each cell and setting.", min=2)] = 15

    def run(self) -> None:
        show_rows(self.rows(), self.out)

    def rows(self) -> Iterator[dict[str, Any]]:
        endpoints, texts = self.connect()
        for cached_tokens in numbers(self.cached):
            prefix = texts.take(cached_tokens)
            for new_tokens in numbers(self.new):
                for endpoint in endpoints:
                    endpoint.ask(prefix + texts.take(new_tokens), 1)
                seconds: dict[str, list[list[float]]] = {endpoint.name: [] for endpoint in endpoints}
                for _ in range(self.times):
                    # Each request has its own text: a server that is named twice would find a shared text in its cache.
                    for endpoint in endpoints:
                        answer = endpoint.ask(prefix + texts.take(new_tokens), 1)
                        seconds[endpoint.name].append([answer.first_token_s])
                yield compare({"cached": cached_tokens, "new": new_tokens}, seconds, "p50")


if __name__ == "__main__":
    run_alone(CachedPrefix)
