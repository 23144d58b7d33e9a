# SPDX-License-Identifier: Apache-2.0
"""Reports of a request's prefill: the workers' tallies, and their place in the answer."""

import asyncio
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import tests.helpers.cpu_build  # noqa: F401 — skips where there is none
from tests.helpers.batches import random_batch, random_index
from tests.helpers.vllm_objects import make_step, recorder_of
from vllm_sparse_backend.config.plan import DEFAULT
from vllm_sparse_backend.config.request_levels import Ticket
from vllm_sparse_backend.serving.frontend import prefill_reports
from vllm_sparse_backend.serving.worker.counters import HostCopy
from vllm_sparse_backend.serving.worker.request_tallies import (
    MOST_KEPT,
    RequestTallies,
    Tally,
    add_pairs,
    ticket_in,
)
from vllm_sparse_backend.serving.worker.shared_worker import Worker
from vllm_sparse_backend.serving.worker.worker_samples import worker_tallies

MIN_TOKENS = 120


class Launches(TorchDispatchMode):
    """Counts operations that launch a kernel on a device: all but views."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not function.is_view
        return function(*args, **(kwargs or {}))


class TestTally:
    def test_tokens_and_pairs_are_those_that_are_counted(self, built: Callable[..., Any], at_step: Any) -> None:
        """For a request with a report next to a request without; decodes are not prefill."""
        params = {"sink_tokens": 16, "local_tokens": 64}
        layers, builder = built(0, 1, method="a_shape", params=params, min_tokens=MIN_TOKENS)
        at_step([DEFAULT] * 3)
        steps = [(50, 1), (0, 400)], [(50, 1), (400, 131), (0, 60)], [(51, 1), (531, 1), (0, 500)]
        for i, lengths in enumerate(steps):
            before, step = pairs(builder), make_step(layers[0], lengths)
            if i == 1:
                layers[0].impl.worker.requests.tallies.begin("1", DEFAULT, "ticket")
            metadata = builder.build(0, step.common)
            for layer in layers:
                step.forward(layer, metadata)
            if i == 1:
                counted = {name: n - before[name] for name, n in pairs(builder).items()}
        (tally,) = worker_tallies(SimpleNamespace(vllm_config=layers[0].impl.worker.vllm_config), "ticket")
        assert (tally["level"], tally["dense_tokens"], tally["sparse_tokens"]) == (DEFAULT, 0, 131)
        assert {name: tally[name] for name in counted} == counted
        assert 0 < tally["kept_pairs"] < tally["causal_pairs"]

    def test_another_report_in_a_step_costs_few_launches(self) -> None:
        """The pairs of all lists are computed once, and each report adds its sums."""
        batch = random_batch([(0, 200), (50, 300), (0, 70), (130, 129)], 4, 2, 16, 16)
        index = random_index(batch, 64, 0.5)
        launches_by_reports = []
        for num_reports in (1, 4):
            tallies = [Tally(DEFAULT) for _ in range(num_reports)]
            spans = [(first, first + 1, tally) for first, tally in zip(batch.rows.query_starts, tallies)]
            add_pairs(spans, index)
            with Launches() as launches:
                add_pairs(spans, index)
            launches_by_reports.append(launches.count)
            for row, tally in enumerate(tallies):
                in_row = torch.tensor([tile.row == row for tile in batch.rows.tile_list])
                assert tally.listed_pairs is not None
                assert int(tally.listed_pairs) == 2 * int(index.listed_pairs()[:, in_row].sum())
        assert launches_by_reports[0] <= 4
        assert launches_by_reports[1] <= 10

    def test_they_are_found_by_their_ticket_and_the_oldest_go(self) -> None:
        """Clients choose the ids, which may be equal to, or begin with, the id of another request."""
        tallies = RequestTallies()
        tickets = {"cmpl-a-0-ff00": "t", "cmpl-a-1-ff01": "t", "cmpl-a-1-1-ff02": "u", "cmpl-a-0": "tt", "t": "v"}
        for req_id, ticket in tickets.items():
            tallies.begin(req_id, DEFAULT, ticket)
        tallies.begin("cmpl-a", DEFAULT)  # a request whose report is only in the log
        assert [len(tallies.with_ticket(ticket)) for ticket in ("t", "u", "tt", "cmpl-a", "cmpl-a-0", "")] == [
            2,
            1,
            1,
            0,
            0,
            0,
        ]
        for i in range(MOST_KEPT):
            tallies.begin(str(i), DEFAULT)
        assert (len(tallies), tallies.with_ticket("t")) == (MOST_KEPT, [])

    def test_an_ended_request_is_logged_when_its_pairs_are_on_the_host(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Until then, steps go on, and the device's number is not read."""
        arrived: set[HostCopy] = set()
        monkeypatch.setattr(HostCopy, "arrived", lambda copy: copy in arrived)
        caplog.set_level("INFO")
        tallies = RequestTallies()
        for req_id in ("first", "second"):
            tally = tallies.begin(req_id, DEFAULT)
            tally.sparse_tokens, tally.causal_pairs, tally.masked_pairs = 100, 400, 20
            tally.listed_pairs = torch.tensor(120)
            tallies.end(req_id)
            tally.listed_pairs = torch.empty((), device="meta")  # has no value to wait for
            copy = tally.copied_pairs
            assert copy is not None
            tallies.log_ended()
            assert req_id not in caplog.text
            arrived.add(copy)
            tallies.log_ended()
            assert f"request {req_id}, level default: 0 tokens prefilled dense, 100 sparse, 0.250 of" in caplog.text
        tallies.log_ended()
        assert caplog.text.count("prefilled dense") == 2

    def test_workers_of_one_process_do_not_share_them(self, configured: Callable[..., Any]) -> None:
        config = configured(method="a_shape")
        first, second = (Worker(config, torch.device("cpu")) for _ in range(2))
        first.requests.tallies.begin("1", DEFAULT, "t")
        assert len(first.requests.tallies.with_ticket("t")) == 1
        assert second.requests.tallies.with_ticket("t") == []


