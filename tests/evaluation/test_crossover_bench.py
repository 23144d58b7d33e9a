# SPDX-License-Identifier: Apache-2.0
"""`bench crossover` compares the times that attention adds to linear layers. A stand-in replaces the card."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from vllm_sparse_backend.config.layer_weights import LinearSizes
from vllm_sparse_backend.evaluation import crossover_bench
from vllm_sparse_backend.evaluation.attention_prompts import Heads, planted_prompt
from vllm_sparse_backend.evaluation.crossover_bench import NOISE, STEPS, against_dense
from vllm_sparse_backend.evaluation.layer_timing import TimedLayer, layers_of
from vllm_sparse_kernels.attention import AttendEngine
from vllm_sparse_kernels.layer import layer_plan
from vllm_sparse_kernels.methods.minference.a_shape import AShape

HEADS = Heads(num_heads=2, num_kv_heads=1, head_dim=64, page_tokens=64, dtype=torch.float16)
LAYERS, CONTEXT, NEW = 3, 200, 56
SIZES = LinearSizes(8, 80)


class Recorder:
    """A card that records the order of runs, and returns given times by contestant."""

    def __init__(self, taken: dict[str, list[float]]) -> None:
        self.taken, self.order, self.linear_of = taken, defaultdict[str, list[str]](list), []
        self.current: list[str] = []

    def dense(self, batch: Any, out: torch.Tensor) -> Callable[[], object]:
        return lambda: self.current.append("dense")

    def linear(self, sizes: LinearSizes, num_tokens: int) -> Callable[[], object]:
        self.linear_of.append((sizes, num_tokens))
        return lambda: self.current.append("products")

    def wall_ms(
        self, contestants: dict[str, Sequence[Callable[[], object]]], budget_s: float
    ) -> dict[str, list[float]]:
        for name, runs in contestants.items():
            self.current = self.order[name]
            for run in runs:
                run()
        return self.taken


@pytest.fixture
def compare(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Recorder, dict[str, float]]]:
    def run(dense: list[float], ours: list[float], linear: list[float]) -> tuple[Recorder, dict[str, float]]:
        card = Recorder({"dense": dense, "ours": ours, "linear": linear})
        prompts = [planted_prompt(HEADS, CONTEXT + NEW, torch.device("cpu"), seed) for seed in range(LAYERS)]
        plan = [layer_plan([AShape(64, 64)] * HEADS.num_heads)] * LAYERS
        monkeypatch.setattr(TimedLayer, "run", lambda self, engine: card.current.append("sparse"))
        monkeypatch.setattr(crossover_bench, "causal_pairs", lambda rows: 1)
        engine = AttendEngine("portable", lambda spec: None, lambda *args, **options: None)
        layers = layers_of(prompts, plan, CONTEXT, NEW, "auto")
        for layer in layers:
            layer.select()
        return card, against_dense(card, layers, [engine] * LAYERS, SIZES)  # type: ignore[arg-type]

    return run


def test_products_of_linear_layers_lie_between_attention(compare) -> None:
    card, row = compare([14.0, 13.0, 15.0], [7.0, 6.0, 6.5], [4.0, 4.0, 5.0])
    runs = LAYERS * STEPS
    assert card.order == {
        "dense": ["dense", "products"] * runs, "ours": ["sparse", "products"] * runs, "linear": ["products"] * runs
    }  # fmt: skip
    assert card.linear_of == [(SIZES, NEW)]
    # Medians of the differences of each pass: 10, 9 and 10, and 3, 2 and 1.5.
    assert (row["dense_ms"], row["ms"], row["times_faster"]) == (10.0, 2.0, 5.0)


@pytest.mark.parametrize(
    ("dense", "ours", "times_faster"),
    [(100.5, 99.0, 1.0), (103.0, 99.0, 3.0), (99.0, 103.0, 1 / 3)],
)
def test_times_below_the_noise_of_linear_layers_count_as_noise(compare, dense, ours, times_faster) -> None:
    _, row = compare([dense], [ours], [100.0])
    assert min(row["dense_ms"], row["ms"]) >= 100 * NOISE
    assert row["times_faster"] == pytest.approx(times_faster)
