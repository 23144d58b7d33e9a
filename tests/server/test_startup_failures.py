# SPDX-License-Identifier: Apache-2.0
"""A wrong configuration: the server does not start, and its last line says what was given, what expected, and where."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from vllm_sparse_backend.demo.model import CONFIG
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


class Outcome:
    def __init__(self, model: Path, settings: dict[str, Any], log_path: Path) -> None:
        self.error: ServerError | None = None
        try:
            with Server(model, sparse_args(settings), log_path=log_path, ready_timeout_s=240):
                pass
        except ServerError as error:
            self.error = error
        self.log = log_path.read_text(errors="replace")


@pytest.fixture(scope="module")
def outcomes(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """All cases at a time: most of each is vLLM's own import."""
    folder = tmp_path_factory.mktemp("failures")
    (folder / "other.yaml").write_text(OTHER_MODEL)

    def outcome(name: str) -> Outcome:
        settings = json.loads(json.dumps(CASES[name][0]).replace("{dir}", str(folder)))
        return Outcome(small_model, settings, folder / f"{name}.log")

    with ThreadPoolExecutor(len(CASES)) as pool:
        return dict(zip(CASES, pool.map(outcome, CASES), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_the_server_does_not_start_and_says_why_at_last(outcomes: dict[str, Outcome], name: str) -> None:
    outcome = outcomes[name]
    assert outcome.error is not None
    assert "exited with code" in str(outcome.error)
    assert "exited with code 0" not in str(outcome.error)
    last = outcome.log.rstrip().splitlines()[-1]
    for part in CASES[name][1]:
        assert part in last, outcome.log[-3000:]


@pytest.mark.parametrize("name", CASES)
def test_it_fails_before_a_model_loads(outcomes: dict[str, Outcome], name: str) -> None:
    assert "Loading weights took" not in outcomes[name].log
    assert "Starting to load model" not in outcomes[name].log
