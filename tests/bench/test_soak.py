# SPDX-License-Identifier: Apache-2.0
"""What the soak sends, and what it makes of answers, against a stub."""

import pytest

from tests.bench.stub import Stub, running
from vllm_sparse_backend.bench import soak as module
from vllm_sparse_backend.bench.endpoint import Endpoint, Prompts
from vllm_sparse_backend.bench.report import Report
from vllm_sparse_backend.bench.soak import Asking, Client, Outcome, add_figures, lines, soak


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(module, "SAMPLE_S", 0.05)


def requests(seed: int, count: int = 400):
    asking = Asking(1.0, 4, 4, 1024, levels=(None, 0, "fast"), abort_share=0.25, seed=seed)
    prompts = Prompts(range(5000))
    client = Client(asking, [prompts.take(1024) for _ in range(3)], prompts, 0)
    return [client.next() for _ in range(count)], client.prefixes


def test_requests_are_of_all_kinds_and_alike_for_a_seed():
    drawn, prefixes = requests(3)
    assert drawn == requests(3)[0]
    assert drawn != requests(4)[0]
    lengths = [len(one.prompt) for one in drawn]
    assert (min(lengths), max(lengths)) >= (4, 900)
    assert max(lengths) <= 1024
    assert 0.3 < sum(n < 64 for n in lengths) / len(drawn) < 0.7  # as many short ones as long ones
    assert {one.level for one in drawn} == {None, 0, "fast"}
    assert 0.15 < sum(one.stop_after is not None for one in drawn) / len(drawn) < 0.35
    shared = sum(any(one.prompt[:3] == prefix[:3] for prefix in prefixes) for one in drawn)
    assert 0.3 < shared / len(drawn) < 0.7


def test_faults_are_told_and_counted(tmp_path):
    """Prompts of some lengths are answered with an error, with too few tokens, or not at all."""
    log: list[tuple[str, list[int]]] = []
    faults = {0: "error", 1: "short", 2: "refuse"}
    with running(Stub("ours", log, lambda length: 0.001, fault=lambda length: faults.get(length % 10))) as url:
        endpoint = Endpoint.connect("ours", url)
        asking = Asking(1.0, clients=3, shortest=8, longest=64, abort_share=0.0, most_output_tokens=4)
        outcome = soak(endpoint, asking, Prompts(range(3000)), lambda: 1000)
    assert outcome.num_requests == len(log) + sum("400" in error for error in outcome.errors)
    expected = sum(len(prompt) % 10 in (0, 1) for _, prompt in log)
    assert len([error for error in outcome.errors if "400" not in error]) == expected > 0
    assert outcome.growth(1.0) == 0
    report = Report("soak", "here", None, tmp_path / "figures.json")
    assert add_figures(report, asking, outcome) == outcome.errors[: module.MOST_SHOWN]
    assert f"{len(outcome.errors)} errors" in lines(asking, outcome)[0]


def test_broken_off_requests_close_their_connection():
    log: list[tuple[str, list[int]]] = []
    with running(Stub("ours", log, lambda length: 0.001, token_s=0.2)) as url:
        endpoint = Endpoint.connect("ours", url)
        assert endpoint.ask([1] * 20, 50, stop_after=2).tokens == 2
        assert endpoint.ask([1] * 20, 1, stop_after=2).tokens == 1


def test_memory_that_grows(tmp_path):
    outcome = Outcome(resident_bytes=[(float(i), 500 if i < 25 else 1000 + i) for i in range(101)])
    outcome.asked["None"] = 1
    assert outcome.growth(100.0) == pytest.approx(1081 / 1043.5 - 1, abs=1e-3)
    report = Report("soak", "here", None, tmp_path / "figures.json")
    (problem,) = add_figures(report, Asking(100.0, 1, 1, 2), outcome)
    assert "memory grew by 3." in problem
    assert Outcome().growth(100.0) is None
    assert add_figures(report, Asking(100.0, 1, 1, 2), Outcome()) == ["no request was sent"]
