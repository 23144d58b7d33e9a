# SPDX-License-Identifier: Apache-2.0
"""The server's side of the counters: asking engines, adding up, and standing on /metrics beside what is there."""

import asyncio
import gzip
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from vllm_sparse_backend.serving import metrics_page
from vllm_sparse_backend.serving.metrics_page import MetricsMiddleware, MetricsPage
from vllm_sparse_backend.settings.metrics import METRICS, WORKER_METHOD

DOCS = Path(__file__).parents[1] / "docs/metrics.md"
MODEL = "some/model"
Samples = list[tuple[str, list[str], float]]


def worker(rank: int, samples: Samples, behind: bool = False) -> dict[str, Any]:
    return {"rank": rank, "behind": behind, "samples": samples}


class Client:
    """Of a server: its engines' answers, by number, each a list of workers' answers or a function of ``start``."""

    def __init__(self, engines: dict[int, Any], method: str = WORKER_METHOD) -> None:
        self.engines, self.method = engines, method
        self.asked: list[tuple[int, bool]] = []
        self.engine_core = SimpleNamespace(
            engine_ranks_managed=list(engines),
            core_engines=[number.to_bytes(2, "little") for number in engines],
            _call_utility_async=self._call,
        )

    async def collective_rpc(self, method: str, timeout: float | None, args: tuple[bool]) -> Any:
        """As vLLM's: of the first engine alone."""
        return await self._answer(next(iter(self.engines)), method, args)

    async def _call(self, utility: str, method: str, timeout: None, args: Any, kwargs: None, engine: bytes) -> Any:
        assert utility == "collective_rpc"
        return await self._answer(int.from_bytes(engine, "little"), method, args)

    async def _answer(self, engine: int, method: str, args: tuple[bool]) -> Any:
        assert method == self.method
        self.asked.append((engine, *args))
        answer = self.engines[engine]
        return (await answer(*args)) if callable(answer) else answer


def open_page(client: Client, interval_s: float = 0.001) -> MetricsPage:
    page = MetricsPage()
    page.open(client, MODEL, interval_s)
    return page


def values(text: bytes) -> dict[str, float]:
    """Samples as they stand on the page, less the prefix and the model's name, which all of ours have."""
    found = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            assert sample.labels.pop("model_name", MODEL) == MODEL
            labels = ",".join(f"{name}={sample.labels[name]}" for name in sorted(sample.labels))
            found[f"{sample.name.removeprefix('sparse_prefill_')}{{{labels}}}"] = sample.value
    return found


def read(client: Client) -> dict[str, float]:
    return values(asyncio.run(open_page(client).text()))


def test_workers_of_an_engine_add_up_but_for_what_each_has_of_its_own() -> None:
    first: Samples = [("kept_pairs", ["3", "default"], 10), ("tiles", ["3", "default"], 2), ("arena_bytes", [], 7)]
    first.append(("rows", ["sparse", "", "default"], 1))
    second: Samples = [("kept_pairs", ["3", "default"], 5), ("kept_pairs", ["3", "fast"], 1), ("arena_bytes", [], 8)]
    client = Client({0: [worker(0, first), worker(1, second)]})
    assert read(client) == {
        "kept_pairs_total{engine=0,layer=3,level=default}": 15,
        "kept_pairs_total{engine=0,layer=3,level=fast}": 1,
        "tiles_total{engine=0,layer=3,level=default}": 2,
        "rows_total{engine=0,level=default,path=sparse,reason=}": 1,
        "arena_bytes{engine=0,rank=0}": 7,
        "arena_bytes{engine=0,rank=1}": 8,
        "up{engine=0}": 1,
    }


@pytest.mark.parametrize("first_counts", [True, False], ids=["", "a first stage without a layer that can go sparse"])
def test_rows_are_those_of_the_first_pipeline_stage_that_counts_any(first_counts: bool) -> None:
    stages: list[Samples] = [
        [("rows", ["sparse", "", "fast"], 3), ("rows", ["decode", "", ""], 9)]
        if first_counts
        else [("arena_overflows", [], 0)],
        [],  # another tensor-parallel rank
        [("rows", ["sparse", "", "fast"], 2), ("rows", ["decode", "", ""], 8), ("arena_overflows", [], 2)],
    ]
    workers = [worker(rank, samples) for rank, samples in enumerate(stages)]
    found = read(Client({0: workers[::-1]}))
    assert found["rows_total{engine=0,level=fast,path=sparse,reason=}"] == (3 if first_counts else 2)
    assert found["rows_total{engine=0,level=,path=decode,reason=}"] == (9 if first_counts else 8)
    assert found["arena_overflows_total{engine=0}"] == 2


