# SPDX-License-Identifier: Apache-2.0
"""Which rows of a step are whose, by both of vLLM's runners on a GPU: counters that only the right rows can give.

Prompts that are to be exact are of one length, sparse ones of another, and each is a single row: so many rows and tiles
of each kind there must be, and no others.
"""

from pathlib import Path

import pytest

from benchmarks.tiny import CONFIG
from tests.server import scenario
from vllm_sparse_backend.measure.scrape import parse
from vllm_sparse_backend.measure.server import Server, sparse_args
from vllm_sparse_backend.settings.reasons import Fallback
from vllm_sparse_kernels import TILE_TOKENS

pytestmark = [pytest.mark.gpu, pytest.mark.server]
pytest.importorskip("vllm")

NUM_EACH, EXACT_TOKENS, SPARSE_TOKENS, MIN_TOKENS = 4, 2000, 3000, 256
PARAMS = {"sink_tokens": 64, "local_tokens": 128}
SETTINGS = {"method": "a_shape", "params": PARAMS, "min_tokens": MIN_TOKENS, "min_query_tokens": 1}
ARGS = ("--dtype", "bfloat16", "--max-model-len", "4096", "--max-num-batched-tokens", "32768")
DETAILS = ("--gpu-memory-utilization", "0.1", "--enable-prompt-tokens-details")


@pytest.mark.parametrize("runner", ["0", "1"], ids=["the older runner", "Model Runner V2"])
def test_rows_of_each_level(small_model: Path, runner: str) -> None:
    env = {"VLLM_USE_V2_MODEL_RUNNER": runner}
    with Server(small_model, (*sparse_args(SETTINGS), *ARGS, *DETAILS), env=env) as server:
        check(server)


def check(server: Server) -> None:
    exact = {f"exact {i}": (scenario.prompt(EXACT_TOKENS, seed=i), 8, 0) for i in range(NUM_EACH)}
    sparse = {f"sparse {i}": (scenario.prompt(SPARSE_TOKENS, seed=100 + i), 8, 1) for i in range(NUM_EACH)}
    dealt = [pair for pairs in zip(exact.items(), sparse.items(), strict=True) for pair in pairs]
    answers = scenario.ask_together(server, dict(dealt))
    report = parse(server.get("/metrics"))
    assert report.rows["dense", Fallback.REQUESTED] == NUM_EACH
    assert report.rows_of("sparse") == NUM_EACH
    assert report.rows_of("dense") == NUM_EACH
    tiles = NUM_EACH * -(-(SPARSE_TOKENS - MIN_TOKENS) // TILE_TOKENS)
    assert [counts.tiles for counts in report.layers.values()] == [tiles] * CONFIG["num_hidden_layers"]
    assert report.problem() is None
    # What a sparse request wrote is not read by an exact one, but for its first positions; it says something else.
    prompt, *_ = sparse["sparse 0"]
    first, second, own = (scenario.ask(server, prompt, level=level) for level in (0, "exact", None))
    assert (first.cached_tokens, second.cached_tokens >= 2800, own.cached_tokens >= 2800) == (MIN_TOKENS, True, True)
    assert first.logprobs != pytest.approx(answers["sparse 0"].logprobs, abs=1e-2)
