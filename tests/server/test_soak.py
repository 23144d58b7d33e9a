# SPDX-License-Identifier: Apache-2.0
"""A server under many clients: all lengths and levels, shared prefixes, requests that are broken off, little cache.

A minute here; SOAK_S=600 in the environment, or ``python -m benchmarks.soak``, goes on for longer.
Two processes of the server answer. After it, known requests come one at a time, and the server's counters have to be
what follows from these.
"""

import os
from pathlib import Path

import pytest

from benchmarks.figures import Report
from benchmarks.soak import SERVER_ENV, Asking, add_figures, growth, lines, resident_bytes_of, served_by, soak_and_check
from tests.server import levels, scenario
from vllm_sparse_backend.measure.client import Endpoint, Prompts
from vllm_sparse_backend.measure.server import Server, sparse_args
from vllm_sparse_backend.settings.reasons import Fallback

pytestmark = [pytest.mark.server, pytest.mark.full]

SECONDS = float(os.environ.get("SOAK_S", "60"))


def test_all_is_answered_memory_stays_and_counters_fit(small_model: Path, tmp_path: Path) -> None:
    settings = levels.write(tmp_path, "high", "fast")
    # A cache of some 12,000 tokens for eight requests of up to 3,000: not all have room at a time.
    args = (*scenario.SERVER_ARGS, "--kv-cache-memory-bytes", str(48 << 20), "--api-server-count", "2")
    with Server(small_model, (*sparse_args(settings), *args), env=SERVER_ENV) as server:
        endpoint = Endpoint.connect("sparse", server.url)
        prompts = Prompts(scenario.prompt(8000, seed=9))
        asking = Asking(SECONDS, clients=8, shortest=1, longest=3000, levels=(None, 0, 1, "fast"), abort_share=0.2)
        served = served_by(endpoint, settings, small_model, scenario.CHUNK_TOKENS)
        done = soak_and_check(endpoint, asking, prompts, lambda: resident_bytes_of(server.pid), served)
        pages = [scenario.counted(server) for _ in range(6)]  # each connection gets one of the two
    print(*lines(asking, done), sep="\n")
    assert done.problems == []
    assert pages == [pages[0]] * len(pages)
    outcome, report = done.outcome, done.after.report
    assert set(outcome.asked) == {"None", "0", "1", "fast"}
    assert outcome.num_requests > 50
    assert outcome.broken_off > 5
    assert report.rows_of("sparse") > 20
    assert report.rows["dense", Fallback.REQUESTED] > 20
    assert report.guard_checks > 0
    assert (growth(outcome.resident_bytes, SECONDS) is not None, outcome.device_bytes) == (True, [])
    assert len(done.bounds) == 4
    # Of the audit, all kinds of rows, and what was cached; one layer has tiles of its own, as a level leaves it dense.
    audit = done.audit
    assert audit is not None
    assert {path for path, _ in audit.counted.rows} == {"sparse", "dense", "decode"}
    assert {Fallback.REQUESTED, Fallback.TOO_SHORT} <= {reason for _, reason in audit.counted.rows}
    assert audit.cached_tokens > 1000
    assert audit.counted.tiles[0] > audit.counted.tiles[1] > 0
    figures = Report("soak", "here")
    add_figures(figures, asking, done)
    held = {name: figure["bar"] for name, figure in figures.figures.items() if figure["bar"] is not None}
    assert len(held) >= 5
    assert all(figures.figures[name]["value"] <= bar for name, bar in held.items())
