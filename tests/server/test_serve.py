# SPDX-License-Identifier: Apache-2.0
"""Real servers on a small model in float32: the whole way through vLLM against stock vLLM, and what /metrics says.

Everything kept, tokens must equal stock's, however the prompt arrives: in chunks of 512, after a cached prefix, in a
step with decodes, or together with seven others.
"""

import json
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from tests import queries, tools
from tests.server import scenario
from vllm_sparse_backend.demo.model import CONFIG
from vllm_sparse_backend.measure.scrape import Report, parse
from vllm_sparse_backend.measure.server import Server, ServerError, reserve_port, sparse_args
from vllm_sparse_backend.settings.reasons import Fallback

pytestmark = pytest.mark.server
pytest.importorskip("vllm")

ROOT = Path(__file__).parents[2]
NUM_LAYERS = CONFIG["num_hidden_layers"]
MIN_TOKENS = 256
# Stock vLLM against itself, the same prompts batched differently, gives up to 2.4e-6.
LOGPROB_TOLERANCE = 2e-5
EVERYTHING = {"method": "dense", "min_tokens": MIN_TOKENS, "min_query_tokens": 1}
SPARSE = {"profile": str(Path(__file__).with_name("levels.yaml"))}


class Served(NamedTuple):
    answers: dict[str, scenario.Answer]
    before: str
    """/metrics before anything was asked."""
    page: str
    """The same after the last answer, with no further step."""

    @property
    def report(self) -> Report:
        return parse(self.page)


def serve(model: Path, args: tuple[str, ...], env: dict[str, str] | None = None) -> Served:
    with Server(model, (*args, *scenario.SERVER_ARGS), env=env) as server:
        before = server.get("/metrics")
        return Served(scenario.run(server), before, server.get("/metrics"))


def counters(server: Server) -> Report:
    return parse(server.get("/metrics"))


@pytest.fixture(scope="module")
def stock(small_model: Path) -> Served:
    return serve(small_model, (), {"VLLM_PLUGINS": "none"})


@pytest.fixture(scope="module")
def everything(small_model: Path) -> Served:
    return serve(small_model, sparse_args(EVERYTHING))


@pytest.fixture(scope="module")
def sparse_server(small_model: Path) -> Iterator[tuple[Server, Served]]:
    """Answers through two server processes: each connection gets one of them."""
    args = ("--api-server-count", "2", *scenario.SERVER_ARGS)
    with Server(small_model, (*sparse_args(SPARSE), *args)) as server:
        before = server.get("/metrics")
        yield server, Served(scenario.run(server), before, server.get("/metrics"))


@pytest.fixture(scope="module")
def sparse(sparse_server: tuple[Server, Served]) -> Served:
    return sparse_server[1]


def test_the_scenario_is_what_its_names_say(stock: Served) -> None:
    """Prefix-cache hits where they are meant; none elsewhere; and stock vLLM has none of our counters."""
    for name, answer in stock.answers.items():
        hits = name in ("prefix: same prompt", "prefix: other tail")
        assert (answer.cached_tokens >= 1900) if hits else answer.cached_tokens == 0, (name, answer)
    assert stock.report == Report()
    assert "sparse_prefill" not in stock.page


def test_everything_kept_gives_the_tokens_of_stock_vllm(stock: Served, everything: Served) -> None:
    for name, expected in stock.answers.items():
        answer = everything.answers[name]
        assert answer.token_ids == expected.token_ids, name
        assert answer.logprobs == pytest.approx(expected.logprobs, abs=LOGPROB_TOLERANCE), name
        assert answer.cached_tokens == expected.cached_tokens, name


def test_everything_kept_went_the_sparse_way_and_kept_everything(everything: Served) -> None:
    assert everything.report.rows_of("sparse") > 0
    assert set(everything.report.layers) == set(range(NUM_LAYERS))
    assert {counts.density for counts in everything.report.layers.values()} == {1.0}


def test_rows_are_counted_by_the_way_they_went(everything: Served, sparse: Served) -> None:
    """The same requests in both servers: short rows dense with the reason, decodes as decodes, nothing else dense."""
    for served in (everything, sparse):
        assert set(served.report.rows) == {("sparse", ""), ("dense", Fallback.TOO_SHORT), ("decode", "")}
        assert min(served.report.rows.values()) > 0
        # An answer of n tokens is a last chunk and n - 1 decodes, each one row of a step; some prompts end with a
        # chunk of one token.
        decodes = sum(len(answer.token_ids) - 1 for answer in served.answers.values())
        assert decodes <= served.report.rows_of("decode") <= decodes + len(served.answers)


def test_nothing_is_counted_before_the_first_request(everything: Served, sparse: Served) -> None:
    for served in (everything, sparse):
        before = parse(served.before)
        assert (before.rows, before.layers) == ({}, {})
        assert before.attention == {"torch": NUM_LAYERS}


