# SPDX-License-Identifier: Apache-2.0
"""The server's part of the counters: polling engines, adding up, and the page of /metrics.

All waits run on a virtual clock.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest, values
from vllm.v1.metrics.prometheus import get_prometheus_registry

from tests.helpers.engine_client import Client
from tests.helpers.virtual_time import VirtualTime
from vllm_sparse_backend.config.metrics import FRESH_QUERY, METRICS
from vllm_sparse_backend.evaluation.metrics_scrape import parse_metrics
from vllm_sparse_backend.serving.frontend import metrics_endpoint
from vllm_sparse_backend.serving.frontend.endpoint import SparsePrefillEndpoint, SparsePrefillMiddleware
from vllm_sparse_backend.serving.frontend.metrics_endpoint import (
    WAIT_S,
    EnginePolls,
    exported_metrics,
)

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs/metrics.md"
MODEL = "some/model"
Samples = list[tuple[str, list[str], float]]
CLOCK = VirtualTime()
AT_ONCE_S = 0.001
"""More seconds of virtual time than anything takes that waits for nothing."""


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_endpoint, "time", CLOCK)
    for metric in exported_metrics().values():
        metric.clear()


def worker(rank: int, samples: Samples) -> dict[str, Any]:
    return {"rank": rank, "samples": samples}


def polls_of(engines: dict[int, Any], interval_s: float = 0.001) -> EnginePolls:
    return EnginePolls(Client(engines), MODEL, interval_s)


def page(registry: CollectorRegistry = REGISTRY) -> dict[str, float]:
    """Return this backend's samples on vLLM's page, without the model's name, which all of ours have."""
    shown_values = {}
    for (name, labels), value in parse_metrics(generate_latest(registry).decode()).samples.items():
        shown = dict(labels)
        assert shown.pop("model_name") == MODEL
        shown_values[f"{name}{{{','.join(f'{label}={shown[label]}' for label in sorted(shown))}}}"] = value
    return shown_values


def read(engines: dict[int, Any]) -> dict[str, float]:
    """Poll once, and return the page."""
    CLOCK.run(polls_of(engines).refresh())
    return page()


def test_workers_of_an_engine_add_up() -> None:
    first: Samples = [("kept_pairs", ["3", "default"], 10), ("rows", ["sparse", "", "default"], 1)]
    second: Samples = [("kept_pairs", ["3", "default"], 5), ("kept_pairs", ["3", "fast"], 1)]
    workers = [worker(0, [*first, ("device_bytes", [], 7)]), worker(1, [*second, ("device_bytes", [], 8)])]
    expected = {
        "kept_pairs{engine=0,layer=3,level=default}": 15,
        "kept_pairs{engine=0,layer=3,level=fast}": 1,
        "rows{engine=0,level=default,path=sparse,reason=}": 1,
        "device_bytes{engine=0}": 15,
        "up{engine=0}": 1,
    }
    assert read({0: workers}) == expected
    # A second answer has the new counts. Gauges are values of now.
    doubled = {name: value if name.startswith(("device", "up")) else 2 * value for name, value in expected.items()}
    assert read({0: workers}) == doubled


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
    counted = read({0: workers[::-1]})
    assert counted["rows{engine=0,level=fast,path=sparse,reason=}"] == (3 if first_counts else 2)
    assert counted["rows{engine=0,level=,path=decode,reason=}"] == (9 if first_counts else 8)
    assert counted["arena_overflows{engine=0}"] == 2


def test_every_engine_is_asked_and_bears_its_number() -> None:
    """``collective_rpc`` of a data-parallel server returns only the answer of a single engine."""
    client = Client({2: [worker(0, [("arena_overflows", [], 1)])], 3: [worker(0, [("arena_overflows", [], 4)])]})
    CLOCK.run(EnginePolls(client, MODEL, 1).refresh())
    assert page() == {
        "arena_overflows{engine=2}": 1, "up{engine=2}": 1, "arena_overflows{engine=3}": 4, "up{engine=3}": 1
    }  # fmt: skip
    assert sorted(client.asked) == [2, 3]


COUNT = "arena_overflows{engine=0}"


class Engine:
    """An engine that counts its calls: each answer, at once, late, never, or an error, adds one."""

    def __init__(self) -> None:
        self.asked = 0
        self.free = asyncio.Event()
        self.free.set()
        self.error: Exception | None = None

    async def __call__(self) -> list[dict[str, Any]]:
        self.asked += 1
        await self.free.wait()
        if self.error is not None:
            raise self.error
        return [worker(0, [("arena_overflows", [], 1)])]


async def timed(polls: EnginePolls, is_fresh: bool = False) -> tuple[dict[str, float], float]:
    """Return a reader's page, and the seconds that it waited for the engines."""
    began = CLOCK.monotonic()
    await polls.refresh(is_fresh)
    return page(), CLOCK.monotonic() - began


