# SPDX-License-Identifier: Apache-2.0
"""A server under many clients: all lengths and levels, shared prefixes, aborted requests, and a small cache.

Two processes of the server answer. Every request is answered, exact answers equal stock's, counters never fall, and
memory does not grow. Afterwards, known requests run one at a time, and the server's counters must match them.
"""

import random
from pathlib import Path

import pytest

from tests.helpers import scenario, server_levels
from tests.helpers.mixed_load import SERVER_ENV, ask_mixed, resident_bytes_of, wait_until_idle
from tests.helpers.scenario import Servers
from tests.helpers.servers import Server
from vllm_sparse_backend.config.fallback import Fallback
from vllm_sparse_backend.evaluation.client import Endpoint
from vllm_sparse_backend.evaluation.vllm_server import sparse_args

pytestmark = [pytest.mark.server, pytest.mark.full]

LONGEST = 3000


def mixed_prompts(count: int) -> list[list[int]]:
    """Return prompts of all lengths, of which half begin with a part of one of eight prefixes."""
    rng, prompts = random.Random(9), []
    for i in range(count):
        length = round(2 ** rng.uniform(1, 11.5))
        shared = rng.randint(0, length - 1) if i % 2 else 0
        tail = scenario.prompt(length - shared + 1, seed=900 + i)
        prompts.append(scenario.prompt(LONGEST, seed=500 + i % 8)[:shared] + tail[1:])
    return prompts


def test_all_is_answered_memory_stays_and_counters_fit(small_model: Path, tmp_path: Path, servers: Servers) -> None:
    settings = server_levels.write(tmp_path, "high", "fast")
    # A cache of about 12,000 tokens for eight requests of up to 3,000: it has no room for all at once.
    args = (*scenario.SERVER_ARGS, "--kv-cache-memory-bytes", str(48 << 20), "--api-server-count", "2")
    prompts = mixed_prompts(150)
    with Server(small_model, (*sparse_args(settings), *args), env=SERVER_ENV) as server:
        endpoint = Endpoint.connect("sparse", server.url)
        loads = [ask_mixed(server, servers.stock, endpoint, prompts[:60])]
        before = resident_bytes_of(server.pid)
        loads.append(ask_mixed(server, servers.stock, endpoint, prompts[60:]))
        after = resident_bytes_of(server.pid)
        wait_until_idle(server)  # of aborted requests
        report = scenario.counted(server)
        scenario.assert_counts(server, seed=2000)
        pages = [scenario.counted(server) for _ in range(6)]  # each connection gets one of the two
    assert [(load.differing, load.fallen, load.readings > 10) for load in loads] == [([], set(), True)] * 2
    assert after < 1.03 * before
    assert report.by("rows", "path")["sparse"] > 20
    assert report.rows["dense", Fallback.REQUESTED] > 20
    assert not report.by("compilations", "when")["serving"] + report.by("arena_overflows").total()
    assert pages == [pages[0]] * len(pages)
