# SPDX-License-Identifier: Apache-2.0
"""Models of other shapes than Llama's, n-grams as drafts, LoRA: stock's tokens, and the layers sparse that can be.

Three of them on every change; `make shapes` (SHAPES=all) runs all.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.server.shapes import LENGTHS, OURS, SETTINGS, SHAPES, STOCK
from vllm_sparse_backend.measure.server import CPU_ENV, OFFLINE

pytestmark = pytest.mark.server
pytest.importorskip("vllm")

ROOT = Path(__file__).parents[2]
ALL = os.environ.get("SHAPES") == "all"
ALWAYS = ("windows", "experts", "n-grams")
EVERY, FOURTH = {"0", "1", "2", "3"}, {"3"}
SPARSE_LAYERS = {
    "windows": FOURTH, "hybrid": FOURTH, "experts": EVERY, "n-grams": EVERY, "lora": EVERY,
}  # fmt: skip


Lines = dict[str, dict[str, Any]]


def run(which: str, folder: Path) -> Lines:
    """By shape, what one process told."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")])
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    names = [name for name in SHAPES if ALL or name in ALWAYS]
    command = [sys.executable, "-m", "tests.server.shapes", str(folder), which, *names]
    env |= OFFLINE | CPU_ENV | {"PYTHONPATH": paths}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"name"')]
    return {line["name"]: line for line in lines}


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Lines:
    return run(STOCK, tmp_path_factory.mktemp("stock"))


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Lines:
    return run(OURS, tmp_path_factory.mktemp("ours"))


def of(lines: Lines, name: str) -> dict[str, Any]:
    if name not in lines:
        pytest.skip("in `make shapes` only")
    return lines[name]


@pytest.mark.parametrize("name", [name for name in SPARSE_LAYERS if name != "hybrid"])
def test_tokens_are_stocks_and_layers_that_can_ran_sparse(stock: Lines, ours: Lines, name: str) -> None:
    expected, line = of(stock, name), of(ours, name)
    assert "tokens" in line, line
    assert line["tokens"] == expected["tokens"]
    assert len(line["tokens"]) == len(LENGTHS)
    assert set(line["sparse"]) == SPARSE_LAYERS[name]
    assert expected["sparse"] == {}
    assert max(LENGTHS) > 512 > SETTINGS["min_tokens"]  # chunks, and rows past the border


def test_a_hybrid_ran_sparse_where_it_attends(stock: Lines, ours: Lines) -> None:
    """In bfloat16, whose rounding may change a random model's tokens."""
    expected, line = of(stock, "hybrid"), of(ours, "hybrid")
    assert "tokens" in line, line
    assert [len(tokens) for tokens in line["tokens"]] == [len(tokens) for tokens in expected["tokens"]]
    assert set(line["sparse"]) == SPARSE_LAYERS["hybrid"]


def test_a_model_with_sinks_everywhere_is_refused(ours: Lines) -> None:
    error = of(ours, "sinks")["error"]
    assert "no layer of this model can prefill sparsely" in error
    assert "sinks: the layer has learnt attention sinks" in error