def test_all_processes_of_a_server_tell_the_same(sparse_server: tuple[Server, Served]) -> None:
    server, served = sparse_server
    pages = [server.get("/metrics") for _ in range(6)]
    assert [parse(page) for page in pages] == [served.report] * len(pages)


def test_sparse_servers_report_densities_below_1(sparse: Served) -> None:
    assert set(sparse.report.layers) == set(range(NUM_LAYERS))
    assert sparse.report.problem() is None


def test_sparse_prefill_computes_something_else_than_dense(stock: Served, sparse: Served) -> None:
    """Or else the counters would be telling tales: a prompt of 3,000 random tokens does lose something."""
    assert sparse.answers["chunks"].logprobs != pytest.approx(stock.answers["chunks"].logprobs, abs=1e-3)


def test_short_prompts_are_dense_in_sparse_servers(stock: Served, sparse: Served) -> None:
    for name in ("concurrent: 1", "concurrent: 63"):
        assert sparse.answers[name].token_ids == stock.answers[name].token_ids
        assert sparse.answers[name].logprobs == pytest.approx(stock.answers[name].logprobs, abs=LOGPROB_TOLERANCE)


class TestPrometheus:
    """The real one, configured as in deploy/ but for the server's address and the pace, scrapes the server."""

    @pytest.fixture(scope="class")
    def query(
        self, sparse_server: tuple[Server, Served], tmp_path_factory: pytest.TempPathFactory
    ) -> Iterator[Callable[[str], list[dict[str, Any]]]]:
        folder = tmp_path_factory.mktemp("prometheus")
        config = yaml.safe_load((ROOT / "deploy/monitoring/prometheus.yml").read_text())
        config["global"] |= {"scrape_interval": "1s", "scrape_timeout": "1s"}
        config["scrape_configs"][0]["static_configs"][0]["targets"] = [sparse_server[0].url.removeprefix("http://")]
        shutil.copy(ROOT / "deploy/monitoring/alerts.yml", folder)
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        held = reserve_port()
        port = held.getsockname()[1]
        command = [
            tools.find("prometheus"), "--config.file", folder / "prometheus.yml",
            "--storage.tsdb.path", folder / "data", "--web.listen-address", f"127.0.0.1:{port}",
        ]  # fmt: skip
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)

        def ask(expression: str) -> list[dict[str, Any]]:
            url = f"http://127.0.0.1:{port}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
            with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=10) as response:
                return json.load(response)["data"]["result"]

        try:
            deadline = time.monotonic() + 60
            while not _answers(ask, "count_over_time(sparse_prefill_up[1m]) >= 4"):
                assert process.poll() is None, (folder / "log").read_text()
                assert time.monotonic() < deadline, (folder / "log").read_text()
                time.sleep(0.5)
            yield ask
        finally:
            process.terminate()
            process.wait()
            held.close()

    def test_it_holds_what_the_page_says(self, query: Callable[[str], list[dict[str, Any]]], sparse: Served) -> None:
        (up,) = query("sparse_prefill_up")
        assert (up["metric"]["engine"], up["value"][1]) == ("0", "1")
        density = query("sum(sparse_prefill_kept_pairs_total) / sum(sparse_prefill_causal_pairs_total)")
        layers = sparse.report.layers.values()
        kept, causal = sum(c.kept_pairs for c in layers), sum(c.causal_pairs for c in layers)
        assert float(density[0]["value"][1]) == pytest.approx(kept / causal)
        rows = {r["metric"]["path"]: int(r["value"][1]) for r in query("sum by (path) (sparse_prefill_rows_total)")}
        assert rows == {path: sparse.report.rows_of(path) for path in ("sparse", "dense", "decode")}

    def test_what_the_dashboard_asks_has_an_answer(
        self, query: Callable[[str], list[dict[str, Any]]], sparse: Served
    ) -> None:
        """All but what the guard would say, which is off; and vLLM's own metrics are called so."""
        for name, asked in queries.dashboard_queries().items():
            assert bool(query(asked)) != name.startswith("Guard"), name
            for metric in queries.METRIC.findall(asked):
                assert metric in sparse.page or metric.startswith("sparse_prefill_guard"), name


def _answers(ask: Callable[[str], list[dict[str, Any]]], expression: str) -> bool:
    try:
        return bool(ask(expression))
    except OSError:  # it does not listen yet
        return False


# From here on the sparse server is asked for more: its counters no longer say what ``sparse`` does.

REFUSED: dict[str, dict[str, Any]] = {
    "a number": {"vllm_xargs": {"sparse_prefill": 2}},
    "no level": {"vllm_xargs": {"sparse_prefill": "fastest"}},
    "a number as text": {"vllm_xargs": {"sparse_prefill": "0"}},
    "a list": {"vllm_xargs": {"sparse_prefill": [0]}},
    "a stream": {"vllm_xargs": {"sparse_prefill": "exactly"}, "stream": True},
    "beams": {"vllm_xargs": {"sparse_prefill": 0}, "use_beam_search": True, "n": 2},
}


