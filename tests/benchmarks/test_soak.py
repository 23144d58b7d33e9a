# SPDX-License-Identifier: Apache-2.0
"""The soak's requests, and its checks of answers and counters, against a stub."""

import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import counters, soak as module
from benchmarks.counters import Counts, Sent, Served
from benchmarks.figures import Report
from benchmarks.shape import make_shape
from benchmarks.soak import Asking, add_figures, lines, soak_and_check
from vllm_sparse_backend.evaluation.client import Prompts, TimedAnswer
from vllm_sparse_backend.evaluation.report import BenchError

SETTINGS = {"method": "a_shape", "min_tokens": 256, "min_query_tokens": 64, "dense_layers": [1]}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served.of(SETTINGS, make_shape(tmp_path_factory.mktemp("shape"), 3, 4096), "a card", {"hopper"}, 512)


class CountingServer:
    """Stands in for an Endpoint: answers, adds the counts expected of separate requests, and shows them.

    ``off`` names a fault to add.
    """

    url = "http://here"

    def __init__(self, served: Served, off: str = "") -> None:
        self.served, self.off, self.counts, self.lock = served, off, Counts(), threading.Lock()

    def ask(self, prompt: list[int], max_tokens: int, stop_after: int | None = None, **more: Any) -> TimedAnswer:
        level = more.get("vllm_xargs", {}).get("sparse_prefill")
        time.sleep(0.001)
        with self.lock:
            self.counts.add(self.served.expected(Sent(len(prompt), max_tokens, level)))
            self.counts.tiles[2] += self.off == "tiles"
            self.counts.rows["decode", ""] += 1000 * (self.off == "rows")
        return TimedAnswer(0.001, 0.002, max_tokens if stop_after is None else min(stop_after, max_tokens))

    def metrics(self) -> str:
        with self.lock:
            samples = [("up", "", 1), ("layers", 'attention="hopper"', 2), ("layers", 'attention="dense"', 1)]
            samples += [("compilations_total", 'when="serving"', int(self.off == "compiled"))]
            samples += [("guard_trips_total", 'layer="0"', int(self.off == "tripped"))]
            samples += [("device_bytes", 'rank="0"', 10**9)]
            for (path, reason), count in self.counts.rows.items():
                samples.append(("rows_total", f'path="{path}",reason="{reason}"', count))
            for name, tally in (("tiles", self.counts.tiles), ("causal_pairs", self.counts.causal_pairs)):
                samples += [(f"{name}_total", f'layer="{layer}"', count) for layer, count in tally.items()]
        return "".join(f"sparse_prefill_{name}{{{labels}}} {value}\n" for name, labels, value in samples)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(module, "SAMPLE_S", 0.05)
    monkeypatch.setattr(module, "SCRAPE_S", 0.1)


class TestCounters:
    """Soak runs against a server whose counters are right or wrong."""

    ASKING = Asking(1.0, clients=3, shortest=8, longest=2000, levels=(None, 0, 1), most_output_tokens=4)

    def checked(self, server: CountingServer, served: Served | None) -> module.Checked:
        return soak_and_check(server, self.ASKING, Prompts(range(3000)), None, served)  # type: ignore[arg-type]

    def test_that_fit(self, served: Served, tmp_path: Path) -> None:
        done = self.checked(CountingServer(served), served)
        assert done.problems == []
        assert done.audit is not None
        assert done.audit.num_requests == 12
        assert done.audit.counted.tiles.keys() == {0, 2}  # layer 1 is dense
        assert {reason for _, reason in done.audit.counted.rows} == {"", "requested", "too_short", "short_query"}
        assert len(done.bounds) == 4
        assert {taken for _, taken in done.outcome.device_bytes} == {10**9}
        done.outcome.device_bytes = [(i / 10, 10**9) for i in range(10)]  # a busy machine may have too few samples
        report = Report("soak", "here", None, tmp_path / "figures.json")
        add_figures(report, self.ASKING, done, "a stub")
        figures = {name.partition(" s: ")[2]: figure for name, figure in report.figures.items()}
        assert (figures["errors"]["value"], figures["errors"]["bar"]) == (0, 0)
        audited = figures["counters that differ from what was sent, in the audit"]
        assert (audited["value"], audited["bar"]) == (0, 0)
        assert "growth of the memory of its devices" in figures
        assert any("0 counters differ" in line for line in lines(self.ASKING, done))

    def test_a_load_ends_after_its_number_of_requests(self, served: Served) -> None:
        asking = replace(self.ASKING, seconds=60.0, most_requests=7)
        done = soak_and_check(CountingServer(served), asking, Prompts(range(3000)), None)  # type: ignore[arg-type]
        assert (done.outcome.num_requests, done.problems) == (7, [])

    def test_a_load_goes_on_until_it_has_its_number_of_requests(self, served: Served) -> None:
        asking = replace(self.ASKING, seconds=0.0, least_requests=7)
        done = soak_and_check(CountingServer(served), asking, Prompts(range(3000)), None)  # type: ignore[arg-type]
        assert 7 <= done.outcome.num_requests < 7 + asking.clients
        assert done.problems == []

    def test_that_are_off(self, served: Served) -> None:
        (tiles, *_) = self.checked(CountingServer(served, "tiles"), served).problems
        assert tiles.startswith("audit at level None: tiles 2: counted 20, expected 16")
        (rows, *_) = self.checked(CountingServer(served, "rows"), None).problems
        assert rows.startswith("decode rows: ")

    @pytest.mark.parametrize(
        ("off", "said"),
        [("compiled", "kernels compiled while serving"), ("tripped", "layers that the guard turned dense")],
    )
    def test_what_must_never_happen(self, served: Served, off: str, said: str) -> None:
        assert self.checked(CountingServer(served, off), None).problems == [f"{said}: 1, expected none"]

    @pytest.mark.parametrize(
        ("page", "said"),
        [("", "no counters of ours"), ("sparse_prefill_up 0\n", "1 engines that did not answer")],
    )
    def test_other_servers_are_refused(
        self, monkeypatch: pytest.MonkeyPatch, served: Served, page: str, said: str
    ) -> None:
        monkeypatch.setattr(counters, "LOOKS", 1)
        monkeypatch.setattr(counters.time, "sleep", lambda seconds: None)
        server = CountingServer(served)
        monkeypatch.setattr(server, "metrics", lambda: page)
        with pytest.raises(BenchError, match=said):
            self.checked(server, None)