def test_every_engine_is_asked_and_bears_its_number() -> None:
    """``collective_rpc`` of a data-parallel server hands on one engine's answer."""
    client = Client({2: [worker(0, [("arena_overflows", [], 1)])], 3: [worker(0, [("arena_overflows", [], 4)])]})
    assert read(client) == {
        "arena_overflows_total{engine=2}": 1, "up{engine=2}": 1, "arena_overflows_total{engine=3}": 4, "up{engine=3}": 1
    }  # fmt: skip
    assert sorted(client.asked) == [(2, True), (3, True)]


def test_counts_on_their_way_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_page, "LOOKS_S", (0.0, 0.0, 0.0))
    left = [2]

    async def answer(start: bool) -> list[dict[str, Any]]:
        left[0] -= 1
        return [worker(0, [("arena_overflows", [], 9 if left[0] < 0 else 1)], behind=left[0] >= 0)]

    client = Client({0: answer})
    assert read(client)["arena_overflows_total{engine=0}"] == 9
    assert client.asked == [(0, True), (0, False), (0, False)]
    left[0] = 100  # a device that is busy for longer: what had arrived before
    assert read(client)["arena_overflows_total{engine=0}"] == 1


def test_an_engine_that_does_not_answer_says_nothing_and_what_it_says_late_is_not_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metrics_page, "TIMEOUT_S", 0.05)
    stuck = asyncio.Event()
    calls = []

    async def second(start: bool) -> list[dict[str, Any]]:
        calls.append(start)
        number = len(calls)
        if number == 2:
            await stuck.wait()
        if number == 4:
            raise RuntimeError("the engine is dead")
        return [worker(0, [("arena_overflows", [], number)])]

    async def scrapes() -> list[dict[str, float]]:
        page = open_page(Client({0: [worker(0, [("arena_overflows", [], 1)])], 1: second}))
        found = [values(await page.text()) for _ in range(3)]
        assert len(calls) == 2  # while an answer is late it is not asked for again
        stuck.set()
        return [*found, *[values(await page.text()) for _ in range(3)]]

    found = asyncio.run(scrapes())
    assert [page["up{engine=1}"] for page in found] == [1, 0, 0, 1, 0, 1]
    assert [page.get("arena_overflows_total{engine=1}") for page in found] == [1, None, None, 3, None, 5]
    assert all(page["up{engine=0}"] == page["arena_overflows_total{engine=0}"] == 1 for page in found)


def test_no_counter_falls_from_one_process_of_a_server_to_the_next() -> None:
    """Though an answer is under way in one of them that is older than what the other told meanwhile."""
    asked = 0

    async def engine(start: bool) -> list[dict[str, Any]]:
        nonlocal asked
        asked += 1
        told = asked
        await asyncio.sleep(0.2 if told == 1 else 0)
        return [worker(0, [("arena_overflows", [], told)])]

    async def scrapes() -> list[float]:
        one, other = (open_page(Client({0: engine})) for _ in range(2))
        first = asyncio.create_task(one.text())
        await asyncio.sleep(0.05)
        texts = [await other.text(), await one.text(), await first]
        return [values(text)["arena_overflows_total{engine=0}"] for text in texts]

    assert asyncio.run(scrapes()) == [2, 3, 1]


def test_readers_share_a_question_that_none_takes_from_the_others_and_questions_keep_apart() -> None:
    client = Client({0: [worker(0, [("arena_overflows", [], 1)])]})

    async def scrapes() -> float:
        page, began = open_page(client, interval_s=0.2), time.monotonic()
        await page.text()
        first, *others = (asyncio.create_task(page.text()) for _ in range(8))
        await asyncio.sleep(0.01)
        first.cancel()
        assert all("arena_overflows_total{engine=0}" in values(text) for text in await asyncio.gather(*others))
        return time.monotonic() - began

    assert asyncio.run(scrapes()) >= 0.2
    assert len(client.asked) == 2


