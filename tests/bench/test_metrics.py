# SPDX-License-Identifier: Apache-2.0
"""What counting costs beside a step, on a stand-in for the card."""

import pytest
import torch

pytest.importorskip("vllm", reason="counters are a part of what runs in vLLM")

from benchmarks.metrics import NUM_LAYERS, projections, run_prefill
from tests.bench.conftest import HEADS, CpuCard
from vllm_sparse_backend.measure.asked import Asked
from vllm_sparse_backend.measure.data import structured_prompts
from vllm_sparse_backend.measure.report import Report

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the stand-in for the card has no kernels")


class StillCard(CpuCard):
    def synchronize(self) -> None:
        pass


@pytest.mark.full
def test_counting_beside_a_layer() -> None:
    card = StillCard(lambda name: {"layer": 0.9, "count": 0.01}[name])
    prompts, plan = structured_prompts(HEADS, 700, 2, card.device), Asked.parse("a_shape").plan(HEADS.model(2))
    products = projections(HEADS, 8, card.device, 32, 64)
    assert [run().shape for run in products] == [(8, 512), (8, 32), (8, 128), (8, 32)]
    report = Report("metrics", card.name)
    row = run_prefill(card, prompts, plan, 400, 300, products, "a_shape", report, 0.0)  # type: ignore[arg-type]
    assert card.ran == ["layer"] * 10 + ["count"] * 2
    # A layer is one selection and attention, and four products.
    assert row["layer_ms"] == pytest.approx(0.9 * 5)
    assert row["device_us"] == pytest.approx(NUM_LAYERS * 10)
    assert row["share_of_device"] == pytest.approx(0.01 / 4.5)
    assert row["host_us"] > NUM_LAYERS
    bars = {name: figure["bar"] for name, figure in report.figures.items()}
    assert bars == {
        "metrics, a_shape, after 400: device's share of a step": 0.005,
        "metrics, a_shape, after 400: host's share of a step": 0.005,
        "metrics, a_shape, after 400: what a step gets longer by": 0.005,
    }
    slower = max(row["step_ms"], row["launched_ms"])
    assert 0 < row["longer"] < 1.001 * max(row["device_us"], row["host_us"]) / 1e3 / slower
