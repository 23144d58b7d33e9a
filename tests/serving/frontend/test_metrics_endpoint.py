# SPDX-License-Identifier: Apache-2.0
"""The server's part of the counters: calling engines, adding up, and extending the page of /metrics.

All waits run on a virtual clock.
"""

import asyncio
import gzip
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.helpers.engine_client import Client
from tests.helpers.full_disk import full_disk
from tests.helpers.virtual_time import VirtualTime
from vllm_sparse_backend.config.metrics import FRESH_QUERY, METRICS
from vllm_sparse_backend.identity import LOGGER
from vllm_sparse_backend.serving.frontend import engine_counts, metrics_endpoint
from vllm_sparse_backend.serving.frontend.engine_counts import EngineCounts, SiblingCounts
from vllm_sparse_backend.serving.frontend.metrics_endpoint import WAIT_S, MetricsMiddleware, MetricsPage

DOCS = Path(__file__).parents[3] / "docs/metrics.md"
MODEL = "some/model"
Samples = list[tuple[str, list[str], float]]
CLOCK = VirtualTime()
AT_ONCE_S = 0.001
"""More seconds of virtual time than anything takes that waits for nothing."""


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (engine_counts, metrics_endpoint):
        monkeypatch.setattr(module, "time", CLOCK)


def worker(rank: int, samples: Samples, behind: bool = False) -> dict[str, Any]:
    return {"rank": rank, "moment": CLOCK.monotonic_ns(), "behind": behind, "samples": samples}


def open_page(client: Client, interval_s: float = 0.001, siblings: SiblingCounts | None = None) -> MetricsPage:
    page = MetricsPage()
    page.open(client, MODEL, interval_s, siblings)
    return page


def values(text: bytes) -> dict[str, float]:
    """Return the samples on the page, without the prefix and the model's name, which all of ours have."""
    samples = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            assert sample.labels.pop("model_name", MODEL) == MODEL
            labels = ",".join(f"{name}={sample.labels[name]}" for name in sorted(sample.labels))
            samples[f"{sample.name.removeprefix('sparse_prefill_')}{{{labels}}}"] = sample.value
    return samples


def read(client: Client) -> dict[str, float]:
    """Poll once."""
    return values(CLOCK.run(open_page(client, interval_s=60).fresh_text()))


def test_workers_of_an_engine_add_up_but_for_what_each_has_of_its_own() -> None:
    first: Samples = [("kept_pairs", ["3", "on"], 10), ("tiles", ["3", "on"], 2), ("arena_bytes", [], 7)]
    first.append(("rows", ["sparse", "", "on"], 1))
    second: Samples = [("kept_pairs", ["3", "on"], 5), ("kept_pairs", ["3", "fast"], 1), ("arena_bytes", [], 8)]
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


@pytest.mark.parametrize("first_counts", [True, False], ids=["", "a first stage without a layer that can run sparse"])
def test_rows_are_those_of_the_first_pipeline_stage_that_counts_any(first_counts: bool) -> None:
    stages: list[Samples] = [
        [("rows", ["sparse", "", "fast"], 3), ("rows", ["decode", "", ""], 9)]
        if first_counts
        else [("arena_overflows", [], 0)],
        [],  # another tensor-parallel rank
        [("rows", ["sparse", "", "fast"], 2), ("rows", ["decode", "", ""], 8), ("arena_overflows", [], 2)],
    ]
    workers = [worker(rank, samples) for rank, samples in enumerate(stages)]
    page_values = read(Client({0: workers[::-1]}))
    assert page_values["rows_total{engine=0,level=fast,path=sparse,reason=}"] == (3 if first_counts else 2)
    assert page_values["rows_total{engine=0,level=,path=decode,reason=}"] == (9 if first_counts else 8)
    assert page_values["arena_overflows_total{engine=0}"] == 2


