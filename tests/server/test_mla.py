# SPDX-License-Identifier: Apache-2.0
"""A server of a small model with multi-head latent attention, through the flag for its prefill backend.

``tests/serving/worker/test_mla_prefill.py`` compares chunks of cached context with a reference, because vLLM's CPU
platform turns chunked prefill and the prefix cache off for such models.
"""

import json
import math
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from tests.helpers import scenario
from tests.helpers.scenario import assert_same
from tests.helpers.servers import Server
from tests.helpers.tiny_models import MLA_CONFIG, make_model
from tests.server.conftest import ENV
from vllm_sparse_backend.config.fallback import Fallback
from vllm_sparse_backend.evaluation.vllm_server import has_cuda
from vllm_sparse_backend.identity import MLA_FLAG

pytestmark = [
    pytest.mark.server,
    pytest.mark.full,
    pytest.mark.skipif(has_cuda(), reason="float32 and vLLM's CPU_MLA backend need a CPU"),
]

# Without chunks on a CPU, rows that begin within min_tokens would all be dense.
SETTINGS = {"method": "top_p", "params": {"kept_mass": 0.4}, "min_tokens": 0, "min_query_tokens": 256}
ARGS = ("--max-model-len", "4096", "--attention-backend", "CPU_MLA", "--enable-prompt-tokens-details")
ARGS += ("--kv-cache-memory-bytes", str(128 << 20))
ARGS += (*MLA_FLAG.split(), "--additional-config", json.dumps({"sparse_prefill": SETTINGS}))


def test_a_server_runs_long_rows_sparse_unless_requests_are_exact(tmp_path: Path) -> None:
    long, short = scenario.prompt(901, seed=1), scenario.prompt(70, seed=2)
    with Server(make_model(tmp_path / "mla", config=MLA_CONFIG), ARGS, env=ENV) as server:
        before = scenario.counted(server)
        assert (before.rows, before.attention) == ({}, {"mla": 2})
        sparse, exact = (scenario.ask(server, long, level=level) for level in (None, 0))
        assert_same(scenario.ask(server, short), scenario.ask(server, short, level=0))
        report = scenario.counted(server, before)
    assert sparse.logprobs != pytest.approx(exact.logprobs, abs=1e-3)
    assert all(map(math.isfinite, sparse.logprobs))
    assert report.rows_of("sparse") == 1
    assert set(report.rows) == {
        ("sparse", ""), ("dense", Fallback.REQUESTED), ("dense", Fallback.SHORT_QUERY), ("decode", ""),
    }  # fmt: skip
    assert set(report.layers) == {0, 1}
    assert all(0.1 < layer.density < 0.95 for layer in report.layers.values())
