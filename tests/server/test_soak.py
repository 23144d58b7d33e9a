# SPDX-License-Identifier: Apache-2.0
"""A server under many clients: all lengths and levels, shared prefixes, requests that are broken off, little cache.

A minute here; SOAK_S=600 in the environment, or ``python -m benchmarks.soak``, goes on for longer.
Two processes of the server answer. After it, known requests come one at a time, and the server's counters have to be
what follows from these; then sixty more while the switch is thrown, of which the exact ones must equal stock's.
"""

import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from threading import Event
from typing import NamedTuple

import pytest

from benchmarks.soak import SERVER_ENV, Asking, growth, lines, resident_bytes_of, served_by, soak_and_check
from tests.helpers import scenario, server_levels
from tests.helpers.scenario import Servers
from vllm_sparse_backend.cli import switch
from vllm_sparse_backend.config.fallback import Fallback
from vllm_sparse_backend.evaluation.client import Endpoint, Prompts
from vllm_sparse_backend.evaluation.vllm_server import Server, sparse_args
from vllm_sparse_kernels.rows import ceil_div

pytestmark = [pytest.mark.server, pytest.mark.full]

SECONDS = float(os.environ.get("SOAK_S", "60"))
SIXTY = [
    scenario.prompt(700, seed=500 + i // 3) + scenario.prompt(40 + 37 * i % 600, seed=900 + i)[1:] for i in range(60)
]
"""Beginnings are shared by threes."""


class Load(NamedTuple):
    """What requests of eight clients came to."""

    differing: list[int]
    """Of the exact ones that were not broken off: those that stock answers otherwise."""
    fallen: set[str]
    """Counters that some reading had lower than an earlier one."""
    exact: int
    readings: int


def under_the_switch(server: Server, stock: Server, endpoint: Endpoint, prompts: Sequence[list[int]]) -> Load:
    """Half of the prompts exact, a tenth broken off; the switch thrown four times; counters read."""
    exact = [i for i in range(len(prompts)) if i % 2 == 0 and i % 10 != 4]
    over, readings = Event(), []

    def send(i: int) -> scenario.Answer | None:
        if i % 10 == 4:
            endpoint.ask(prompts[i], 8, stop_after=1, vllm_xargs={"sparse_prefill": 0})
            return None
        return scenario.ask(server, prompts[i], level=0 if i % 2 == 0 else (None, "fast")[i % 4 == 1])

    def read() -> None:
        while not over.wait(0.2):
            readings.append(counters(server.get("/metrics")))

    with ThreadPoolExecutor(9) as pool:  # eight clients, and who reads
        reading = pool.submit(read)
        answers = []
        for i, to in zip(range(0, len(prompts), ceil_div(len(prompts), 4)), (*switch.To, *switch.To)):
            switch.ask(server.url, to)
            answers += pool.map(send, range(len(prompts))[i : i + ceil_div(len(prompts), 4)])
        over.set()
        reading.result()
        expected = dict(zip(exact, pool.map(lambda i: scenario.ask(stock, prompts[i]), exact)))
    fallen = {
        name
        for earlier, later in pairwise(readings)
        for name in earlier
        if later.get(name, earlier[name]) < earlier[name]
    }
    differing = [i for i, answer in expected.items() if answers[i].token_ids != answer.token_ids]
    return Load(differing, fallen, len(exact), len(readings))


def counters(page: str) -> dict[str, float]:
    return {name: float(value) for name, value in re.findall(r"(?m)^(sparse_prefill_\w+_total{.*}) (\S+)$", page)}


def test_all_is_answered_memory_stays_and_counters_fit(small_model: Path, tmp_path: Path, servers: Servers) -> None:
    settings = server_levels.write(tmp_path, "high", "fast")
    # A cache of some 12,000 tokens for eight requests of up to 3,000: not all have room at a time.
    args = (*scenario.SERVER_ARGS, "--kv-cache-memory-bytes", str(48 << 20), "--api-server-count", "2")
    with Server(small_model, (*sparse_args(settings), *args), env=SERVER_ENV) as server:
        endpoint = Endpoint.connect("sparse", server.url)
        prompts = Prompts(scenario.prompt(8000, seed=9))
        asking = Asking(SECONDS, clients=8, shortest=1, longest=3000, levels=(None, 0, 1, "fast"), abort_share=0.2)
        served = served_by(endpoint, settings, small_model, scenario.CHUNK_TOKENS)
        done = soak_and_check(endpoint, asking, prompts, lambda: resident_bytes_of(server.pid), served)
        load = under_the_switch(server, servers.stock, endpoint, SIXTY)
        pages = [scenario.counted(server) for _ in range(6)]  # each connection gets one of the two
    print(*lines(asking, done), load, sep="\n")
    assert done.problems == []
    assert pages == [pages[0]] * len(pages)
    assert (load.differing, load.fallen, load.exact, load.readings > 10) == ([], set(), 24, True)
    outcome, report = done.outcome, done.after.report
    assert set(outcome.requests_by_level) == {"None", "0", "1", "fast"}
    assert outcome.num_requests > 50
    assert outcome.broken_off > 5
    assert report.rows_of("sparse") > 20
    assert report.rows["dense", Fallback.REQUESTED] > 20
    assert report.by("guard_checks").total() > 0
    assert (growth(outcome.resident_bytes, SECONDS) is not None, outcome.device_bytes) == (True, [])
    assert len(done.bounds) == 4
    # Of the audit, all kinds of rows, and what was cached; one layer has tiles of its own, as a level leaves it dense.
    audit = done.audit
    assert audit is not None
    assert {path for path, _ in audit.counted.rows} == {"sparse", "dense", "decode"}
    assert {Fallback.REQUESTED, Fallback.TOO_SHORT} <= {reason for _, reason in audit.counted.rows}
    assert audit.cached_tokens > 1000
    assert audit.counted.tiles[0] > audit.counted.tiles[1] > 0
