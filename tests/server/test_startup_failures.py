# SPDX-License-Identifier: Apache-2.0
"""A wrong configuration: the server does not start, and its last line says what was given, what expected, and where."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from benchmarks.tiny import CONFIG
from vllm_sparse_backend.measure.server import Server, ServerError, sparse_args

pytestmark = [pytest.mark.server, pytest.mark.full]
pytest.importorskip("vllm")

OTHER_MODEL = """\
format: 1
model: {architecture: LlamaForCausalLM, num_layers: 32, num_heads: 32, num_kv_heads: 8, head_dim: 128}
default: {method: vertical_slash}
"""
# By name: the settings ({dir} is the test's folder), and what the last line must contain. (What else can be wrong,
# tests/test_config.py and tests/test_profile.py have, without a server.)
CASES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "wrong method": (
        {"method": "vertical-slash"},
        ["--additional-config sparse_prefill.method", "given 'vertical-slash'", "expected one of", "'vertical_slash'?"],
    ),
    "profile of another model": (
        {"profile": "{dir}/other.yaml"},
        ["other.yaml", "32 layers", f"{CONFIG['num_hidden_layers']} layers", "num_layers"],
    ),
}


@pytest.fixture(scope="module")
def logs(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of all cases at a time: most of each is vLLM's own import."""
    folder = tmp_path_factory.mktemp("failures")
    (folder / "other.yaml").write_text(OTHER_MODEL)

    def refused(name: str) -> str:
        settings = json.loads(json.dumps(CASES[name][0]).replace("{dir}", str(folder)))
        log = folder / f"{name}.log"
        with (
            pytest.raises(ServerError, match=r"exited with code [^0]"),
            Server(small_model, sparse_args(settings), log_path=log, ready_timeout_s=240),
        ):
            pass
        return log.read_text(errors="replace")

    with ThreadPoolExecutor(len(CASES)) as pool:
        return dict(zip(CASES, pool.map(refused, CASES), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_the_server_does_not_start_and_says_why_at_last(logs: dict[str, str], name: str) -> None:
    """Before a model loads."""
    last = logs[name].rstrip().splitlines()[-1]
    for part in CASES[name][1]:
        assert part in last, logs[name][-3000:]
    assert "Loading weights took" not in logs[name]
    assert "Starting to load model" not in logs[name]
