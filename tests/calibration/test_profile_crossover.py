# SPDX-License-Identifier: Apache-2.0
"""The lengths from which a profile's heads are faster than dense attention, on a card with preset times."""

from typing import ClassVar

import pytest

from tests.helpers.calibration_cases import HEADS, make_job
from vllm_sparse_backend.calibration.profile_crossover import measure_crossover
from vllm_sparse_kernels.attention import AttendEngine
from vllm_sparse_kernels.index import causal_pairs
from vllm_sparse_kernels.methods.dense.method import Dense
from vllm_sparse_kernels.methods.minference.a_shape import AShape

LOCAL = [AShape(64, 512)] * (HEADS - 1) + [Dense()]
WHOLE = [Dense()] * HEADS


class TimedCard:
    """Dense attention takes 1 ms per million pairs. A layer with sparse heads takes a fifth of that and ``fixed_ms``
    more.

    Methods select by their references on a CPU; the engine leaves its output unchanged.
    """

    name = "a card"
    engines: ClassVar = {"quick": AttendEngine("quick", lambda spec: None, lambda *_, **__: None)}

    def __init__(self, fixed_ms: float) -> None:
        self.fixed_ms, self.dense_ms = fixed_ms, 0.0

    def dense(self, batch, out):
        self.dense_ms = causal_pairs(batch.rows) / 1e6
        return lambda: None

    def linear(self, sizes, num_tokens):
        return lambda: None

    def wall_ms(self, contestants, budget_s):
        for run in contestants["ours"]:
            run()
        return {"dense": [7 + self.dense_ms], "ours": [7 + self.dense_ms / 5 + self.fixed_ms], "linear": [7.0]}


@pytest.fixture
def job(tmp_path):
    def make(fixed_ms: float, num_tokens: int = 5000):
        job = make_job(tmp_path / "work", num_tokens=num_tokens)
        job.folder.mkdir(parents=True, exist_ok=True)
        vars(job)["card"] = TimedCard(fixed_ms)
        return job

    return make


@pytest.mark.parametrize(
    ("fixed_ms", "min_tokens", "min_query_tokens"),
    # With chunks of 128, 64 tokens after 2,048 are 0.133 million pairs, after 4,936 0.318; and 128 tokens are 0.63.
    [(0.01, 2048, 20), (0.13, 3072, 64), (10.0, None, None)],
)
def test_the_least_length_at_which_own_heads_pay(job, fixed_ms, min_tokens, min_query_tokens):
    crossover = measure_crossover(job(fixed_ms), [WHOLE, LOCAL])
    assert (crossover.device, crossover.engines, crossover.longest_tokens) == ("a card", ("quick",), 5000)
    assert (crossover.min_tokens, crossover.min_query_tokens, crossover.pays) == (
        min_tokens,
        min_query_tokens,
        bool(min_tokens),
    )
    # Times differ between runs. The folder keeps each measurement, and no second capture is requested.
    again = job(0.0)
    assert measure_crossover(again, [WHOLE, LOCAL]) == crossover
    assert again.capturer.captured == []
    assert measure_crossover(job(0.0), [LOCAL, LOCAL]).min_tokens == 2048


def test_what_cannot_be_measured_is_left_out(job, tmp_path):
    assert measure_crossover(job(0.0), [WHOLE, WHOLE]) is None
    assert measure_crossover(job(0.0, num_tokens=4000), [LOCAL, LOCAL]) is None
    assert measure_crossover(make_job(tmp_path / "work"), [LOCAL, LOCAL]) is None  # no card
