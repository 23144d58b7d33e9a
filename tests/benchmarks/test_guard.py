# SPDX-License-Identifier: Apache-2.0
"""`benchmarks.guard`: its checks are judged as a server's are, and its errors are those of the guard."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import guard as benchmark
from vllm_sparse_backend.config.settings import GuardConfig
from vllm_sparse_backend.serving.worker.guard import PROBE_TOKENS, Guard


def test_the_guard_judges_the_checks_of_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: Any = benchmark.NoCounts()
    guard = Guard(GuardConfig(bound=1e9), counts)
    judged: list[Any] = []
    judge = guard._judge
    monkeypatch.setattr(guard, "_judge", lambda place, check: (judged.append(check), judge(place, check)))
    layer: Any = SimpleNamespace(out=torch.ones(2 * PROBE_TOKENS, 2, 8))
    exact = torch.zeros(PROBE_TOKENS, 2, 8)

    def dense() -> None:
        exact.fill_(2.0)

    benchmark.Checked(layer, dense, exact, guard).run()
    guard.judge_arrived()
    ((total, peak, _, _),) = judged
    assert (total, peak) == pytest.approx((0.5, 0.5))
    assert not guard.held


def test_errors_are_of_128_queries_and_peaks_of_one_query() -> None:
    dense = torch.ones(2 * PROBE_TOKENS, 2, 8)
    sparse = dense.clone()
    sparse[-1, 1] = -1.0
    errors = benchmark._errors([sparse], [dense])
    worst = (4 / (2 * PROBE_TOKENS)) ** 0.5
    assert errors["worst_queries"] == errors["last_queries"] == pytest.approx(worst)
    assert errors["error"] == errors["worst_layer"] == pytest.approx(worst / 2)
    assert errors["peak"] == pytest.approx(2.0)
    assert errors["peak_p99"] == pytest.approx(1.98)
