# SPDX-License-Identifier: Apache-2.0
"""Sleep mode on a GPU: a sparse server gives the same answers after waking."""

import urllib.request
from pathlib import Path

import pytest

from tests.helpers import scenario
from tests.helpers.servers import Server
from vllm_sparse_backend.evaluation.vllm_server import sparse_args

pytestmark = [pytest.mark.server, pytest.mark.gpu]
pytest.importorskip("vllm")

PARAMS = {"vertical_tokens": 64, "slash_tokens": 104}
SETTINGS = {"method": "vertical_slash", "params": PARAMS, "min_tokens": 256, "min_query_tokens": 1}


def tell(server: Server, path: str) -> None:
    """Send a POST request without a body, to vLLM's routes for developers."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(urllib.request.Request(server.url + path, method="POST"), timeout=scenario.DEADLINE_S) as response:
        assert response.status == 200


def test_the_same_answer_after_waking(small_model: Path) -> None:
    args = (*sparse_args(SETTINGS), *scenario.SERVER_ARGS, "--enable-sleep-mode", "--dtype", "bfloat16")
    args += ("--gpu-memory-utilization", "0.1", "--kv-cache-memory-bytes", str(1 << 28))
    with Server(small_model, args, env={"VLLM_SERVER_DEV_MODE": "1"}) as server:
        prompt = scenario.prompt(3001, seed=1)
        before = scenario.ask(server, prompt)
        for _ in range(2):
            tell(server, "/sleep?level=1")
            tell(server, "/wake_up")
            after = scenario.ask(server, prompt)
            assert after.cached_tokens == 0  # the cache is empty, so this request prefills again
            assert after == before
