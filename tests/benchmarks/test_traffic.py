# SPDX-License-Identifier: Apache-2.0
"""Programs for traffic give all servers the same load, never two at a time, and report the servers' real ratio."""

import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from benchmarks import open_loop
from benchmarks.agents import Agents
from benchmarks.open_loop import Answered, Capacity, Latency, Request
from benchmarks.traffic import ratio_with_error
from benchmarks.turns import Turns, slope
from tests.helpers.stub_server import Api, Send, running
from vllm_sparse_backend.demo.model import BUNDLED
from vllm_sparse_backend.evaluation.client import Endpoint
from vllm_sparse_backend.evaluation.report import BenchError

BLOCK = 16
CACHE_METRICS = """# TYPE vllm:prefix_cache_queries counter
vllm:prefix_cache_queries_total{{engine="0"}} {total}
# TYPE vllm:prefix_cache_hits counter
vllm:prefix_cache_hits_total{{engine="0"}} {cached}
"""


class CachingServer(Api):
    """Prefills one request at a time, at a speed for new tokens, and caches whole blocks."""

    url: str

    def __init__(self, tokens_per_s: float) -> None:
        self.tokens_per_s, self.cached, self.total = tokens_per_s, 0, 0
        self.blocks: set[int] = set()
        self.lock = threading.Lock()
        self.prompts: list[tuple[float, list[int]]] = []
        self.busy: list[tuple[float, float]] = []

    def metrics(self) -> str:
        return CACHE_METRICS.format(total=self.total, cached=self.cached)

    def stream(self, body: dict[str, Any], send: Send) -> None:
        prompt, began = body["prompt"], time.perf_counter()
        self.prompts.append((began, prompt))
        with self.lock:
            hashes = [hash(tuple(prompt[:end])) for end in range(BLOCK, len(prompt) + 1, BLOCK)]
            cached = BLOCK * sum(block in self.blocks for block in hashes)
            self.blocks |= set(hashes)
            self.cached, self.total = self.cached + cached, self.total + len(prompt)
            time.sleep((len(prompt) - cached) / self.tokens_per_s)
        super().stream(body, send)
        self.busy.append((began, time.perf_counter()))


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.json"
    path.write_text(json.dumps([{"ids": list(range(3000))}]))
    return path


@pytest.fixture
def servers() -> Iterator[dict[str, CachingServer]]:
    stubs = {"stock": CachingServer(20_000), "ours": CachingServer(40_000)}
    with ExitStack() as stack:
        for stub in stubs.values():
            stub.url = stack.enter_context(running(stub))
        yield stubs


def require_one_at_a_time(servers: dict[str, CachingServer]) -> None:
    busy = sorted((began, ended, name) for name, stub in servers.items() for began, ended in stub.busy)
    for (_, ended, name), (began, _, other) in pairwise(busy):
        assert name == other or began >= ended


def test_agents(prompts: Path, servers: dict[str, CachingServer], tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    agents = Agents(
        prompts=prompts, settings=[f"{name}={stub.url}" for name, stub in servers.items()], to="3000", start=400,
        growth="100,600", sessions=3, tokens=2, rounds=2, out=out,
    )  # fmt: skip
    agents.run()
    stock, ours = (sorted(prompt for _, prompt in stub.prompts) for stub in servers.values())
    assert stock == ours
    require_one_at_a_time(servers)
    row = json.loads(out.read_text())["rows"][0]
    assert row["stock ÷ ours"] == pytest.approx(row["stock"] / row["ours"])
    with pytest.raises(BenchError, match="use another --seed"):
        agents.run()  # the servers have cached these texts


def test_agents_count_the_turns_that_all_servers_completed(
    prompts: Path, servers: dict[str, CachingServer], tmp_path: Path
) -> None:
    servers["stock"].tokens_per_s, out = 4_000, tmp_path / "out.json"
    Agents(
        prompts=prompts, settings=[f"{name}={stub.url}" for name, stub in servers.items()], to="3000", start=400,
        growth="100,200", sessions=3, tokens=2, budget=3.0, out=out,
    ).run()  # fmt: skip
    (row, *_) = json.loads(out.read_text())["rows"]
    assert row["turns"] == f"{len(servers['stock'].prompts) - 3} of {len(servers['ours'].prompts) - 3}"
    assert len(servers["stock"].prompts) < len(servers["ours"].prompts)


def test_open_loop_arrivals(prompts: Path, servers: dict[str, CachingServer]) -> None:
    """All servers get the same requests in the same order, and no request waits for an answer."""
    servers["stock"].tokens_per_s = 1_000
    Latency(
        prompts=prompts, settings=[f"{name}={stub.url}" for name, stub in servers.items()], capacity=20, at="1",
        seconds=2, short="50,200", long="500,1000", long_share=0.2, tokens=2,
    ).run()  # fmt: skip
    require_one_at_a_time(servers)
    stock, ours = (sorted(prompt for _, prompt in stub.prompts) for stub in servers.values())
    assert stock == ours
    last_arrival = max(at for at, _ in servers["stock"].prompts)
    assert sum(ended > last_arrival for _, ended in servers["stock"].busy) > len(stock) / 2


def test_capacity(prompts: Path, servers: dict[str, CachingServer], monkeypatch: pytest.MonkeyPatch) -> None:
    """The interval that bisection finds contains the rate above which a server is too slow."""

    def send_all(endpoint: Endpoint, requests: Sequence[Request], tokens: int, most_slow: float) -> list[Answered]:
        return [Answered(request, 0.0, 9.0 if len(requests) > 3 * 200 else 1.0) for request in requests]

    monkeypatch.setattr(open_loop, "send_all", send_all)
    capacity = Capacity(
        prompts=prompts, settings=[f"stock={servers['stock'].url}"], seconds=200, short="1,2", long="3,4"
    )
    *_, row = capacity.trials()
    low, high = row["holds"], row["does not hold"]
    assert low < high <= 1.05 * low
    assert low == pytest.approx(3, rel=0.1)


def test_errors_of_ratios() -> None:
    """Servers that differ by the same factor in each session have no error, however much sessions differ."""
    stock = [[1.0, 2.0], [30.0], [5.0]]
    ours = [[second / 2 for second in session] for session in stock]
    assert ratio_with_error(stock, ours, sum) == (2, 0)


def test_conversations(tmp_path: Path) -> None:
    """Fresh questions ask for facts of their turn, old questions for facts before it."""
    text = tmp_path / "text.txt"
    text.write_text("The old ship left the harbor in the morning. " * 400)
    turns = Turns(
        model=BUNDLED, text=text, settings=[], conversations=2, turns=3, start=600, growth=400, questions=6
    )  # fmt: skip
    for conversation in turns.draw():
        begin = conversation.turns[0].end
        for turn in conversation.turns[1:]:
            before, part = (" ".join(map(str, conversation.token_ids[a:b])) for a, b in ((0, begin), (begin, turn.end)))
            answers = [" ".join(map(str, question.answer_ids)) for question in turn.questions]
            assert [answer in part for answer in answers] == [True] * 3 + [False] * 3
            assert [answer in before for answer in answers] == [False] * 3 + [True] * 3
            assert all(begin < place < turn.end for place in turn.places)
            begin = turn.end
        assert begin == len(conversation.token_ids) == 600 + 3 * 400


def test_slope() -> None:
    change, error = slope([[0.0, 1.0, 2.0], [5.0, 8.0, 11.0]])
    assert (change, error) == (pytest.approx(2), pytest.approx(1))