class Requests(NamedTuple):
    """What the sparse server answers after all that, asked for other levels than its own."""

    refused: dict[str, str]
    exact: dict[str, scenario.Answer]
    """And, beside them, others that begin alike, at the server's own level."""
    together: dict[str, scenario.Answer]
    """One prompt at every level, all at once."""
    again: dict[str, scenario.Answer]
    report: Report


@pytest.fixture(scope="module")
def requests(sparse_server: tuple[Server, Served]) -> Requests:
    server, _ = sparse_server
    refused = {name: refusal(server, body) for name, body in REFUSED.items()}
    exact = scenario.run(server, level=0, beside=1)
    named = {str(level): (scenario.prompt(3001, seed=1), 8, level) for level in ("exact", "high", "fast", 1)}
    together = scenario.ask_together(server, named)
    return Requests(refused, exact, together, scenario.ask_together(server, named), counters(server))


def refusal(server: Server, body: dict[str, Any]) -> str:
    try:
        answer = server.post("/v1/completions", {"model": server.model, "prompt": [1, 2, 3], "max_tokens": 2, **body})
    except ServerError as error:
        return str(error)
    return f"answered {answer}"


def test_exact_requests_equal_stock_after_any_mix_of_sparse_ones(stock: Served, requests: Requests) -> None:
    """Over prefixes that sparse requests wrote before, in chunks, eight at once and as many sparse ones beside them."""
    for name, expected in stock.answers.items():
        answer = requests.exact[name]
        assert answer.token_ids == expected.token_ids, name
        assert answer.logprobs == pytest.approx(expected.logprobs, abs=LOGPROB_TOLERANCE), name


def test_the_same_requests_at_the_servers_own_level_do_not(stock: Served, sparse: Served) -> None:
    """So the test above can fail, by a cache that is shared or by a row that goes sparse."""
    off = ["chunks", "prefix: same prompt", "prefix: other tail", "mixed: prefill 1800", "concurrent: 2600"]
    for name in off:
        assert sparse.answers[name].logprobs != pytest.approx(stock.answers[name].logprobs, abs=1e-3), name


def test_exact_requests_read_what_is_exact_and_no_more(sparse: Served, requests: Requests) -> None:
    """The first ``min_tokens`` of what sparse requests wrote, and all of what exact ones did."""
    exact = requests.exact
    assert exact["chunks"].cached_tokens == MIN_TOKENS
    assert sparse.answers["prefix: same prompt"].cached_tokens >= 1900
    for name in ("prefix: same prompt", "prefix: other tail"):
        assert exact[name].cached_tokens >= 1900, name
    assert exact["beside concurrent: 2600"].cached_tokens >= 1280  # the server's own level reads its own


def test_levels_by_name(stock: Served, sparse: Served, requests: Requests) -> None:
    """All at once, over one prompt: each reads what its own level wrote, and says what that level says."""
    for answers, cached_by_fast in (requests.together, MIN_TOKENS), (requests.again, 2944):
        expected = stock.answers["chunks"]
        assert answers["exact"].token_ids == expected.token_ids
        assert answers["exact"].logprobs == pytest.approx(expected.logprobs, abs=LOGPROB_TOLERANCE)
        own = pytest.approx(sparse.answers["prefix: same prompt"].logprobs, abs=LOGPROB_TOLERANCE)
        assert answers["1"].logprobs == own
        assert answers["high"].logprobs == own
        assert answers["fast"].logprobs != pytest.approx(expected.logprobs, abs=1e-3)
        assert answers["fast"].logprobs != pytest.approx(answers["high"].logprobs, abs=1e-3)
        cached = {name: answer.cached_tokens for name, answer in answers.items()}
        assert cached == {"exact": 2944, "high": 2944, "1": 2944, "fast": cached_by_fast}


def test_rows_of_exact_requests_are_counted_as_such(sparse: Served, requests: Requests) -> None:
    assert ("dense", Fallback.REQUESTED) not in sparse.report.rows
    assert requests.report.rows["dense", Fallback.REQUESTED] > 0
    assert requests.report.rows_of("sparse") > sparse.report.rows_of("sparse")  # those beside them


@pytest.mark.parametrize("name", REFUSED)
def test_what_nobody_can_ask_for_is_refused_at_once(requests: Requests, name: str) -> None:
    said = requests.refused[name]
    assert "answered 400" in said
    assert "vllm_xargs sparse_prefill: given" in said
    if name != "beams":
        assert "expected one of 0 (exact), 1 (this server's own level, high), 'exact', 'high', 'fast'" in said