def test_growth() -> None:
    """Growth is measured after warm-up, by medians of halves. Missing samples are left out."""
    samples = [(float(i), 500 if i < 25 else 1000 + i) for i in range(101)]
    assert module.growth(samples, 100.0) == pytest.approx(1081 / 1043.5 - 1, abs=1e-3)
    assert module.growth(samples[:26] + samples[80:], 100.0) == pytest.approx(1095.5 / 1085 - 1, abs=1e-3)
    assert module.growth(samples[:26], 100.0) is None


@pytest.mark.parametrize(("by", "expected_problems"), [(10, ["the server's memory grew by"]), (0, [])])
def test_memory_that_grows(
    monkeypatch: pytest.MonkeyPatch, served: Served, by: int, expected_problems: list[str]
) -> None:
    """Twenty samples of the server's memory in the load's time, on a machine of any load."""

    def watch(
        samples: module.Samples, look: Callable[[], int], every_s: float, began: float, over: threading.Event
    ) -> None:
        samples += [(i / 20, look()) for i in range(20)]

    monkeypatch.setattr(module, "LEAST_S_TO_GROW", 1.0)
    monkeypatch.setattr(module, "_watch", watch)
    taken = itertools.count(100, by)
    asking = TestCounters.ASKING
    done = soak_and_check(CountingServer(served), asking, Prompts(range(3000)), taken.__next__)  # type: ignore[arg-type]
    assert [problem[:27] for problem in done.problems] == expected_problems


class TestExpected:
    """Expected counts worked out by hand: chunks of 512, 256 dense tokens, at least 64 new tokens."""

    def test_chunks_of_a_prompt(self, served: Served) -> None:
        counts = served.expected(Sent(1100, 3))
        assert counts.rows == {("sparse", ""): 3, ("decode", ""): 2}
        assert counts.tiles == {0: 2 + 4 + 1, 2: 2 + 4 + 1}
        assert counts.causal_pairs[0] == 32 * sum(range(257, 1101)) == counts.causal_pairs[2]
        assert served.most_pairs(1100, None) == counts.causal_pairs[0]

    @pytest.mark.parametrize(
        ("sent", "cached", "rows"),
        [
            (Sent(256, 1), 0, {("dense", "too_short"): 1}),
            (Sent(319, 1), 0, {("dense", "short_query"): 1}),
            (Sent(320, 1), 0, {("sparse", ""): 1}),
            (Sent(1, 2), 0, {("decode", ""): 2}),
            (Sent(513, 1), 0, {("sparse", ""): 1, ("decode", ""): 1}),
            (Sent(1100, 1, 0), 0, {("dense", "requested"): 3}),
            (Sent(1100, 1, 1), 1088, {("dense", "short_query"): 1}),
            (Sent(1100, 1, "exact"), 592, {("dense", "requested"): 1}),
            (Sent(1100, 1), 560, {("sparse", ""): 1, ("dense", "short_query"): 1}),
        ],
    )
    def test_rows(self, served: Served, sent: Sent, cached: int, rows: dict[tuple[str, str], int]) -> None:
        assert served.expected(sent, cached).rows == rows
