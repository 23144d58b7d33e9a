# SPDX-License-Identifier: Apache-2.0
"""Streaming heads of the bundled model: found by a server at its start, and run."""

import re
from pathlib import Path

import pytest
import torch

from tests.helpers import scenario
from tests.helpers.servers import Server
from vllm_sparse_backend.demo.model import BUNDLED
from vllm_sparse_backend.evaluation.vllm_server import sparse_args

pytestmark = [
    pytest.mark.server,
    pytest.mark.full,
    pytest.mark.skipif(torch.cuda.is_available(), reason="compares kept pairs of the references"),
]
pytest.importorskip("vllm")

PROMPT_TOKENS = 9000  # a whole step, and one after it
SETTINGS = {"streaming_heads": True, "min_tokens": 256, "min_query_tokens": 1}
ARGS = (
    *("--max-model-len", "16384", "--max-num-batched-tokens", "8192"),
    *("--enforce-eager", "--kv-cache-memory-bytes", str(256 << 20)),
)
LINE = r"sparse-prefill: (\d+) of 20 heads are streaming heads \(fingerprint \w{12}, measured in"


def density(server: Server, level: str | float) -> float | None:
    """Ask a prompt of several chunks at a level, and return its density."""
    before = scenario.counted(server)
    body = {"model": server.model, "prompt": scenario.prompt(PROMPT_TOKENS, seed=7001), "max_tokens": 4}
    server.post("/v1/completions", body | {"temperature": 0, "vllm_xargs": {"sparse_prefill": level}})
    return scenario.counted(server, before).pairs.density


def test_heads_are_found_and_keep_their_window(tmp_path: Path) -> None:
    """A request that sets the default's p scores the keys of all heads; the others keep a window."""
    log_path = tmp_path / "log"
    with Server(BUNDLED, (*sparse_args(SETTINGS), *ARGS), log_path=log_path) as server:
        by_window, by_score = (density(server, level) for level in ("on", 0.9))
    match = re.search(LINE, log_path.read_text())
    assert match, log_path.read_text()[-3000:]
    assert 0 < int(match[1]) < 20
    assert by_window is not None
    assert by_score is not None
    assert 0 < by_window < 1
    assert 0 < by_score < 1
    assert by_window != by_score