def test_every_metric_can_be_exported_and_is_documented() -> None:
    """With all of its labels, under the name and of the type that docs/metrics.md gives."""
    samples: Samples = [(name, ["x"] * len(m.labels), 1) for name, m in METRICS.items() if name != "up"]
    text = asyncio.run(open_page(Client({0: [worker(0, samples)]})).text()).decode()
    documented = DOCS.read_text()
    for metric in METRICS.values():
        labels = ", ".join(f"`{label}`" for label in metric.all_labels[2:])  # past those of all
        assert f"| `{metric.sample}` | {metric.type} | {labels} |" in documented
        assert f"# TYPE {metric.sample} {metric.type}" in text
    for line in documented.splitlines():
        if line.startswith("| `sparse_prefill_"):
            assert line.split("`")[1] in {metric.sample for metric in METRICS.values()}


class TestMiddleware:
    """Around an app that answers as vLLM's does."""

    @staticmethod
    def app(
        body: bytes = b"vllm:up 1.0\n", status: int = 200, content_type: bytes = b"text/plain; version=1.0.0"
    ) -> Callable[..., Any]:
        async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
            compressed = any(name == b"accept-encoding" for name, _ in scope["headers"])
            content = gzip.compress(body) if compressed else body
            headers = [(b"Content-Type", content_type), (b"content-length", str(len(content)).encode())]
            await send({"type": "http.response.start", "status": status, "headers": headers})
            await send({"type": "http.response.body", "body": content[:5], "more_body": True})
            await send({"type": "http.response.body", "body": content[5:]})

        return app

    @staticmethod
    def get(app: Any, path: str = "/metrics", **scope: Any) -> tuple[int, bytes, int]:
        """Status, body, and the length that the headers state."""
        sent: list[dict[str, Any]] = []

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        headers = [(b"accept-encoding", b"gzip")]
        whole = {"type": "http", "method": "GET", "path": path, "headers": headers, **scope}
        asyncio.run(app(whole, None, send))
        length = int(dict(sent[0]["headers"])[b"content-length"])
        return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:]), length

    @pytest.fixture
    def page(self) -> MetricsPage:
        return open_page(Client({0: [worker(0, [("arena_overflows", [], 3)])]}))

    @pytest.mark.parametrize(
        ("path", "scope"),
        [("/metrics", {}), ("/metrics/", {}), ("/behind/proxy/metrics", {"root_path": "/behind/proxy"})],
    )
    def test_our_lines_follow_the_servers_own(self, page: MetricsPage, path: str, scope: dict[str, str]) -> None:
        status, body, length = self.get(MetricsMiddleware(self.app(), page), path, **scope)
        assert (status, length) == (200, len(body))
        assert body.startswith(b"vllm:up 1.0\n# HELP sparse_prefill_arena_overflows_total")
        assert values(body) == {"vllm:up{}": 1, "arena_overflows_total{engine=0}": 3, "up{engine=0}": 1}

    @pytest.mark.parametrize(
        ("path", "scope"), [("/health", {}), ("/metrics", {"method": "POST"}), ("/v1/metrics", {}), ("/metrics", {})]
    )
    def test_nothing_else_is_touched(self, page: MetricsPage, path: str, scope: dict[str, str]) -> None:
        """Nor anything of a server of another backend, whose page stays closed."""
        mine = MetricsPage() if (path, scope) == ("/metrics", {}) else page
        _, body, _ = self.get(MetricsMiddleware(self.app(), mine), path, **scope)
        assert gzip.decompress(body) == b"vllm:up 1.0\n"

    @pytest.mark.parametrize("answer", [{"status": 401}, {"content_type": b"application/json"}])
    def test_an_answer_that_is_no_page_of_metrics(self, page: MetricsPage, answer: dict[str, Any]) -> None:
        status, body, length = self.get(MetricsMiddleware(self.app(**answer), page))
        assert (status, body, length) == (answer.get("status", 200), b"vllm:up 1.0\n", len(body))

    def test_the_servers_own_metrics_stay_whatever_becomes_of_ours(self) -> None:
        page = MetricsPage()
        page.open(SimpleNamespace(), MODEL, 0.001)  # a client as no version of vLLM has it
        _, body, _ = self.get(MetricsMiddleware(self.app(), page))
        assert body == b"vllm:up 1.0\n"
