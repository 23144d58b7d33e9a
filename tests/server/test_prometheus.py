# SPDX-License-Identifier: Apache-2.0
"""The real Prometheus, configured as in deploy/ except for the server's address and the interval, scrapes the
server."""

import json
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers import external_tools, promql, scenario
from tests.helpers.scenario import Servers
from tests.helpers.servers import Server
from vllm_sparse_backend.evaluation.vllm_server import reserve_port

pytestmark = [pytest.mark.server, pytest.mark.full]

MONITORING = Path(__file__).parents[2] / "deploy/monitoring"
Query = Callable[[str], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def server(servers: Servers) -> Server:
    """The server, after requests of all kinds."""
    requests = {str(length): (scenario.prompt(length, seed=length + 50), 4) for length in (90, 1000)}
    scenario.ask_together(servers.ours, requests)
    scenario.fresh_page(servers.ours)  # later pages have the counts of these requests, even if the engine is late
    return servers.ours


@pytest.fixture(scope="module")
def query(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Query]:
    folder = tmp_path_factory.mktemp("prometheus")
    config = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
    config["global"] |= {"scrape_interval": "1s", "scrape_timeout": "1s"}
    config["scrape_configs"][0]["static_configs"][0]["targets"] = [server.url.removeprefix("http://")]
    shutil.copy(MONITORING / "alerts.yml", folder)
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    held = reserve_port()
    port = held.getsockname()[1]
    command = [
        external_tools.find("prometheus"), "--config.file", folder / "prometheus.yml",
        "--storage.tsdb.path", folder / "data", "--web.listen-address", f"127.0.0.1:{port}",
    ]  # fmt: skip
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)

    def ask(expression: str) -> list[dict[str, Any]]:
        url = f"http://127.0.0.1:{port}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
            url, timeout=scenario.DEADLINE_S
        ) as response:
            return json.load(response)["data"]["result"]

    try:
        assert _soon(ask, "count_over_time(sparse_prefill_up[1m]) >= 4"), (folder / "log").read_text()
        yield ask
    finally:
        process.terminate()
        process.wait()
        held.close()


def _soon(ask: Query, expression: str) -> list[dict[str, Any]]:
    """Return the expression's answer when there is one, or no answer after a deadline. A page that was too late for a
    scrape leaves a gap of a second."""
    deadline = time.monotonic() + scenario.DEADLINE_S
    while not (answer := _answer(ask, expression)) and time.monotonic() < deadline:
        time.sleep(0.5)
    return answer


def _answer(ask: Query, expression: str) -> list[dict[str, Any]]:
    try:
        return ask(expression)
    except OSError:  # not listening yet
        return []


def test_it_holds_what_the_page_says(query: Query, server: Server) -> None:
    report = scenario.counted(server)
    (up,) = _soon(query, "sparse_prefill_up == 1")
    assert up["metric"]["engine"] == "0"
    (density,) = _soon(query, "sum(sparse_prefill_kept_pairs_total) / sum(sparse_prefill_causal_pairs_total)")
    assert float(density["value"][1]) == pytest.approx(report.pairs.density)
    rows = {r["metric"]["path"]: int(r["value"][1]) for r in _soon(query, "sum by (path) (sparse_prefill_rows_total)")}
    assert rows == {path: report.by("rows", "path")[path] for path in ("sparse", "dense", "decode")}


def test_what_the_dashboard_asks_has_an_answer(query: Query, server: Server) -> None:
    """This also checks the names of vLLM's own metrics."""
    page = server.get("/metrics")
    for name, expression in promql.dashboard_queries().items():
        assert _soon(query, expression), name
        for metric in promql.METRIC.findall(expression):
            assert metric in page, name
