"""Real servers on a small model in float32: the whole way through vLLM against stock vLLM, and what /metrics says.

Everything kept, tokens must equal stock's, however the prompt arrives: in chunks of 512, after a cached prefix, in a
step with decodes, or together with seven others.
"""

import time
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.server import scenario
from vllm_sparse_backend.demo.model import CONFIG
from vllm_sparse_backend.demo.run import FLUSH_S
from vllm_sparse_backend.demo.scrape import Report, parse
from vllm_sparse_backend.demo.server import Server, sparse_args
from vllm_sparse_backend.settings.reasons import Fallback

pytestmark = pytest.mark.server
pytest.importorskip("vllm")

NUM_LAYERS = CONFIG["num_hidden_layers"]
MIN_TOKENS = 256
# Stock vLLM against itself, the same prompts batched differently, gives up to 2.4e-6.
LOGPROB_TOLERANCE = 2e-5
EVERYTHING = {"method": "dense", "min_tokens": MIN_TOKENS, "min_query_tokens": 1}
SPARSE = {
    "method": "vertical_slash",
    "min_tokens": MIN_TOKENS,
    "min_query_tokens": 1,
    "params": {"vertical_tokens": 64, "slash_tokens": 104},
}


class Served(NamedTuple):
    answers: dict[str, scenario.Answer]
    report: Report


def serve(model: Path, args: tuple[str, ...], env: dict[str, str] | None = None) -> Served:
    with Server(model, (*args, *scenario.SERVER_ARGS), env=env) as server:
        answers = scenario.run(server)
        time.sleep(FLUSH_S)
        scenario.ask(server, scenario.prompt(5, seed=0))  # counters are written when the server next steps
        return Served(answers, parse(server.get("/metrics")))


@pytest.fixture(scope="module")
def stock(small_model: Path) -> Served:
    return serve(small_model, (), {"VLLM_PLUGINS": "none"})


@pytest.fixture(scope="module")
def everything(small_model: Path) -> Served:
    return serve(small_model, sparse_args(EVERYTHING))


@pytest.fixture(scope="module")
def sparse(small_model: Path) -> Served:
    return serve(small_model, sparse_args(SPARSE))


def test_the_scenario_is_what_its_names_say(stock: Served) -> None:
    """Prefix-cache hits where they are meant; none elsewhere; and stock vLLM has none of our counters."""
    for name, answer in stock.answers.items():
        hits = name in ("prefix: same prompt", "prefix: other tail")
        assert (answer.cached_tokens >= 1900) if hits else answer.cached_tokens == 0, (name, answer)
    assert stock.report == Report()


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
        # An answer of n tokens is a last chunk and n - 1 decodes, each one row of a step.
        decodes = sum(len(answer.token_ids) - 1 for answer in served.answers.values())
        assert served.report.rows_of("decode") >= decodes


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
