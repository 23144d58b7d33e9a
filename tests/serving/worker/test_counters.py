# SPDX-License-Identifier: Apache-2.0
"""A worker's counts: each row and pair once, all from the same moment, without waiting for the device."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.helpers.batches import random_batch, random_index
from tests.helpers.masks import mask_of
from vllm_sparse_backend.config.fallback import Fallback
from vllm_sparse_backend.serving.worker import counters
from vllm_sparse_backend.serving.worker.counters import Recorder, not_counting
from vllm_sparse_kernels.layer import Layer, layer_plan, run
from vllm_sparse_kernels.layer_inputs import LayerInputs
from vllm_sparse_kernels.methods.top_p.method import TopP
from vllm_sparse_kernels.share_counts import SHARE_FIELDS, SUM, UNIT, count_shares

CPU = torch.device("cpu")
SPARSE, DECODE, PADDING = ("sparse", None, "default"), ("decode", None, ""), ("padding", None, "default")
SHORT = ("dense", Fallback.TOO_SHORT, "default")
CAUSAL = 4 * 200 * 201 // 2


def make(**options: Any) -> Recorder:
    recorder = Recorder(CPU, **options)
    recorder.add_layers((1, 5), ("default", "fast"))
    return recorder


def full_index() -> Any:
    return random_index(random_batch([(0, 200)], 4, 2, 16, 16), 64, 1.0)


def found(recorder: Recorder, start: bool = True) -> dict[str, float]:
    """Return samples without times. The only label is the level if it is the server's default."""
    samples, _ = recorder.samples(start)
    keys = [" ".join([name, *labels]).removesuffix(" default").strip() for name, labels, _ in samples]
    return {key: value for key, (_, _, value) in zip(keys, samples)}


def test_rows_by_path_and_reason() -> None:
    recorder = make()
    assert found(recorder) == {}
    recorder.count_rows(SPARSE)
    recorder.count_rows(("sparse", None, "fast"))
    recorder.count_rows(SHORT, 3)
    for way in (DECODE, DECODE, SHORT, PADDING):
        recorder.count_rows(way)
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
        "tiles 1": 10, "tiles 5 fast": 5, "causal_pairs 1": 2 * causal, "causal_pairs 5 fast": causal,
        "kept_pairs 1": kept[0] + kept[1], "kept_pairs 5 fast": kept[2],
    }  # fmt: skip
    assert found(recorder) == expected
    recorder.count_pairs(1, indices[2])
    assert found(recorder) == expected | {"tiles 1": 15, "causal_pairs 1": 3 * causal, "kept_pairs 1": sum(kept)}


def test_ranks_share_a_layers_heads_but_not_its_rows_and_tiles() -> None:
    totals: dict[str, float] = {}
    for rank in range(4):
        recorder = make(is_first_rank=rank == 0)
        recorder.count_rows(SPARSE)
        recorder.count_pairs(1, full_index())
        for name, value in found(recorder).items():
            totals[name] = totals.get(name, 0) + value
    assert totals == {"rows sparse": 1, "tiles 1": 2, "causal_pairs 1": 4 * CAUSAL, "kept_pairs 1": 4 * CAUSAL}


def with_shares(*shares_of_rows: list[float]) -> Any:
    """Return an index whose rows have counted these shares."""
    index = full_index()
    counts = torch.zeros(len(shares_of_rows), SHARE_FIELDS.value, dtype=torch.int64)
    for line, shares in zip(counts, shares_of_rows, strict=True):
        count_shares(line, torch.tensor(shares), lifted=sum(share < 0.55 for share in shares))
    return replace(index, kept_shares=counts)


def test_kept_shares_by_level() -> None:
    """Buckets are cumulative, and count shares of all layers and rows."""
    recorder = make()
    recorder.count_pairs(1, full_index())
    assert not any("share" in key or "lifted" in key for key in found(recorder))
    recorder.count_pairs(1, with_shares([0.5, 0.75], [], [1.0]))
    recorder.count_pairs(5, with_shares([0.875]))
    recorder.count_pairs(5, with_shares([0.25]), level="fast")
    counts = {key: value for key, value in found(recorder).items() if "share" in key or "lifted" in key}
    at_most = {"0.25": 0, "0.5": 1, "0.6": 1, "0.7": 1, "0.8": 2, "0.9": 3, "0.95": 3, "+Inf": 4}
    expected = {f"kept_share default {end}": count for end, count in at_most.items()}
    expected |= {"kept_share default sum": 3.125, "kept_share_least": 0.5, "lifted_queries": 1}
    expected |= {f"kept_share fast {end}": 1 for end in at_most}
    expected |= {"kept_share fast sum": 0.25, "kept_share_least fast": 0.25, "lifted_queries fast": 1}
    assert counts == expected


