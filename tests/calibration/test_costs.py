# SPDX-License-Identifier: Apache-2.0
"""Costs of kinds of methods on a card with preset times."""

import pytest

from tests.helpers.calibration_cases import make_job
from vllm_sparse_backend.calibration.costs import measure_costs
from vllm_sparse_backend.calibration.judge import LayerPrompt, Served
from vllm_sparse_kernels.attention import engines
from vllm_sparse_kernels.methods.dense.method import Dense
from vllm_sparse_kernels.methods.minference.a_shape import AShape
from vllm_sparse_kernels.methods.sparge_attn.method import SpargeAttn


class SayingCard:
    """A card that runs and counts selections, and returns preset times. Attention is not run."""

    engines = engines()

    def __init__(self, **ms: float) -> None:
        self.ms, self.asked = ms, []

    def dense(self, batch, out):
        return lambda: None

    def spans_ms(self, contestants, new_pass):
        new_pass()
        for name, run in (span for spans in contestants for span in spans):
            self.asked.append(name)
            if name in ("select", "alone"):
                run()
        return {name: [self.ms[name]] for spans in contestants for name, _ in spans}


TIMES = {"select": 5.0, "alone": 2.0, "attend": 9.0, "plain": 1.0, "dense": 30.0}


@pytest.fixture
def batches(tmp_path):
    job = make_job(tmp_path / "work", num_tokens=300)
    (captured,) = job.capturer(job.prompts[:1], tmp_path)
    return LayerPrompt.read(captured, 0, Served(128, 100), "cpu").batches


def test_measured_costs_are_split_by_heads_and_pairs(batches):
    card = SayingCard(**TIMES)
    costs = measure_costs(card, lambda: batches)
    method = SpargeAttn(kept_mass=1.0)  # keeps every pair
    cost = costs.of(method)
    # Three more heads take 3 ms more; 1 ms of the 9 ms of attention is for the launch.
    assert (cost.head_ms, cost.group_ms, cost.full_ms) == (1.0, 1.0, 2.0)
    assert (costs.base_ms, costs.dense_ms) == (1.0, 30.0)
    assert costs.head_ms(method, 0.5) == 2.0
    num_measured = len(card.asked)
    assert costs.of(SpargeAttn(kept_mass=0.2)) == cost  # of the same kind
    assert len(card.asked) == num_measured
    assert costs.of(Dense()).full_ms == 2.0
    card.ms["attend"] = 1.1
    assert costs.of(AShape(64, 128)).full_ms == 2.0  # nothing is faster per pair than keeping all of them
