# SPDX-License-Identifier: Apache-2.0
"""A server under many clients: all lengths and levels, shared prefixes, aborted requests, and a small cache.

It runs for at least a minute; SOAK_S=600 in the environment, or ``python -m benchmarks.soak``, runs it for longer. Two
processes of the server answer. Afterwards, known requests run one at a time, and the server's counters must match them.
Then sixty more run, and the exact answers must equal stock's.
"""

import os
from pathlib import Path

import pytest

from benchmarks.counters import wait_until_idle
from benchmarks.soak import SERVER_ENV, Asking, lines, resident_bytes_of, served_by, soak_and_check
from tests.helpers import scenario, server_levels
from tests.helpers.mixed_load import ask_mixed
from tests.helpers.scenario import Servers
from vllm_sparse_backend.config.fallback import Fallback
from vllm_sparse_backend.evaluation.client import Endpoint, Prompts
from vllm_sparse_backend.evaluation.vllm_server import Server, sparse_args

pytestmark = [pytest.mark.server, pytest.mark.full]

SECONDS = float(os.environ.get("SOAK_S", "60"))
LEAST_REQUESTS = 150
"""The load goes on until there are this many, so that a slow machine sends all kinds too."""
SIXTY = [
    scenario.prompt(700, seed=500 + i // 3) + scenario.prompt(40 + 37 * i % 600, seed=900 + i)[1:] for i in range(60)
]
"""Three prompts each share a beginning."""


def test_all_is_answered_memory_stays_and_counters_fit(small_model: Path, tmp_path: Path, servers: Servers) -> None:
    settings = server_levels.write(tmp_path, "high", "fast")
    # A cache of about 12,000 tokens for eight requests of up to 3,000: it has no room for all at once.
    args = (*scenario.SERVER_ARGS, "--kv-cache-memory-bytes", str(48 << 20), "--api-server-count", "2")
    with Server(small_model, (*sparse_args(settings), *args), env=SERVER_ENV) as server:
        endpoint = Endpoint.connect("sparse", server.url)
        prompts = Prompts(scenario.prompt(8000, seed=9))
        levels = (None, 0, 1, "fast")
        asking = Asking(SECONDS, 8, 3000, levels, abort_share=0.2, least_requests=LEAST_REQUESTS)
        served = served_by(endpoint, settings, small_model, scenario.CHUNK_TOKENS)
        done = soak_and_check(endpoint, asking, prompts, lambda: resident_bytes_of(server.pid), served)
        load = ask_mixed(server, servers.stock, endpoint, SIXTY)
        wait_until_idle(endpoint)  # of aborted requests
        pages = [scenario.counted(server) for _ in range(6)]  # each connection gets one of the two
    print(*lines(asking, done), load, sep="\n")
    assert done.problems == []
    assert pages == [pages[0]] * len(pages)
    assert (load.differing, load.fallen, load.exact, load.readings > 10) == ([], set(), 24, True)
    outcome, report, audit = done.outcome, done.after.report, done.audit
    assert set(outcome.requests_by_level) == {"None", "0", "1", "fast"}
    assert outcome.num_aborted > 5
    assert report.rows_of("sparse") > 20
    assert report.rows["dense", Fallback.REQUESTED] > 20
    assert outcome.growth(SECONDS) is not None
    # The audit has all kinds of rows, and cached tokens. A level leaves a layer dense, so its pairs differ.
    assert audit is not None
    kinds = {kind[1:] for kind in audit.counted if kind[0] == "rows"}
    reasons = {("dense", reason) for reason in (Fallback.REQUESTED, Fallback.TOO_SHORT)}
    assert {("sparse", ""), ("decode", ""), *reasons} <= kinds
    assert audit.cached_tokens > 1000
    assert audit.counted["pairs", "0"] > audit.counted["pairs", "1"] > 0
