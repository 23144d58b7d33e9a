"""Models of other shapes than Llama's, n-grams as drafts, LoRA: stock's tokens, and the layers sparse that can be.

Three of them on every change; `make shapes` (SHAPES=all) runs all, on a CPU without AMX the hybrid too.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.server.shapes import LENGTHS, SETTINGS, SHAPES
from vllm_sparse_backend.demo.server import CPU_ENV, OFFLINE

pytestmark = pytest.mark.server
pytest.importorskip("vllm")

ROOT = Path(__file__).parents[2]
ALL = os.environ.get("SHAPES") == "all"
ALWAYS = ("windows", "experts", "n-grams")
EVERY, FOURTH = {"0", "1", "2", "3"}, {"3"}
SPARSE_LAYERS = {
    "windows": FOURTH, "hybrid": FOURTH, "convolutions": FOURTH, "experts": EVERY, "n-grams": EVERY, "lora": EVERY,
}  # fmt: skip


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("shapes")
    paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")])
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.server.shapes", str(folder), *(SHAPES if ALL else ALWAYS)]
    env |= OFFLINE | CPU_ENV | {"PYTHONPATH": paths}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=1200)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"name"')]
    assert done.returncode == 0, done.stderr[-3000:]
    return {line["name"]: line for line in lines}


def of(told: dict[str, dict[str, Any]], name: str) -> dict[str, Any]:
    if name not in told:
        pytest.skip("in `make shapes` only")
    return told[name]


@pytest.mark.parametrize("name", [name for name in SPARSE_LAYERS if name != "hybrid"])
def test_tokens_are_stocks_and_layers_that_can_ran_sparse(told: dict[str, dict[str, Any]], name: str) -> None:
    line = of(told, name)
    assert "ours" in line, line
    assert line["ours"] == line["stock"]
    assert len(line["ours"]) == len(LENGTHS)
    assert set(line["ours sparse"]) == SPARSE_LAYERS[name]
    assert line["stock sparse"] == {}
    assert max(LENGTHS) > 512 > SETTINGS["min_tokens"]  # chunks, and rows past the border


def test_a_hybrid_ran_sparse_where_it_attends(told: dict[str, dict[str, Any]]) -> None:
    """In bfloat16, whose rounding may change a random model's tokens."""
    line = of(told, "hybrid")
    if "instruction set 'amx'" in line.get("ours error", ""):
        pytest.skip(line["ours error"])
    assert [len(tokens) for tokens in line["ours"]] == [len(tokens) for tokens in line["stock"]]
    assert set(line["ours sparse"]) == SPARSE_LAYERS["hybrid"]


def test_a_model_with_sinks_everywhere_is_refused(told: dict[str, dict[str, Any]]) -> None:
    error = of(told, "sinks")["ours error"]
    assert "no layer of this model can prefill sparsely" in error
    assert "sinks: the layer has learnt attention sinks" in error
