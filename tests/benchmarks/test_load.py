# SPDX-License-Identifier: Apache-2.0
"""`benchmarks.load`: the requests that `vllm bench serve` sends, and the figures from its output."""

from collections import Counter
from pathlib import Path

import pytest

from benchmarks import load
from benchmarks.figures import of_serve
from benchmarks.load import Mix
from tests.helpers.stub_server import SimulatedClock, Stub, running
from vllm_sparse_backend.evaluation.client import Endpoint
from vllm_sparse_backend.evaluation.report import Report


def test_what_failed_is_not_counted_and_gives_no_figures(monkeypatch):
    def send(to, mix, texts):
        slow = 4.0 if to.name == "stock" else 1.0
        return {
            "errors": ["Traceback\nOSError: gone" if fault else "", "", "", ""], "output_lens": [3] * 4,
            "ttfts": [0.1 * slow] * 4, "itls": [[0.01 * slow] * 2] * 4, "start_times": [5.0, 6.0, 7.0, 8.0],
            "input_lens": [len(text) for text in texts],
        }  # fmt: skip

    monkeypatch.setattr(load, "send", send)
    mix = Mix(4, 2.0, (30,), (500,), output_tokens=3)
    for fault in (False, True):
        report = Report("serve", "here")
        with running(Stub("stock", [], lambda n: 0, SimulatedClock())) as url:
            servers = [(name, Endpoint.connect(name, url)) for name in ("stock", "ours")]
            load.compare(servers, mix, None, report)
        stock, ours = report.cases
        assert (stock["server"], ours["answered"], ours["failures"]) == ("stock", 4 - fault, fault)
        assert ours["said"] == ["OSError: gone"] * fault
        figures = {name: value for name, value, *_ in of_serve(report.cases)}
        if fault:
            assert figures == {}
        else:
            name = "vllm serve, ours, mixed load: p99 of short requests' TTFT, speed-up"
            assert figures[name] == pytest.approx(4)


def test_a_mix_has_its_share_of_long_prompts_and_the_rate_that_is_asked():
    mix = Mix(4000, 5.0, (10, 20), (100,), long_share=0.25, output_tokens=7, seed=3)
    assert mix.lengths() == mix.lengths()
    assert Counter(mix.lengths())[100, True] == 1000
    assert {tokens for tokens, long in mix.lengths() if not long} == {10, 20}
    assert Counter(long for _, long in Mix(2, 1.0, (10,), (100,), long_share=0.9).lengths()) == {True: 1, False: 1}
    endpoint = Endpoint("ours", "http://x", "m", extra={"cache_salt": "s"})
    args = load.arguments(endpoint, mix, 4000, Path("r.jsonl"), Path("f/out.json"))
    assert {"--request-rate", "5", '{"cache_salt": "s"}'} <= set(args)
    closed = load.arguments(endpoint, Mix(1, None, (1,), (1,), clients=3), 1, Path("r.jsonl"), Path("f/out.json"))
    assert "--request-rate" not in closed
    assert closed[closed.index("--max-concurrency") + 1] == "3"