class TestNoReaderWaits:
    """No reader waits for an engine: counts are polled in the background, and the last counts are shown."""

    def test_within_the_interval_the_last_counts_are_shown_at_once(self) -> None:
        async def scrapes() -> None:
            engine = Engine()
            polls = polls_of({0: engine}, interval_s=60)
            await polls.refresh()
            engine.free.clear()  # from now on, readers wait
            pages = [await timed(polls) for _ in range(20)]
            assert all(shown == {COUNT: 1, "up{engine=0}": 1} for shown, _ in pages)
            assert max(seconds for _, seconds in pages) < AT_ONCE_S
            assert engine.asked == 1

        CLOCK.run(scrapes())

    def test_a_late_engine_shows_its_last_counts_until_it_answers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(metrics_endpoint, "TIMEOUT_S", 0.3)

        async def scrapes() -> None:
            engine, other = Engine(), Engine()
            polls = polls_of({0: engine, 1: other})
            await polls.refresh()
            tasks = len(asyncio.all_tasks())
            engine.free.clear()
            await asyncio.sleep(0.01)
            first, waited = await timed(polls)
            assert waited == pytest.approx(WAIT_S, abs=AT_ONCE_S)
            assert (first[COUNT], first["up{engine=0}"]) == (1, 1)
            pages = [await timed(polls) for _ in range(100)]
            assert {shown[COUNT] for shown, _ in pages} == {1}
            assert max(seconds for _, seconds in pages) == pytest.approx(WAIT_S, abs=AT_ONCE_S)
            assert engine.asked == 2  # while an answer is late, no other call is made
            assert len(asyncio.all_tasks()) <= tasks + 2  # its call, and the other engine's
            await asyncio.sleep(0.35)
            shown, waited = await timed(polls)
            assert (shown["up{engine=0}"], shown[COUNT]) == (0, 1)
            assert (shown["up{engine=1}"], shown["arena_overflows{engine=1}"]) == (1, other.asked)
            assert waited <= WAIT_S + AT_ONCE_S
            engine.free.set()
            await asyncio.sleep(0.01)
            shown, _ = await timed(polls)
            assert shown["up{engine=0}"] == 1
            assert shown[COUNT] >= 2

        CLOCK.run(scrapes())

    def test_an_engine_that_fails_is_down_with_its_last_counts(self, lines: list[str]) -> None:
        async def scrapes() -> list[dict[str, float]]:
            engine = Engine()
            polls = polls_of({0: engine})
            await polls.refresh()
            pages = []
            for error in (None, RuntimeError("the engine is dead"), RuntimeError("the engine is dead"), None):
                engine.error = error
                await asyncio.sleep(0.002)
                pages.append((await timed(polls))[0])
            return pages

        pages = CLOCK.run(scrapes())
        assert [shown["up{engine=0}"] for shown in pages] == [1, 0, 0, 1]
        assert [shown[COUNT] for shown in pages] == [2, 2, 2, 3]
        (line,) = lines  # once for the whole time that it is down
        assert "no new metrics from engine 0: RuntimeError: the engine is dead" in line

    def test_an_engine_that_has_never_answered_is_down_when_its_time_is_over(
        self, lines: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(metrics_endpoint, "TIMEOUT_S", 0.3)

        async def scrapes() -> None:
            engine = Engine()
            engine.free.clear()
            polls = polls_of({0: engine})
            shown, waited = await timed(polls)
            assert shown == {"up{engine=0}": 1}
            assert waited <= WAIT_S + AT_ONCE_S
            assert lines == []
            await asyncio.sleep(0.3)
            assert (await timed(polls))[0] == {"up{engine=0}": 0}
            engine.free.set()
            await asyncio.sleep(0.01)
            assert (await timed(polls))[0]["up{engine=0}"] == 1

        CLOCK.run(scrapes())
        assert len(lines) == 1

    def test_readers_share_a_question_and_those_that_go_leave_nothing_behind(self) -> None:
        async def scrapes() -> None:
            engine = Engine()
            polls = polls_of({0: engine})
            await polls.refresh()
            engine.free.clear()
            await asyncio.sleep(0.002)
            alone = asyncio.all_tasks()
            readers = [asyncio.create_task(polls.refresh(is_fresh)) for _ in range(8) for is_fresh in (False, True)]
            await asyncio.sleep(0.01)
            for reader in readers[::2] + readers[1::4]:
                reader.cancel()
            await asyncio.sleep(0.1)
            assert engine.asked == 2
            engine.free.set()
            await asyncio.gather(*readers[3::4])
            assert page()[COUNT] >= 4  # requested after they arrived
            await asyncio.sleep(0.01)
            assert asyncio.all_tasks() == alone

        CLOCK.run(scrapes())


class TestFresh:
    """The page for tools that compare counts before and after."""

    def test_counts_are_asked_for_after_the_reader_came_and_questions_keep_apart(self) -> None:
        async def scrapes() -> None:
            engine = Engine()
            polls, began = polls_of({0: engine}, interval_s=0.2), CLOCK.monotonic()
            assert (await timed(polls))[0][COUNT] == 1
            assert (await timed(polls, is_fresh=True))[0][COUNT] == 3
            assert CLOCK.monotonic() - began == pytest.approx(0.2 + 2 * WAIT_S, abs=AT_ONCE_S)
            pages = await asyncio.gather(*(timed(polls, is_fresh=True) for _ in range(8)))
            assert min(shown[COUNT] for shown, _ in pages) >= 5
            assert engine.asked < 5 + len(pages)

        CLOCK.run(scrapes())

    def test_a_hanging_engine_keeps_the_others_counts_for_no_longer_than_the_limit(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(metrics_endpoint, "TIMEOUT_S", 0.1)

        async def scrapes() -> None:
            hanging, other = Engine(), Engine()
            polls = polls_of({0: hanging, 1: other}, interval_s=0.05)
            await polls.refresh()
            hanging.free.clear()
            shown, waited = await timed(polls, is_fresh=True)
            assert waited <= 0.05 + 0.1 + 2 * WAIT_S + AT_ONCE_S
            assert (shown[COUNT], shown["up{engine=0}"]) == (1, 0)
            assert (shown["arena_overflows{engine=1}"], shown["up{engine=1}"]) == (3, 1)

        CLOCK.run(scrapes())


def renew_metrics() -> None:
    for metric in exported_metrics().values():
        REGISTRY.unregister(metric)
    exported_metrics.cache_clear()
    exported_metrics()


@pytest.fixture
def process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The number of the current process of several API server processes, as prometheus_client sees it."""
    current = ["0"]
    with monkeypatch.context() as several:
        several.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
        several.setattr(values, "ValueClass", values.MultiProcessValue(lambda: current[0]))
        renew_metrics()
        yield current
    renew_metrics()


def test_every_process_of_a_server_shows_the_counts_that_any_has_polled(process: list[str]) -> None:
    """Prometheus reads a counter that falls as a restart."""
    shown = []
    for number, count in (("0", 3), ("1", 4), ("0", 0), ("1", 2)):
        process[0] = number
        answer = [worker(0, [("arena_overflows", [], count), ("layers", ["hopper"], 4)])]
        CLOCK.run(polls_of({0: answer}).refresh())
        shown.append(page(get_prometheus_registry()))
    layers_and_up = {"layers{attention=hopper,engine=0}": 4, "up{engine=0}": 1}
    assert shown == [{COUNT: count, **layers_and_up} for count in (3, 7, 7, 9)]


def test_every_metric_can_be_exported_and_is_documented() -> None:
    """Each metric has all of its labels, and the name and type from docs/metrics.md."""
    samples: Samples = [(name, ["x"] * len(metric.labels), 1) for name, metric in METRICS.items() if name != "up"]
    read({0: [worker(0, samples)]})
    text = generate_latest(REGISTRY).decode()
    documented = DOCS.read_text()
    for metric in METRICS.values():
        labels = ", ".join(f"`{label}`" for label in metric.all_labels[2:])  # after the labels that all have
        assert f"| `{metric.sample}` | {metric.type} | {labels} |" in documented
        assert f"# TYPE {metric.sample} {metric.type}" in text
    for line in documented.splitlines():
        if line.startswith("| `sparse_prefill_"):
            assert line.split("`")[1] in {metric.sample for metric in METRICS.values()}


class TestMiddleware:
    """The middleware around an app that answers with the page, as vLLM's does."""

    @staticmethod
    def get(polls: EnginePolls | None, path: str = "/metrics", **scope: Any) -> dict[str, float]:
        """Return the page as the app sees it."""
        seen: list[dict[str, float]] = []

        async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
            seen.append(page())

        endpoint = SparsePrefillEndpoint()
        endpoint.polls = polls
        CLOCK.run(
            SparsePrefillMiddleware(app, endpoint)({"type": "http", "method": "GET", "path": path, **scope}, None, None)
        )
        (shown,) = seen
        return shown

    @pytest.mark.parametrize(
        ("path", "scope"),
        [("/metrics", {}), ("/metrics/", {}), ("/behind/proxy/metrics", {"root_path": "/behind/proxy"})],
    )
    def test_engines_are_polled_before_the_page_is_written(self, path: str, scope: dict[str, str]) -> None:
        assert self.get(polls_of({0: Engine()}), path, **scope) == {COUNT: 1, "up{engine=0}": 1}

    def test_nothing_is_polled_for_other_paths_and_other_backends(self) -> None:
        engine = Engine()
        assert self.get(polls_of({0: engine}), "/v1/metrics") == self.get(None) == {}
        assert engine.asked == 0

    @pytest.mark.parametrize(
        ("query", "is_fresh"), [(FRESH_QUERY, True), (f"a=b&{FRESH_QUERY}", True), ("x=fresh", False)]
    )
    def test_a_query_asks_for_counts_of_now(self, query: str, is_fresh: bool) -> None:
        polls = polls_of({0: Engine()}, interval_s=60)
        self.get(polls)
        assert self.get(polls, query_string=query.encode())[COUNT] == (3 if is_fresh else 1)

    def test_the_servers_own_metrics_stay_whatever_becomes_of_ours(self) -> None:
        polls = EnginePolls(SimpleNamespace(), MODEL, 0.001)  # a client that no version of vLLM has
        assert self.get(polls) == {}
