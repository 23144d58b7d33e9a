# SPDX-License-Identifier: Apache-2.0
"""What two cards do beside one, from what our own commands write."""

from pathlib import Path

from benchmarks import tensor_parallel as module
from benchmarks.shape import make_shape
from benchmarks.tensor_parallel import Wanted
from vllm_sparse_backend.measure.server import Settings

A_SHAPE = Settings({"method": "a_shape"})


def test_servers_on_their_cards(tmp_path: Path) -> None:
    shape = make_shape(tmp_path / "shape", 4, 8192)
    (one, two) = (Wanted(shape, cards, A_SHAPE if cards == 2 else None, 4096).server() for cards in (1, 2))
    at = {name: [server.command[server.command.index(name) + 1] for server in (one, two)] for name in (
        "--tensor-parallel-size", "--kv-cache-memory-bytes", "--max-model-len",
    )}  # fmt: skip
    assert at["--tensor-parallel-size"] == ["1", "2"]
    assert at["--max-model-len"] == ["4096"] * 2
    whole, half = map(int, at["--kv-cache-memory-bytes"])
    assert whole == 2 * half == 2 * 2 * 4 * 8 * 128 * (4096 + module.SPARE_TOKENS)
    assert "sparse-prefill" in two.command
    assert "sparse-prefill" not in one.command
    assert [server._env["CUDA_VISIBLE_DEVICES"] for server in (one, two)] == ["0", "0,1"]
