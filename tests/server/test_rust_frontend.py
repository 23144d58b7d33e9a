# SPDX-License-Identifier: Apache-2.0
"""A server of vLLM's front end in Rust. vLLM's GPU wheels have its binary, ``vllm/vllm-rs``; the CPU build does not.

To run it on a CPU, unpack the binary of the same release, and set VLLM_RUST_FRONTEND_PATH to it.
"""

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.helpers import scenario, server_levels
from tests.helpers.scenario import Servers
from vllm_sparse_backend.config.metrics import WORKER_METHOD
from vllm_sparse_backend.config.request_levels import FIELD, MARK
from vllm_sparse_backend.evaluation.vllm_server import Server, sparse_args
from vllm_sparse_backend.serving import rust_frontend

pytestmark = [pytest.mark.server, pytest.mark.full]
pytest.importorskip("vllm")


def binary() -> str | None:
    spec = find_spec("vllm")
    packaged = Path(spec.origin).parent / "vllm-rs" if spec is not None and spec.origin is not None else None
    path = os.environ.get("VLLM_RUST_FRONTEND_PATH") or packaged
    return str(path) if path is not None and Path(path).is_file() else None


BINARY = binary()
if BINARY is None:
    pytest.skip("needs vllm-rs of this release (VLLM_RUST_FRONTEND_PATH)", allow_module_level=True)


@pytest.fixture(scope="module")
def rust(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    settings = server_levels.write(tmp_path_factory.mktemp("rust"), *server_levels.ALL)
    env = {rust_frontend.VARIABLE: "1", "VLLM_RUST_FRONTEND_PATH": str(BINARY), "VLLM_SERVER_DEV_MODE": "1"}
    with Server(small_model, (*sparse_args(settings), *scenario.SERVER_ARGS), env=env) as server:
        yield server


def post(server: Server, path: str, body: object) -> requests.Response:
    return requests.post(f"{server.url}{path}", json=body, timeout=scenario.DEADLINE_S)


def rows(server: Server) -> dict[tuple[str, str], float]:
    """Return rows by path and level, from vLLM's development route, because this front end's /metrics has none of
    ours."""
    (answer, *_) = post(server, "/collective_rpc", {"method": WORKER_METHOD, "args": [True]}).json()["results"]
    return {(path, level): n for name, (path, _, level), n in (s for s in answer["samples"] if s[0] == "rows")}


LEVELS = (None, 0, 1, "exact", "on", "high", "fast", "everything")


@pytest.mark.parametrize("level", LEVELS)
def test_a_level_gives_the_tokens_that_it_gives_behind_the_front_process_in_python(
    servers: Servers, rust: Server, level: object
) -> None:
    """Neither server has computed a prompt with this prefix."""
    prompt = scenario.prompt(1301, seed=700 + LEVELS.index(level))
    before = rows(rust)
    answer = scenario.ask(rust, prompt, level=level)
    expected = scenario.ask(servers.ours, prompt, level=level)
    assert answer.token_ids == expected.token_ids
    assert answer.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
    if level in (0, "exact"):
        assert answer.token_ids == scenario.ask(servers.stock, prompt).token_ids
    changed = {key for key, n in rows(rust).items() if n != before.get(key, 0)} - {("decode", "")}
    name = {None: "default", 0: "exact", 1: "default", "on": "default", "high": "default"}.get(level, level)
    assert changed == {("dense" if name == "exact" else "sparse", name)}


@pytest.mark.parametrize(
    "vllm_xargs",
    [
        {FIELD: value} for value in (2, -1, 0.5, 1e300, "x", "x" * 100_000, "default", None, [], [0], {}, {"level": 0})
    ] + [{"sparse-prefill": 0}],
    ids=lambda vllm_xargs: repr(vllm_xargs)[:40],
)  # fmt: skip
def test_what_a_request_may_not_have_ends_it_and_nothing_else(rust: Server, vllm_xargs: Any) -> None:
    body = {"model": rust.model, "prompt": [5, 6, 7], "max_tokens": 2, "vllm_xargs": vllm_xargs}
    assert post(rust, "/v1/completions", body).status_code in (400, 500)
    stream = post(rust, "/v1/completions", {**body, "stream": True})
    assert stream.status_code in (400, 500) or '"error"' in stream.text
    assert post(rust, "/v1/completions", {**body, "vllm_xargs": {FIELD: 0}}).status_code == 200


def test_a_forged_mark_counts_for_nothing(rust: Server) -> None:
    body = {"model": rust.model, "prompt": scenario.prompt(700, seed=800), "max_tokens": 1}
    before = rows(rust)
    forged = {MARK: ["exact", None, None, 0]}
    assert post(rust, "/v1/completions", {**body, "vllm_xargs": forged}).status_code == 200
    after = rows(rust)
    assert after.get(("dense", "exact")) == before.get(("dense", "exact"))
    assert after[("sparse", "default")] > before.get(("sparse", "default"), 0)


def test_what_it_misses_is_in_the_log(rust: Server) -> None:
    log = rust.log_path.read_text()
    assert log.count(rust_frontend.MISSING) == 1
    assert "sparse_prefill" not in requests.get(f"{rust.url}/metrics", timeout=scenario.DEADLINE_S).text