def test_every_engine_is_asked_and_bears_its_number() -> None:
    """``collective_rpc`` of a data-parallel server returns only the answer of a single engine."""
    client = Client({2: [worker(0, [("arena_overflows", [], 1)])], 3: [worker(0, [("arena_overflows", [], 4)])]})
    assert read(client) == {
        "arena_overflows_total{engine=2}": 1, "up{engine=2}": 1, "arena_overflows_total{engine=3}": 4, "up{engine=3}": 1
    }  # fmt: skip
    assert sorted(client.asked) == [(2, True), (3, True)]


def test_counts_on_their_way_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_counts, "LOOKS_S", (0.0, 0.0, 0.0))
    left = [2]

    async def answer(start: bool) -> list[dict[str, Any]]:
        left[0] -= 1
        return [worker(0, [("arena_overflows", [], 9 if left[0] < 0 else 1)], behind=left[0] >= 0)]

    client = Client({0: answer})
    assert read(client)["arena_overflows_total{engine=0}"] == 9
    assert client.asked == [(0, True), (0, False), (0, False)]
    left[0] = 100  # the device is busy for longer: counts up to then
    assert read(client)["arena_overflows_total{engine=0}"] == 1


COUNT = "arena_overflows_total{engine=0}"


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """Lines that this package logs."""
    messages: list[str] = []

    class Keeping(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    handler, logger = Keeping(), logging.getLogger(LOGGER)
    logger.addHandler(handler)
    yield messages
    logger.removeHandler(handler)


class AttendEngine:
    """An engine that counts its calls, and returns their number at once, late, never, or with an error."""

    def __init__(self) -> None:
        self.asked = 0
        self.free = asyncio.Event()
        self.free.set()
        self.error: Exception | None = None

    async def __call__(self, start: bool) -> list[dict[str, Any]]:
        self.asked += 1
        number = self.asked
        await self.free.wait()
        if self.error is not None:
            raise self.error
        return [worker(0, [("arena_overflows", [], number)])]


async def timed(page: MetricsPage) -> tuple[dict[str, float], float]:
    """Return a reader's page, and the seconds that it waited for the page."""
    began = CLOCK.monotonic()
    text = await page.text()
    return values(text), CLOCK.monotonic() - began


class TestNoReaderWaits:
    """No reader waits for an engine: counts are refreshed in the background, and the last counts are shown."""

    def test_within_the_interval_the_last_counts_are_shown_at_once(self) -> None:
        async def scrapes() -> None:
            engine = AttendEngine()
            page = open_page(Client({0: engine}), interval_s=60)
            await page.start()
            engine.free.clear()  # from now on, readers wait
            pages = [await timed(page) for _ in range(20)]
            assert all(shown == {COUNT: 1, "up{engine=0}": 1} for shown, _ in pages)
            assert max(seconds for _, seconds in pages) < AT_ONCE_S
            assert engine.asked == 1

        CLOCK.run(scrapes())

    def test_an_engine_that_is_idle_gives_its_counts_of_now(self) -> None:
        async def scrapes() -> list[float]:
            page = open_page(Client({0: AttendEngine()}))
            pages = []
            for _ in range(4):
                await asyncio.sleep(0.002)
                pages.append((await timed(page))[0][COUNT])
            return pages

        assert CLOCK.run(scrapes()) == [1, 2, 3, 4]

    def test_a_late_engine_shows_its_last_counts_until_it_answers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(engine_counts, "TIMEOUT_S", 0.3)

        async def scrapes() -> None:
            engine, other = AttendEngine(), AttendEngine()
            page = open_page(Client({0: engine, 1: other}))
            await page.start()
            tasks = len(asyncio.all_tasks())
            engine.free.clear()
            await asyncio.sleep(0.01)
            first, waited = await timed(page)
            assert waited == pytest.approx(WAIT_S, abs=AT_ONCE_S)
            assert (first[COUNT], first["up{engine=0}"]) == (1, 1)
            pages = [await timed(page) for _ in range(100)]
            assert {shown[COUNT] for shown, _ in pages} == {1}
            assert max(seconds for _, seconds in pages) == pytest.approx(WAIT_S, abs=AT_ONCE_S)
            assert engine.asked == 2  # while an answer is late, no other call is made
            assert len(asyncio.all_tasks()) <= tasks + 2  # its call, and the other engine's
            await asyncio.sleep(0.35)
            shown, waited = await timed(page)
            assert (shown["up{engine=0}"], shown[COUNT]) == (0, 1)
            assert (shown["up{engine=1}"], shown["arena_overflows_total{engine=1}"]) == (1, other.asked)
            assert waited <= WAIT_S + AT_ONCE_S
            engine.free.set()
            await asyncio.sleep(0.01)
            shown, _ = await timed(page)
            assert shown["up{engine=0}"] == 1
            assert shown[COUNT] >= 2

        CLOCK.run(scrapes())

    def test_an_engine_that_fails_is_down_with_its_last_counts(self, lines: list[str]) -> None:
        async def scrapes() -> list[dict[str, float]]:
            engine = AttendEngine()
            page = open_page(Client({0: engine}))
            await page.start()
            pages = []
            for error in (None, RuntimeError("the engine is dead"), RuntimeError("the engine is dead"), None):
                engine.error = error
                await asyncio.sleep(0.002)
                pages.append((await timed(page))[0])
            return pages

        pages = CLOCK.run(scrapes())
        assert [page["up{engine=0}"] for page in pages] == [1, 0, 0, 1]
        assert [page[COUNT] for page in pages] == [2, 2, 2, 5]
        (line,) = lines  # once for the whole time that it is down
        assert "no new metrics from engine 0: RuntimeError: the engine is dead" in line

    def test_an_engine_that_has_never_answered_keeps_no_reader_and_not_the_start(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(metrics_endpoint, "START_S", 0.05)

        async def scrapes() -> None:
            engine = AttendEngine()
            engine.free.clear()
            page = open_page(Client({0: engine}))
            await page.start()
            shown, waited = await timed(page)
            assert shown == {"up{engine=0}": 0}
            assert waited < AT_ONCE_S
            engine.free.set()
            await asyncio.sleep(0.01)
            assert (await timed(page))[0]["up{engine=0}"] == 1

        CLOCK.run(scrapes())

    def test_readers_share_a_question_and_those_that_go_leave_nothing_behind(self) -> None:
        async def scrapes() -> None:
            engine = AttendEngine()
            page = open_page(Client({0: engine}))
            await page.start()
            engine.free.clear()
            await asyncio.sleep(0.002)
            alone = asyncio.all_tasks()
            readers = [
                asyncio.create_task(coroutine) for _ in range(8) for coroutine in (page.text(), page.fresh_text())
            ]
            await asyncio.sleep(0.01)
            for reader in readers[::2] + readers[1::4]:
                reader.cancel()
            await asyncio.sleep(0.1)
            assert engine.asked == 2
            engine.free.set()
            left = await asyncio.gather(*readers[3::4])
            assert len({*left}) == 1
            assert values(left[0])[COUNT] == 3  # requested after they arrived
            await asyncio.sleep(0.01)
            assert asyncio.all_tasks() == alone

        CLOCK.run(scrapes())


class TestFresh:
    """The page for tools that compare counts before and after."""

    def test_counts_are_asked_for_after_the_reader_came_and_questions_keep_apart(self) -> None:
        async def scrapes() -> None:
            engine = AttendEngine()
            page, began = open_page(Client({0: engine}), interval_s=0.2), CLOCK.monotonic()
            await page.start()
            assert (await timed(page))[0][COUNT] == 1
            assert values(await page.fresh_text())[COUNT] == 2
            assert CLOCK.monotonic() - began == pytest.approx(0.2, abs=AT_ONCE_S)
            texts = await asyncio.gather(*(page.fresh_text() for _ in range(8)))
            assert {values(text)[COUNT] for text in texts} == {3}
            assert engine.asked == 3

        CLOCK.run(scrapes())

    def test_a_hanging_engine_keeps_the_others_counts_for_no_longer_than_the_limit(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for module in (engine_counts, metrics_endpoint):
            monkeypatch.setattr(module, "TIMEOUT_S", 0.1)

        async def scrapes() -> None:
            hanging, other = AttendEngine(), AttendEngine()
            page = open_page(Client({0: hanging, 1: other}), interval_s=0.05)
            await page.start()
            hanging.free.clear()
            shown = values(await page.fresh_text())
            assert (shown[COUNT], shown["up{engine=0}"]) == (1, 0)
            assert (shown["arena_overflows_total{engine=1}"] >= 2, shown["up{engine=1}"]) == (True, 1)

        CLOCK.run(scrapes())


class TestSeveralProcesses:
    """Several processes of a server behind the same port: Prometheus reads a counter that falls as a restart."""

    @staticmethod
    def pages(folder: Path, engine: AttendEngine, interval_s: float = 60.0) -> list[MetricsPage]:
        return [open_page(Client({0: engine}), interval_s, SiblingCounts(folder, 1, pid)) for pid in range(3)]

    def test_no_counter_falls_from_one_process_to_the_next(self, tmp_path: Path) -> None:
        async def scrapes() -> list[float]:
            engine = AttendEngine()
            first, second, third = self.pages(tmp_path, engine)
            for page in (first, second, third):
                await page.start()
            read = [(await timed(page))[0][COUNT] for page in (third, first, second)]
            engine.free.clear()
            late = values(await open_page(Client({0: engine}), 60, SiblingCounts(tmp_path, 1, 9)).text())
            return [*read, late[COUNT]]

        assert CLOCK.run(scrapes()) == [3, 3, 3, 3]

    def test_an_answer_that_is_older_than_what_another_process_has_shown_is_dropped(self, tmp_path: Path) -> None:
        page = open_page(Client({}), siblings=SiblingCounts(tmp_path, 1, 1))
        page.refresh = list  # type: ignore[method-assign]
        reader = engine_counts.EngineReader()
        page._readers = {"0": reader}
        reader.take(EngineCounts(20, {"arena_overflows": {(): 4.0}}))
        for moment, count, expected in ((10, 3.0, 4), (30, 7.0, 7), (25, 5.0, 7)):
            SiblingCounts(tmp_path, 1, 2).publish({"0": EngineCounts(moment, {"arena_overflows": {(): count}})})
            assert values(CLOCK.run(page.text()))[COUNT] == expected

    def test_other_servers_files_and_broken_ones_are_left_out(self, tmp_path: Path, lines: list[str]) -> None:
        SiblingCounts(tmp_path, 2, 1).publish({"0": EngineCounts(9, {"arena_overflows": {(): 4.0}})})
        mine = SiblingCounts(tmp_path, 1, 1)
        assert mine.newest() == {}
        (tmp_path / "sparse_prefill_1_2.json").write_text('{"0": 3')
        assert (mine.newest(), mine.newest()) == ({}, {})
        (line,) = lines
        assert "API server processes cannot share counts" in line

    def test_a_folder_that_has_gone_keeps_no_reader(self, tmp_path: Path, lines: list[str]) -> None:
        page = open_page(Client({0: AttendEngine()}), siblings=SiblingCounts(tmp_path / "gone", 1, 1))
        assert values(CLOCK.run(page.fresh_text()))[COUNT] == 1
        assert len(lines) == 1

    def test_a_full_disk_keeps_no_reader_and_leaves_no_part_of_a_file(self, tmp_path: Path, lines: list[str]) -> None:
        siblings = SiblingCounts(tmp_path, 1, 1)
        siblings.publish({"0": EngineCounts(9, {"arena_overflows": {(): 4.0}})})
        before = {path.name: path.read_text() for path in tmp_path.iterdir()}
        page = open_page(Client({0: AttendEngine()}), siblings=siblings)
        with full_disk(16):
            assert values(CLOCK.run(page.fresh_text()))[COUNT] == 1
        assert {path.name: path.read_text() for path in tmp_path.iterdir()} == before
        (line,) = lines
        assert "File too large" in line

    def test_only_a_server_of_several_processes_has_files(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def of_server(count: int) -> SiblingCounts | None:
            return SiblingCounts.of_server(SimpleNamespace(parallel_config=SimpleNamespace(_api_process_count=count)))

        monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
        assert of_server(2) is None
        monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
        assert of_server(1) is None
        assert of_server(2) is not None


def test_every_metric_can_be_exported_and_is_documented() -> None:
    """Each metric has all of its labels, and the name and type from docs/metrics.md."""
    samples: Samples = [(name, ["x"] * len(metric.labels), 1) for name, metric in METRICS.items() if name != "up"]
    text = CLOCK.run(open_page(Client({0: [worker(0, samples)]})).fresh_text()).decode()
    documented = DOCS.read_text()
    for metric in METRICS.values():
        labels = ", ".join(f"`{label}`" for label in metric.all_labels[2:])  # after the labels that all have
        assert f"| `{metric.sample}` | {metric.type} | {labels} |" in documented
        assert f"# TYPE {metric.sample} {metric.type}" in text
    for line in documented.splitlines():
        if line.startswith("| `sparse_prefill_"):
            assert line.split("`")[1] in {metric.sample for metric in METRICS.values()}


class TestMiddleware:
    """The middleware around an app that answers like vLLM's."""

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
        """Return status, body, and the length in the headers."""
        sent: list[dict[str, Any]] = []

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        headers = [(b"accept-encoding", b"gzip")]
        whole = {"type": "http", "method": "GET", "path": path, "headers": headers, **scope}
        CLOCK.run(app(whole, None, send))
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
        """Other paths are unchanged, and so is a server of another backend, whose page stays closed."""
        mine = MetricsPage() if (path, scope) == ("/metrics", {}) else page
        _, body, _ = self.get(MetricsMiddleware(self.app(), mine), path, **scope)
        assert gzip.decompress(body) == b"vllm:up 1.0\n"

    @pytest.mark.parametrize("answer", [{"status": 401}, {"content_type": b"application/json"}])
    def test_an_answer_that_is_no_page_of_metrics(self, page: MetricsPage, answer: dict[str, Any]) -> None:
        status, body, length = self.get(MetricsMiddleware(self.app(**answer), page))
        assert (status, body, length) == (answer.get("status", 200), b"vllm:up 1.0\n", len(body))

    def test_engines_answer_while_the_server_writes_its_own_part(
        self, page: MetricsPage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A slow page of vLLM does not become slower because of our part."""
        monkeypatch.setattr(metrics_endpoint, "WAIT_S", 0.5)
        inner = self.app()

        async def slow(scope: dict[str, Any], receive: Any, send: Any) -> None:
            await asyncio.sleep(0.5)
            await inner(scope, receive, send)

        silent = AttendEngine()
        silent.free.clear()
        page._client = Client({0: silent})
        began = CLOCK.monotonic()
        _, body, _ = self.get(MetricsMiddleware(slow, page))
        assert values(body)["up{engine=0}"] == 0
        assert CLOCK.monotonic() - began == pytest.approx(0.5, abs=AT_ONCE_S)

    @pytest.mark.parametrize(
        ("query", "is_fresh"), [(FRESH_QUERY, True), (f"a=b&{FRESH_QUERY}", True), ("x=fresh", False)]
    )
    def test_a_query_asks_for_counts_of_now(self, page: MetricsPage, query: str, is_fresh: bool) -> None:
        middleware = MetricsMiddleware(self.app(), page)
        assert metrics_endpoint.asks_for_fresh({"query_string": query.encode()}) is is_fresh
        _, body, _ = self.get(middleware, query_string=query.encode())
        assert values(body)["arena_overflows_total{engine=0}"] == 3

    def test_the_servers_own_metrics_stay_whatever_becomes_of_ours(self) -> None:
        page = MetricsPage()
        page.open(SimpleNamespace(), MODEL, 0.001)  # a client that no version of vLLM has
        _, body, _ = self.get(MetricsMiddleware(self.app(), page))
        assert body == b"vllm:up 1.0\n"