def test_shares_of_the_score_variance_by_level() -> None:
    """Kept shares and these shares are counted apart."""
    recorder = make()
    recorder.count_pairs(1, replace(with_shares([0.5], [1.0]), variance_shares=with_shares([0.75, 0.875]).kept_shares))
    recorder.count_pairs(5, replace(full_index(), variance_shares=with_shares([0.97], [0.25]).kept_shares))
    recorder.count_pairs(5, replace(full_index(), variance_shares=with_shares([0.625]).kept_shares), level="fast")
    counts = {key: value for key, value in found(recorder).items() if "variance" in key}
    at_most = {"0.25": 1, "0.5": 1, "0.6": 1, "0.7": 1, "0.8": 2, "0.9": 3, "0.95": 3, "+Inf": 4}
    expected = {f"score_variance_share default {end}": count for end, count in at_most.items()}
    expected |= {"score_variance_share default sum": pytest.approx(2.845, abs=1e-4), "score_variance_share_least": 0.25}
    expected |= {f"score_variance_share fast {end}": float(float(end) >= 0.625) for end in [*at_most][:-1]}
    expected |= {"score_variance_share fast +Inf": 1, "score_variance_share fast sum": 0.625}
    assert counts == expected | {"score_variance_share_least fast": 0.625}
    assert found(recorder)["kept_share default +Inf"] == 2
    assert "kept_share fast +Inf" not in found(recorder)


def test_a_layer_of_low_rank_counts_its_shares() -> None:
    """One for each row and kv head; heads of 64 channels keep all of them, and have none."""
    for head_dim, expected in ((128, 2 * 2.0), (64, None)):
        batch, recorder = random_batch([(300, 200), (0, 130)], 4, 2, head_dim, 16), make()
        layer = Layer.of(layer_plan([TopP(channels="low_rank")] * 4), head_dim, CPU)
        inputs = LayerInputs(batch.q, batch.cache, batch.rows, batch.scale)
        recorder.count_pairs(1, run(layer, inputs, batch.empty_out()))
        samples = found(recorder)
        assert samples.get("score_variance_share default +Inf") == expected
        assert samples.get("score_variance_share_least", 0.5) < 1


class TestPendingCounts:
    """A copy that takes time, as from a device."""

    class Event:
        arrived = False

        def query(self) -> bool:
            return self.arrived

    @pytest.fixture
    def event(self, monkeypatch: pytest.MonkeyPatch) -> Event:
        event, start_copy = self.Event(), Recorder._start_copy

        def late(self: Recorder) -> None:
            start_copy(self)
            assert self._pending is not None
            self._pending.listed._event = event  # type: ignore[assignment]

        monkeypatch.setattr(Recorder, "_start_copy", late)
        return event

    def test_what_arrives_is_of_one_moment(self, event: Event) -> None:
        recorder = make()
        recorder.count_pairs(1, full_index())
        recorder.count_rows(SPARSE)
        assert recorder.samples() == ([], True)
        recorder.count_pairs(1, full_index())  # after that moment, on the host and on the device
        recorder.count_rows(SPARSE)
        assert recorder.samples() == ([], True)
        event.arrived = True
        once = {"rows sparse": 1, "tiles 1": 2, "causal_pairs 1": CAUSAL, "kept_pairs 1": CAUSAL}
        assert found(recorder, start=False) == once
        assert recorder.samples(start=False)[1] is False
        assert found(recorder) == {name: 2 * value for name, value in once.items()}

    def test_kept_shares_arrive_with_the_rest(self, event: Event) -> None:
        recorder = make()
        recorder.count_pairs(1, with_shares([0.5]))
        assert recorder.samples() == ([], True)
        recorder.count_pairs(1, with_shares([0.25]))
        event.arrived = True
        assert found(recorder, start=False)["kept_share_least"] == 0.5
        assert found(recorder)["kept_share_least"] == 0.25

    def test_an_answer_that_nobody_came_back_for_is_not_the_next_one(self, event: Event) -> None:
        recorder = make()
        recorder.count_rows(DECODE)
        assert recorder.samples() == ([], True)
        recorder.count_rows(DECODE)
        event.arrived = True
        assert found(recorder) == {"rows decode": 2}