def pairs(builder: Any) -> dict[str, float]:
    samples, _ = recorder_of(builder).samples()
    return {
        name: sum(n for name_of_sample, _, n in samples if name_of_sample == name)
        for name in ("kept_pairs", "causal_pairs")
    }


def test_each_http_request_has_a_report_of_its_own() -> None:
    """Two concurrent clients use the same id, or an id that begins with the other's: neither reads the other's
    counts."""
    sent: dict[str, list[bytes]] = {"a": [], "b": []}
    tallies = RequestTallies()

    class Client:
        engine_core = SimpleNamespace()

        async def collective_rpc(self, method: str, timeout: Any, args: Any) -> Any:
            return [tallies.with_ticket(*args)]

    async def answer(name: str, num_requests: int, pause_s: float) -> None:
        async def keep(message: dict[str, Any]) -> None:
            sent[name].append(message.get("body", b""))

        ticket = Ticket(f"drawn for {name}")
        send = prefill_reports.Reporting(keep, Client(), ticket)
        for number in range(num_requests):
            extra_args = prefill_reports.plain_ticket({"sparse_prefill_report": ticket, "other": 1})
            assert extra_args is not None
            tally = tallies.begin(f"cmpl-x-{number}-{name}", DEFAULT, ticket_in(extra_args) or "")
            tally.dense_tokens = 10 if name == "a" else 1
            await asyncio.sleep(pause_s)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
        await send({"type": "http.response.body", "body": b'{"id": "cmpl-x"}'})

    async def run() -> None:
        await asyncio.gather(answer("a", 3, 0.01), answer("b", 2, 0.012))

    asyncio.run(run())
    dense_tokens = {
        name: json.loads(b"".join(parts))["sparse_prefill_report"]["dense_tokens"] for name, parts in sent.items()
    }
    assert dense_tokens == {"a": 30, "b": 2}


@pytest.mark.parametrize("value", [True, 1, "forged", ["forged"]])
def test_a_ticket_is_never_a_clients_own(value: Any) -> None:
    """If nothing waits for the report, for example if it is only logged, there is no ticket."""
    assert prefill_reports.plain_ticket({"sparse_prefill_report": value, "other": 1}) == {
        "sparse_prefill_report": True,
        "other": 1,
    }
    assert prefill_reports.plain_ticket({"sparse_prefill_report": False}) == {"sparse_prefill_report": False}
    assert prefill_reports.plain_ticket(None) is None


def test_ranks_and_stages_make_one_report() -> None:
    tally: dict[str, Any] = {"level": "fast", "dense_tokens": 100, "sparse_tokens": 300, "kept_pairs": 10}
    tally |= {"causal_pairs": 80}
    silent = {**tally, "dense_tokens": 0, "sparse_tokens": 0, "kept_pairs": 30}
    report = prefill_reports.merged([[tally, tally], [silent, silent], []])
    assert report == {"level": "fast", "dense_tokens": 200, "sparse_tokens": 600, "share_kept": 0.25}
    assert prefill_reports.merged([[{**tally, "causal_pairs": 0}]])["share_kept"] is None  # type: ignore[index]
    assert prefill_reports.merged([[], []]) is None


@pytest.mark.parametrize("body", [b'{"error": {}}', b"no JSON", b"[]"])
def test_what_is_no_answer_stays_as_it_is(body: bytes) -> None:
    """tests/server/test_serve.py covers answers, in a body and in a stream."""
    sent: list[dict[str, Any]] = []

    async def keep(message: dict[str, Any]) -> None:
        sent.append(message)

    async def run() -> None:
        send = prefill_reports.Reporting(keep, None, Ticket("t"))
        headers = [(b"content-type", b"application/json"), (b"content-length", b"3")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for part, more in (body[:2], True), (body[2:], False):
            await send({"type": "http.response.body", "body": part, "more_body": more})

    asyncio.run(run())
    assert [message.get("body") for message in sent] == [None, body]
    assert dict(sent[0]["headers"])[b"content-length"] == str(len(body)).encode()
