# SPDX-License-Identifier: Apache-2.0
"""A server under many clients: all lengths and levels, shared prefixes, requests that are broken off, little cache.

A minute here; SOAK_S=600 in the environment, or ``sparse-prefill bench soak``, goes on for longer.
"""

import os
from pathlib import Path

import pytest

from tests.server import scenario
from vllm_sparse_backend.bench.endpoint import Endpoint, Prompts
from vllm_sparse_backend.bench.soak import MOST_GROWTH, Asking, soak
from vllm_sparse_backend.demo.scrape import parse
from vllm_sparse_backend.demo.server import Server, sparse_args
from vllm_sparse_backend.settings.reasons import Fallback

pytestmark = pytest.mark.server

SECONDS = float(os.environ.get("SOAK_S", "60"))
SPARSE = {"profile": str(Path(__file__).with_name("levels.yaml")), "guard": {"rate": 1.0, "bound": 1e6}}


def test_all_is_answered_and_memory_stays(small_model: Path) -> None:
    # A cache of some 12,000 tokens for eight requests of up to 3,000: blocks run out, and requests are preempted.
    args = (*scenario.SERVER_ARGS, "--kv-cache-memory-bytes", str(24 << 20))
    with Server(small_model, (*sparse_args(SPARSE), *args)) as server:
        endpoint = Endpoint.connect("sparse", server.url)
        prompts = Prompts(scenario.prompt(8000, seed=9))
        asking = Asking(SECONDS, clients=8, shortest=1, longest=3000, levels=(None, 0, 1, "fast"), abort_share=0.2)
        outcome = soak(endpoint, asking, prompts, server.resident_bytes)
        report = parse(server.get("/metrics"))
    assert outcome.errors == []
    assert set(outcome.asked) == {"None", "0", "1", "fast"}
    assert outcome.num_requests > 50
    assert outcome.broken_off > 5
    assert report.rows_of("sparse") > 20
    assert report.rows["dense", Fallback.REQUESTED] > 20
    if SECONDS >= 300:  # less is mostly what a server takes in its first minutes
        assert (growth := outcome.growth(SECONDS)) is not None
        assert growth <= MOST_GROWTH