class TestCountsPastSixtyFourBits:
    """A server that runs for years: messages between vLLM's processes cannot contain integers above 2^64."""

    MANY = 3 * 2**62

    def test_the_hosts(self) -> None:
        recorder = make()
        for _ in range(4):
            recorder.count("prefill_pairs", {}, self.MANY)
        assert found(recorder) == {"prefill_pairs": 4 * self.MANY}
        recorder.count("prefill_pairs", {}, 2**64)
        assert sent(recorder.samples()) == [[["prefill_pairs", [], float(4 * self.MANY + 2**64)]], False]

    def test_the_devices(self) -> None:
        """The device's counters are signed 64-bit integers."""
        recorder = make()
        recorder.count_pairs(1, full_index())
        counted = []
        for _ in range(8):
            recorder._listed += self.MANY  # wraps around
            counted.append(found(recorder)["kept_pairs 1"])
        assert counted == [float(CAUSAL + n * self.MANY) for n in range(1, 9)]
        ((_, _, kept),) = (sample for sample in sent(recorder.samples())[0] if sample[0] == "kept_pairs")
        assert kept == counted[-1]

    def test_the_devices_sum_of_shares(self) -> None:
        recorder = make()
        recorder.count_pairs(1, with_shares([0.5]))
        for n in range(1, 9):
            recorder._shares[0, SUM.value] += self.MANY  # wraps around
            assert found(recorder)["kept_share default sum"] == 0.5 + n * self.MANY / UNIT.value
        assert found(recorder)["kept_share_least"] == 0.5

    def test_layers_that_come_later(self) -> None:
        recorder = make()
        recorder.count_pairs(1, full_index())
        assert found(recorder)["kept_pairs 1"] == CAUSAL
        recorder.add_layers((7,), ("default", "later"))
        recorder.count_pairs(7, full_index())
        recorder.count_pairs(7, with_shares([0.5]), level="later")
        assert found(recorder)["kept_share_least later"] == 0.5
        assert (found(recorder)["kept_pairs 1"], found(recorder)["kept_pairs 7"]) == (CAUSAL, CAUSAL)


def sent(answer: Any) -> Any:
    """Return an engine's answer as its server receives it."""
    serial_utils = pytest.importorskip("vllm.v1.serial_utils", reason="needs vLLM")
    buffers = serial_utils.MsgpackEncoder().encode(serial_utils.UtilityResult(answer))
    return serial_utils.MsgpackDecoder(serial_utils.UtilityResult).decode(buffers).result


def test_a_dummy_run_within_another_ends_only_itself() -> None:
    """The methods of a worker that run for no request may call each other (see test_model_layers.py)."""
    with not_counting():
        with pytest.raises(RuntimeError), not_counting():
            raise RuntimeError
        assert not counters.is_counting()
    assert counters.is_counting()


@pytest.mark.gpu
def test_on_a_device() -> None:
    """Counts are queued behind the work that they describe, and nothing waits for either."""
    device = torch.device("cuda", 0)
    recorder, index = Recorder(device), random_index(random_batch([(0, 200)], 4, 2, 16, 16, device="cuda"), 64, 1.0)
    recorder.add_layers([1])
    torch.cuda.synchronize()
    for _ in range(4):
        torch.cuda._sleep(100_000_000)
        recorder.count_pairs(1, index)
    assert recorder.samples() == ([], True)
    torch.cuda.synchronize()
    samples, behind = recorder.samples(start=False)
    assert not behind
    assert ("kept_pairs", ["1", "default"], 4 * CAUSAL) in samples


class TestMore:
    def test_counters_and_gauges_of_others(self) -> None:
        recorder = make()
        place = {"layer": 3, "level": "default"}
        recorder.gauge("guard_error", place, 0.25)
        recorder.gauge("guard_error", place, 0.5)
        recorder.count("guard_checks", place)
        recorder.count("guard_checks", place, 2)
        assert found(recorder) == {"guard_error 3": 0.5, "guard_checks 3": 3}

    def test_none_that_is_not_in_the_table(self) -> None:
        for name, labels in (("guard_mistake", {"layer": 1}), ("guard_checks", {"layer": 1}), ("guard_error", {})):
            with pytest.raises(ValueError, match=f"given gauge '{name}'"):
                make().gauge(name, labels, 1.0)
