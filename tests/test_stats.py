"""What a worker counts, and when Prometheus hears of it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from prometheus_client import REGISTRY

from vllm_sparse_backend.serving import stats
from vllm_sparse_backend.serving.stats import Recorder
from vllm_sparse_backend.settings.reasons import Fallback
from vllm_sparse_kernels.testing.batches import random_batch, random_index

CPU = torch.device("cpu")
LAYERS = (901, 905)  # of no model: counters are the process's
Values = Callable[[], dict[str, float]]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(stats.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def values() -> Values:
    """What the counters rose by since the test began: of rows by path and reason, else by layer."""

    def read() -> dict[str, float]:
        found = {}
        for family in REGISTRY.collect():
            for sample in family.samples if family.name.startswith("sparse_prefill") else ():
                if sample.name.endswith("_total"):
                    name = family.name.removeprefix("sparse_prefill_")
                    found[" ".join([name, *sample.labels.values()]).strip()] = sample.value
        return found

    before = read()
    return lambda: {k: v - before.get(k, 0) for k, v in read().items() if v != before.get(k, 0)}


def make(clock: list[float], **options: Any) -> Recorder:
    recorder = Recorder(CPU, 2.0, **options)
    recorder.add_layers(LAYERS)
    return recorder


def test_totals_arrive_once_an_interval(clock: list[float], values: Values) -> None:
    recorder = make(clock)
    recorder.count_rows("sparse", None)
    recorder.count_rows("dense", Fallback.TOO_SHORT, 3)
    recorder.count_rows("decode", None, 40)
    clock[0] += 1.9
    recorder.flush_when_due()
    assert values() == {}
    clock[0] += 0.2
    recorder.flush_when_due()
    rows = {"rows sparse": 1, "rows dense too_short": 3, "rows decode": 40}
    assert values() == rows
    recorder.count_rows("decode", None)
    clock[0] += 1.9
    recorder.flush_when_due()
    assert values() == rows
    clock[0] += 0.2
    recorder.flush_when_due()
    assert values() == rows | {"rows decode": 41}


def test_pairs_of_steps_add_up(clock: list[float], values: Values) -> None:
    """Kept pairs are told when a copy of them has arrived, at the next look, and each of them once."""
    batch = random_batch([(100, 300), (0, 131)], 4, 2, 16, 16)
    causal = 4 * (300 * 100 + 300 * 301 // 2 + 131 * 132 // 2)
    indices = [random_index(batch, 64, density, stripes=20, seed=i) for i, density in enumerate((0.1, 0.5, 0.9))]
    kept = [sum(int(index.to_mask(row).sum()) for row in range(2)) for index in indices]
    recorder = make(clock)
    for index in indices[:2]:
        recorder.count_pairs(901, index)
    recorder.count_pairs(905, indices[2])
    for _ in range(4):
        clock[0] += 1
        recorder.flush_when_due()
    expected = {
        "tiles 901": 10.0,
        "tiles 905": 5.0,
        "causal_pairs 901": 2.0 * causal,
        "causal_pairs 905": 1.0 * causal,
        "kept_pairs 901": float(kept[0] + kept[1]),
        "kept_pairs 905": float(kept[2]),
    }
    assert values() == expected
    recorder.count_pairs(901, indices[2])
    for _ in range(4):
        clock[0] += 1
        recorder.flush_when_due()
    more = {"tiles 901": 15.0, "causal_pairs 901": 3.0 * causal, "kept_pairs 901": float(sum(kept))}
    assert values() == expected | more


def test_ranks_share_a_layers_heads_but_not_its_rows_and_tiles(clock: list[float], values: Values) -> None:
    batch = random_batch([(0, 200)], 4, 2, 16, 16)
    index = random_index(batch, 64, 0.5)
    for rank in range(4):
        recorder = make(clock, is_first_rank=rank == 0)
        recorder.count_rows("sparse", None)
        recorder.count_pairs(901, index)
        for _ in range(2):
            clock[0] += 3
            recorder.flush_when_due()
    found = values()
    assert found["rows sparse"] == 1
    assert found["tiles 901"] == 2
    assert found["causal_pairs 901"] == 4 * 4 * 200 * 201 // 2
    assert found["kept_pairs 901"] == 4 * int(index.to_mask(0).sum())


def test_layers_that_are_added_later_keep_what_was_counted(clock: list[float]) -> None:
    batch = random_batch([(0, 200)], 4, 2, 16, 16)
    recorder = make(clock)
    recorder.count_pairs(905, random_index(batch, 64, 1.0))
    recorder.add_layers([901, 903, 905])
    recorder.count_pairs(903, random_index(batch, 64, 1.0))
    full = 4 * 200 * 201 // 2
    assert recorder._kept.tolist() == [0, full, full]


def test_what_is_not_read_yet_is_not_lost(clock: list[float], values: Values) -> None:
    """A copy that takes its time, as from a device: counts go on meanwhile, and no second copy starts."""

    class Event:
        arrived = False

        def query(self) -> bool:
            return self.arrived

    batch = random_batch([(0, 200)], 4, 2, 16, 16)
    index, event = random_index(batch, 64, 1.0), Event()
    full = 4 * 200 * 201 // 2
    recorder = make(clock)
    recorder.count_pairs(901, index)
    clock[0] += 3
    recorder.flush_when_due()
    recorder._copy = recorder._copy[0], event  # type: ignore[index,assignment]
    recorder.count_pairs(901, index)
    clock[0] += 3
    recorder.flush_when_due()
    assert "kept_pairs 901" not in values()
    event.arrived = True
    recorder.flush_when_due()
    assert values()["kept_pairs 901"] == full
    recorder.flush_when_due()
    assert values()["kept_pairs 901"] == 2 * full
