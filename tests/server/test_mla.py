# SPDX-License-Identifier: Apache-2.0
"""A small model with multi-head latent attention, through the flag for its prefill backend: a server, and engines
against stock vLLM."""

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.helpers import chunked_mla, scenario
from tests.helpers.scenario import Answer, assert_same
from tests.helpers.servers import Server
from tests.helpers.tiny_models import MLA_CONFIG, make_model
from tests.server.conftest import ENV
from vllm_sparse_backend.config.fallback import Fallback
from vllm_sparse_backend.evaluation.vllm_server import CPU_ENV, environment, has_cuda
from vllm_sparse_backend.identity import MLA_FLAG

pytestmark = [
    pytest.mark.server,
    pytest.mark.full,
    pytest.mark.skipif(has_cuda(), reason="float32 and vLLM's CPU_MLA backend need a CPU"),
    pytest.mark.xdist_group("mla"),
]

PAGE_TOKENS, MIN_TOKENS = 16, 256
# Without chunks on a CPU, rows that begin within min_tokens would all be dense.
SETTINGS = {"method": "top_p", "params": {"kept_mass": 0.4}, "min_tokens": 0, "min_query_tokens": 256}
ARGS = ("--max-model-len", "4096", "--attention-backend", "CPU_MLA", "--enable-prompt-tokens-details")
ARGS += ("--kv-cache-memory-bytes", str(128 << 20))


def flags(settings: dict[str, Any]) -> tuple[str, ...]:
    return (*MLA_FLAG.split(), "--additional-config", json.dumps({"sparse_prefill": settings}))


@pytest.fixture(scope="module")
def mla_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "mla", config=MLA_CONFIG)


def test_a_server_runs_long_rows_sparse_unless_requests_are_exact(mla_model: Path) -> None:
    long, short = scenario.prompt(901, seed=1), scenario.prompt(70, seed=2)
    with Server(mla_model, (*flags(SETTINGS), *ARGS), env=ENV) as server:
        before = scenario.counted(server)
        assert (before.rows, before.by("layers", "attention")) == ({}, {"mla": 2})
        sparse, exact = (scenario.ask(server, long, level=level) for level in (None, 0))
        assert_same(scenario.ask(server, short), scenario.ask(server, short, level=0))
        report = scenario.counted(server, before)
    assert sparse.logprobs != pytest.approx(exact.logprobs, abs=1e-3)
    assert all(map(math.isfinite, sparse.logprobs))
    assert report.by("rows", "path")["sparse"] == 1
    assert set(report.rows) == {
        ("sparse", ""), ("dense", Fallback.REQUESTED), ("dense", Fallback.SHORT_QUERY), ("decode", ""),
    }  # fmt: skip
    assert set(scenario.layers_of(report)) == {0, 1}
    assert all(0.1 < layer.density < 0.95 for layer in scenario.layers_of(report).values())


def chunked(model: Path, *runs: tuple[dict[str, Any] | None, Sequence[str]]) -> list[dict[str, Answer]]:
    """Return the answers of engines with chunked prefill and a prefix cache, for (settings or stock, requests)."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.helpers.chunked_mla", str(model), *map(json.dumps, runs)],
        env=environment() | CPU_ENV | ENV, capture_output=True, text=True, check=False,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith('{"answers"')]
    return [
        {
            name: Answer(tuple(answer["token_ids"]), tuple(answer["logprobs"]), answer["cached_tokens"])
            for name, answer in answers.items()
        }
        for answers in json.loads(line)["answers"]
    ]


A_SHAPE = {"method": "a_shape", "min_tokens": MIN_TOKENS, "min_query_tokens": 1}


def test_chunks_and_cached_prefixes(mla_model: Path) -> None:
    """Windows longer than the prompt give stock's tokens. With short ones, exact requests get stock's tokens, and
    sparse requests with the same beginning read none of their blocks.

    Equal requests run in equal chunks, because stock vLLM 0.32 gives other answers on a CPU if chunks differ.
    """
    everything, few = (
        A_SHAPE | {"params": {"sink_tokens": sinks, "local_tokens": local}}
        for sinks, local in ((4096, 4096), (32, 128))
    )
    names, exact = ("first", "second"), ("first-exact", "second-exact")
    stock, whole, sparse = chunked(mla_model, (None, names), (everything, names), (few, exact + names))
    shared = chunked_mla.SHARED_TOKENS // PAGE_TOKENS * PAGE_TOKENS
    assert [stock[name].cached_tokens for name in names] == [0, shared]
    for name in names:
        for answers, request in ((whole, name), (sparse, f"{name}-exact")):
            assert_same(answers[request], stock[name])
            assert answers[request].cached_tokens == stock[name].cached_tokens
        assert sparse[name].logprobs != pytest.approx(stock[name].logprobs, abs=0.05)
        assert all(map(math.isfinite, sparse[name].logprobs))
    assert [sparse[name].cached_tokens for name in names] == [0, shared]
