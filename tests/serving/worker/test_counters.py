# SPDX-License-Identifier: Apache-2.0
"""A worker's counts: each row and pair once, all from the same moment, without waiting for the device."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.helpers.batches import random_batch, random_index
from tests.helpers.masks import mask_of
from vllm_sparse_backend.config.fallback import Fallback
from vllm_sparse_backend.serving.worker.counters import DECODE_ROW, PADDING_ROW, PendingCounts, Recorder, RowKind
from vllm_sparse_backend.serving.worker.owner import Worker

CPU = torch.device("cpu")
SPARSE, SHORT = RowKind("sparse"), RowKind("dense", Fallback.TOO_SHORT)
CAUSAL = 4 * 200 * 201 // 2


def make() -> Recorder:
    return Recorder(CPU, 6, ("on", "fast"))


def full_index() -> Any:
    return random_index(random_batch([(0, 200)], 4, 2, 16, 16), 64, 1.0)


def found(recorder: Recorder) -> dict[str, float]:
    """Return samples without times. A level is a label unless it is the server's own."""
    return shown(recorder.samples())


def shown(samples: Any) -> dict[str, float]:
    return {" ".join([name, *labels]).removesuffix(" on").strip(): n for (name, labels), n in samples.items()}


def test_rows_by_path_and_reason() -> None:
    recorder = make()
    assert found(recorder) == {}
    recorder.count_rows({SPARSE: 1, RowKind("sparse", level="fast"): 1, SHORT: 3, PADDING_ROW: 1})
    recorder.count_rows({DECODE_ROW: 1, SHORT: 1})
    recorder.count_rows({DECODE_ROW: 1})
    assert found(recorder) == {"rows sparse": 1, "rows sparse  fast": 1, "rows decode": 2, "rows dense too_short": 4}


def test_pairs_of_steps_add_up() -> None:
    batch = random_batch([(100, 300), (0, 131)], 4, 2, 16, 16)
    causal = 4 * (300 * 100 + 300 * 301 // 2 + 131 * 132 // 2)
    indices = [random_index(batch, 64, density, stripes=20, seed=i) for i, density in enumerate((0.1, 0.5, 0.9))]
    kept = [sum(int(mask_of(index, row).sum()) for row in range(2)) for index in indices]
    recorder = make()
    for index in indices[:2]:
        recorder.count_pairs(1, index)
    recorder.count_pairs(5, indices[2], level="fast")
    expected = {
        "causal_pairs 1": 2 * causal, "causal_pairs 5 fast": causal,
        "kept_pairs 1": kept[0] + kept[1], "kept_pairs 5 fast": kept[2],
    }  # fmt: skip
    assert found(recorder) == expected
    recorder.count_pairs(1, indices[2])
    assert found(recorder) == expected | {"causal_pairs 1": 3 * causal, "kept_pairs 1": sum(kept)}


def test_more_pairs_than_32_bits_hold() -> None:
    index = random_index(random_batch([(0, 512)], 8, 2, 16, 16), 64, 1.0)
    index.block_counts.fill_(100_000)
    recorder = make()
    recorder.count_pairs(1, index)
    assert found(recorder)["kept_pairs 1"] == 8 * 4 * 100_000 * 64 * 128 - index.masked_pairs


@pytest.mark.parametrize(("rank", "rows"), [(0, {"rows sparse": 1}), (1, {})])
def test_ranks_have_the_same_rows_and_the_first_counts_them(rank: int, rows: dict[str, int]) -> None:
    worker = SimpleNamespace(rank=rank, requests=SimpleNamespace(is_counted=True), recorder=make())
    Worker.count_rows(worker, None, [SimpleNamespace(kind=SPARSE)])
    assert found(worker.recorder) == rows


class TestPendingCounts:
    """A copy that takes time, as from a device."""

    class Event:
        arrived = False

        def query(self) -> bool:
            return self.arrived

    @pytest.fixture
    def event(self, monkeypatch: pytest.MonkeyPatch) -> Event:
        event, begin = self.Event(), PendingCounts.__init__

        def late(self: PendingCounts, *args: Any) -> None:
            begin(self, *args)
            self._event = event  # type: ignore[assignment]

        monkeypatch.setattr(PendingCounts, "__init__", late)
        return event

    def test_what_arrives_is_of_one_moment(self, event: Event) -> None:
        recorder = make()
        recorder.count_pairs(1, full_index())
        recorder.count_rows({SPARSE: 1})
        assert recorder.samples() == {}
        pending = recorder._pending
        recorder.count_pairs(1, full_index())  # after that moment, on the host and on the device
        recorder.count_rows({SPARSE: 1})
        assert recorder.samples() == {}
        assert recorder._pending is pending
        event.arrived = True
        recorder._take_arrived()
        once = {"rows sparse": 1, "causal_pairs 1": CAUSAL, "kept_pairs 1": CAUSAL}
        assert shown(recorder._arrived) == once
        assert found(recorder) == {name: 2 * value for name, value in once.items()}

    def test_an_answer_that_nobody_came_back_for_is_not_the_next_one(self, event: Event) -> None:
        recorder = make()
        recorder.count_rows({DECODE_ROW: 1})
        assert recorder.samples() == {}
        recorder.count_rows({DECODE_ROW: 1})
        event.arrived = True
        assert found(recorder) == {"rows decode": 2}


@pytest.mark.gpu
def test_on_a_device() -> None:
    """Counts are queued behind the work that they describe, and nothing waits for either."""
    device = torch.device("cuda", 0)
    recorder, index = (
        Recorder(device, 2, ["on"]),
        random_index(random_batch([(0, 200)], 4, 2, 16, 16, device="cuda"), 64, 1.0),
    )
    torch.cuda.synchronize()
    for _ in range(4):
        torch.cuda._sleep(100_000_000)
        recorder.count_pairs(1, index)
    assert recorder.samples() == {}
    torch.cuda.synchronize()
    assert recorder.samples()["kept_pairs", ("1", "on")] == 4 * CAUSAL
