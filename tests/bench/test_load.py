# SPDX-License-Identifier: Apache-2.0
"""`benchmarks.load`: what is sent by `vllm bench serve`, and what is made of its answers."""

import importlib.util
import json
from collections import Counter
from pathlib import Path

import pytest

from benchmarks import load
from benchmarks.figures import of_serve
from benchmarks.load import Mix
from benchmarks.tiny import make_model
from tests.bench.stub import Stub, running
from vllm_sparse_backend.measure.client import Endpoint
from vllm_sparse_backend.measure.report import Report


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
        with running(Stub("stock", [], lambda n: 0)) as url:
            servers = [(name, Endpoint.connect(name, url)) for name in ("stock", "ours")]
            load.compare(servers, mix, None, report)
        stock, ours = report.cases
        assert (stock["server"], ours["answered"], ours["failures"]) == ("stock", 4 - fault, fault)
        assert ours["said"] == ["OSError: gone"] * fault
        figures = {name: value for name, value, *_ in of_serve(report.cases)}
        if fault:
            assert figures == {}
        else:
            name = "vllm serve, ours, mixed load: p99 of short requests' first token, times sooner"
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


@pytest.mark.full
@pytest.mark.skipif(
    importlib.util.find_spec("pandas") is None, reason="`vllm bench serve` needs pandas for such a load"
)
def test_vllms_own_command_sends_the_load(tmp_path):
    """To a stub: the same prompts, with what goes with each request, and what it writes is read."""
    pytest.importorskip("vllm")
    model = make_model(tmp_path / "model")

    class Served(Stub):
        root = model

        def stream(self, body, send):
            assert body["cache_salt"] == "s"
            assert body["ignore_eos"] is True
            super().stream(body, send)
            usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}
            send(f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n".encode())

    log, mix = [], Mix(6, None, (20,), (300,), output_tokens=4, clients=2)
    with running(Served("ours", log, lambda n: 0.3 if n > 100 else 0.02)) as url:
        endpoint = Endpoint("ours", url, "stub-model", str(model), {"cache_salt": "s"})
        texts = ["x" * tokens for tokens, _ in mix.lengths()]
        is_long = [long for _, long in mix.lengths()]
        case = load.summary(load.send(endpoint, mix, texts), is_long, 4)
    assert sorted(len(prompt) for _, prompt in log) == sorted(map(len, texts))
    assert (case["answered"], case["failures"], case["said"]) == (6, 0, [])
    assert case["long_p50_s"] > 0.3
    assert case["span_s"] > 0.3 * sum(is_long)
    assert case["tokens_per_s"] == pytest.approx((sum(map(len, texts)) + 24) / case["span_s"])
