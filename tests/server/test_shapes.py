# SPDX-License-Identifier: Apache-2.0
"""Models of other shapes than Llama's, and n-grams as drafts; on a card if there is one.

Tokens equal stock's. Log-probabilities of exact requests are no further from stock's than stock's own in other batches.
"""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.server_shapes import LENGTHS, OURS, SETTINGS, SHAPES, STOCK
from vllm_sparse_backend.evaluation.vllm_server import CPU_ENV, OFFLINE, has_cuda

pytestmark = [pytest.mark.server, pytest.mark.full, *([pytest.mark.gpu] if has_cuda() else ())]
pytest.importorskip("vllm")

ROOT = Path(__file__).parents[2]
DEADLINE_S = 3600.0
"""Seconds for all shapes of a server; they take minutes."""
EVERY, FOURTH = {"0", "1", "2", "3"}, {"3"}
SPARSE_LAYERS = {
    "windows": FOURTH,
    "chunks": FOURTH,
    "hybrid": FOURTH,
    **({"hybrid-mamba": {"2"}} if has_cuda() else {}),
    "experts": EVERY,
    "sinks": {"1", "3"},
    "n-grams": EVERY,
}
COMPARED = [] if has_cuda() else [name for name in SPARSE_LAYERS if name != "hybrid"]
"""Shapes in float32, in which rounding cannot change a random model's tokens."""
Lines = dict[str, dict[str, Any]]


def run(which: str, names: list[str], folder: Path) -> Lines:
    """Return the output of a process, by shape."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")])
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.helpers.server_shapes", str(folder), which, *names]
    env |= OFFLINE | ({} if has_cuda() else CPU_ENV) | {"PYTHONPATH": paths}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"name"')]
    return {line["name"]: line for line in lines}


@pytest.fixture(scope="module")
def lines_by_server(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Lines]:
    """The lines of both servers, which run in parallel."""
    with ThreadPoolExecutor(2) as pool:
        lines = {w: pool.submit(run, w, list(SHAPES), tmp_path_factory.mktemp(w)) for w in (STOCK, OURS)}
        return {which: future.result() for which, future in lines.items()}


def furthest(ours: list[list[float]], theirs: list[list[float]]) -> float:
    pairs = (pair for of_prompts in zip(ours, theirs, strict=True) for pair in zip(*of_prompts, strict=True))
    return max((abs(a - b) for a, b in pairs), default=0.0)


# In a parallel test run, a single process starts the models of all tests in this group.
@pytest.mark.xdist_group("shapes")
@pytest.mark.parametrize("name", SPARSE_LAYERS)
def test_tokens_are_stocks_and_layers_that_can_ran_sparse(lines_by_server: dict[str, Lines], name: str) -> None:
    line, stock = lines_by_server[OURS][name], lines_by_server[STOCK][name]
    assert "tokens" in line, line
    assert "tokens" in stock, stock
    assert len(line["tokens"]) == len(LENGTHS)
    assert set(line["sparse"]) == SPARSE_LAYERS[name]
    assert stock["sparse"] == {}
    if name in COMPARED:
        assert line["tokens"] == stock["tokens"]
    apart, spread = furthest(line["exact"], stock["exact"]), furthest(stock["exact"], stock["one by one"])
    print(f"{name}: log-probabilities {apart:.2e} from stock's, which spread by {spread:.2e}")
    assert apart <= spread
    assert line["exact"]
    assert max(LENGTHS) > 512 > SETTINGS["min_tokens"]  # chunks, and rows past the border
