# SPDX-License-Identifier: Apache-2.0
"""The guard's cost: a check beside the attention that it watches, on a stand-in for the card."""

import pytest
import torch

pytest.importorskip("vllm", reason="the guard is a part of what runs in vLLM")

from benchmarks.asked import Asked
from benchmarks.figures import Report
from benchmarks.guard import run_guard
from benchmarks.structured import structured_prompts
from tests.bench.conftest import HEADS, CpuCard

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the stand-in for the card has no kernels")


@pytest.mark.full
def test_checks_beside_dense_and_sparse_attention() -> None:
    card = CpuCard(lambda name: {"dense": 8.0, "sparse": 4.0, "check": 0.2}[name])
    prompts = structured_prompts(HEADS, 700, 2, torch.device("cpu"))
    report = Report("guard", card.name)
    plan = Asked.parse("a_shape:sink_tokens=64,local_tokens=64").plan(HEADS.model(2))
    (row,) = run_guard(card, prompts, plan, [400], 300, "a_shape, structured", report, 0.0)  # type: ignore[arg-type]
    assert card.ran == ["dense"] * 2 + ["sparse"] * 2 + ["check"] * 2
    assert (row["dense_ms"], row["sparse_ms"], row["check_ms"]) == (8.0, 4.0, 0.2)
    assert row["share_at_rate"] == pytest.approx(0.1 * 0.2 / 4)
    assert 0.01 < row["error"] <= row["worst_layer"] <= row["worst_queries"] < 2
    assert report.figures["guard, a_shape, structured, after 400: share of sparse attention's time at rate 0.1"]
