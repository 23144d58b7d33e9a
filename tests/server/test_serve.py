# SPDX-License-Identifier: Apache-2.0
"""Real servers on a small model in float32: the whole path through vLLM against stock vLLM, and the content of
/metrics.

With everything kept, tokens must equal stock's, however the prompt arrives: in chunks of 512, after a cached prefix, in
a step with decodes, or together with other prompts. Exact requests at a sparse server must do so too, at any levels of
other requests.
"""

from typing import Any, NamedTuple

import pytest

from tests.helpers import scenario, server_levels
from tests.helpers.scenario import Servers
from tests.helpers.servers import Server
from tests.helpers.tiny_models import CONFIG
from vllm_sparse_backend.config.fallback import Fallback
from vllm_sparse_backend.evaluation.metrics_scrape import MetricsReport

pytestmark = pytest.mark.server

NUM_LAYERS = CONFIG["num_hidden_layers"]
Answers = dict[str, scenario.Answer]


class Served(NamedTuple):
    """Answers to the scenario, and the counts during it."""

    answers: Answers
    report: MetricsReport

    @staticmethod
    def by(server: Server, **more: Any) -> "Served":
        before = scenario.counted(server)
        return Served(scenario.run(server, **more), scenario.counted(server, before))


class Answered(NamedTuple):
    """Answers of both servers, in the order of the requests."""

    stock: Served
    everything: Served
    sparse: Served
    """Requests at the server's default level."""
    exact: Served
    """Exact requests, next to requests with the same beginnings at the server's default level."""


@pytest.fixture(scope="module")
def answered(servers: Servers) -> Answered:
    ours = servers.ours
    return Answered(
        Served.by(servers.stock),
        Served.by(ours, level="everything"),
        Served.by(ours),
        Served.by(ours, level=0, beside=1),
    )


def assert_same(answers: Answers, expected: Answers) -> None:
    for name, answer in expected.items():
        scenario.assert_same(answers[name], answer)


def test_the_scenario_is_what_its_names_say(servers: Servers, answered: Answered) -> None:
    """The prefix cache has hits exactly where intended, and stock vLLM has none of our counters."""
    cached = {name: answer.cached_tokens for name, answer in answered.stock.answers.items()}
    assert cached == dict.fromkeys(cached, 0) | scenario.CACHED
    assert "sparse_prefill" not in servers.stock.get("/metrics")


def test_everything_kept_gives_the_tokens_of_stock_vllm(answered: Answered) -> None:
    assert_same(answered.everything.answers, answered.stock.answers)
    for name, expected in answered.stock.answers.items():
        assert answered.everything.answers[name].cached_tokens == expected.cached_tokens, name
    densities = {layer: counts.density for layer, counts in scenario.layers_of(answered.everything.report).items()}
    assert densities == dict.fromkeys(range(NUM_LAYERS), 1.0)  # it ran sparse


def test_rows_are_counted_by_the_way_they_went(answered: Answered) -> None:
    """The same requests at both levels: short rows are dense with the reason, decodes count as decodes, and no other
    rows are dense."""
    for served in (answered.everything, answered.sparse):
        assert set(served.report.rows) == {("sparse", ""), ("dense", Fallback.TOO_SHORT), ("decode", "")}
        # An answer of n tokens is a last chunk and n - 1 decodes, each a row of a step; some prompts end with a
        # chunk of a single token.
        decodes = sum(len(answer.token_ids) - 1 for answer in served.answers.values())
        assert decodes <= served.report.by("rows", "path")["decode"] <= decodes + len(served.answers)


def test_nothing_is_counted_before_the_first_request(servers: Servers) -> None:
    before = servers.untouched
    assert (before.rows, scenario.layers_of(before)) == ({}, {})
    assert before.by("layers", "attention") == {"torch": NUM_LAYERS}


def test_sparse_prefill_leaves_out_something_in_every_layer_and_it_shows(answered: Answered) -> None:
    """This shows that the tests of exact answers can fail, because of a shared cache or a row that runs sparse."""
    assert set(scenario.layers_of(answered.sparse.report)) == set(range(NUM_LAYERS))
    assert all(0 < pairs.density < 1 for pairs in scenario.layers_of(answered.sparse.report).values())
    for name in ("chunks", "prefix: same prompt", "prefix: other tail", "mixed: prefill 901", "concurrent: 1301"):
        expected = answered.stock.answers[name].logprobs
        assert answered.sparse.answers[name].logprobs != pytest.approx(expected, abs=1e-3), name


def test_short_prompts_are_dense_at_sparse_servers(answered: Answered) -> None:
    short = {f"concurrent: {length}" for length in scenario.CONCURRENT_LENGTHS if length <= server_levels.MIN_TOKENS}
    assert len(short) == 2
    assert_same(answered.sparse.answers, {name: answered.stock.answers[name] for name in short})


def test_exact_requests_equal_stock_after_any_mix_of_sparse_ones(answered: Answered) -> None:
    """Sparse requests wrote the same prefixes before, in chunks and in parallel, and as many sparse requests run at the
    same time."""
    assert_same(answered.exact.answers, answered.stock.answers)


def test_rows_of_exact_requests_are_counted_as_such(answered: Answered) -> None:
    assert answered.exact.report.rows["dense", Fallback.REQUESTED] > 0
    assert answered.exact.report.by("rows", "path")["sparse"] > 0  # the requests next to them


def test_counts_of_known_requests(servers: Servers) -> None:
    scenario.assert_counts(servers.ours, seed=8000)
