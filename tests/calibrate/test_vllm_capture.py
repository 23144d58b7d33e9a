# SPDX-License-Identifier: Apache-2.0
"""What layers write under vLLM, over chunks and ranks, and how it becomes a capture. vLLM itself is not started."""

from types import SimpleNamespace

import pytest
import torch

from tests.calibrate.made import model_folder
from vllm_sparse_backend.profiling.capture import Capture, begin_capture, finish_capture
from vllm_sparse_backend.profiling.vllm_capture import join, record
from vllm_sparse_backend.settings.errors import ConfigurationError

pytest.importorskip("safetensors", reason="captures are files of safetensors, which comes with vLLM")
LAYERS = {0: (0.25, None), 1: (None, "a sliding window"), 2: (0.5, None)}


class Layer:
    """An attention layer of one rank; ``seen`` are the numbers of tokens it was called with."""

    head_size = 32

    def __init__(self) -> None:
        self.seen: list[int] = []

    def forward(self, module, query, key, value, kv_cache, attn_metadata, output):
        self.seen.append(len(query))
        return output


def prefill(layer, q, k, v, chunk: int, padding: int = 0) -> None:
    """A profile run without metadata, then the prompt in chunks whose tensors may be longer than what is in use."""
    layer.forward(None, q[:1], k[:1], v[:1], None, None, None)
    for start in range(0, len(q), chunk):
        parts = [x[start : start + chunk] for x in (q, k, v)]
        metadata = SimpleNamespace(num_actual_tokens=len(parts[0]))
        padded = [torch.nn.functional.pad(x, (0, 0, 0, 0, 0, padding), value=float("nan")) for x in parts]
        assert layer.forward(None, *padded, None, metadata, "out") == "out"


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_chunks_and_ranks_become_one(tmp_path, ranks):
    """The model has 4 heads on 2 kv heads: of four ranks two have the same kv head."""
    made = begin_capture(model_folder(tmp_path / "model"), list(range(77)), tmp_path / "capture")
    generator = torch.Generator().manual_seed(0)
    whole = {i: [torch.randn(77, n, 32, generator=generator) for n in (4, 2, 2)] for i in (0, 2)}
    for number, (q, k, v) in whole.items():
        for rank in range(ranks):
            layer = Layer()
            record(layer, made.folder, number, rank)
            heads, kv_heads = 4 // ranks, max(1, 2 // ranks)
            first = rank * 2 // ranks
            own = q[:, rank * heads : (rank + 1) * heads], *(x[:, first : first + kv_heads] for x in (k, v))
            prefill(layer, *own, chunk=32, padding=3)
            record(layer, None, number, rank)
            prefill(layer, *own, chunk=32)
            assert layer.seen == [1, 35, 35, 16, 1, 32, 32, 13]
    join(made, LAYERS, ranks)
    finish_capture(made)
    found = Capture.open(made.folder)
    assert (found.scales, found.left_out) == ({0: 0.25, 2: 0.5}, {1: "a sliding window"})
    for number, tensors in whole.items():
        assert all(torch.equal(a, b) for a, b in zip(found.read(number), tensors))
    assert not list(made.folder.glob("part-*"))


def test_a_prompt_that_is_not_whole_is_an_error(tmp_path):
    made = begin_capture(model_folder(tmp_path / "model"), list(range(77)), tmp_path / "capture")
    layer = Layer()
    record(layer, made.folder, 0, 0)
    prefill(layer, torch.zeros(64, 4, 32), torch.zeros(64, 2, 32), torch.zeros(64, 2, 32), chunk=32)
    with pytest.raises(ConfigurationError, match=r"layer 0: given .*\[\(64, 4, 32\).*expected \[\(77, 4, 32\)"):
        join(made, {0: (1.0, None)}, 1)
    with pytest.raises(ConfigurationError, match=r"layer 2: given q, k, v of \[\(0, 0, 0\)"):
        join(made, {2: (1.0, None)}, 1)
