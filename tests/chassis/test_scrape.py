"""Reading the counters back from a /metrics page."""

import math

import pytest

from vllm_sparse_backend.demo.scrape import LayerCounts, Report, parse

PAGE = """\
# HELP vllm:num_requests_running Number of requests
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0"} 1.0
# HELP sparse_prefill_rows_total Rows by the way they went
# TYPE sparse_prefill_rows_total counter
sparse_prefill_rows_total{path="sparse",reason=""} 5.0
sparse_prefill_rows_total{path="dense",reason="too_short"} 2.0
sparse_prefill_rows_total{path="decode",reason=""} 31.0
# HELP sparse_prefill_tiles_total Tiles
# TYPE sparse_prefill_tiles_total counter
sparse_prefill_tiles_total{layer="0"} 64.0
sparse_prefill_tiles_total{layer="10"} 64.0
# TYPE sparse_prefill_kept_pairs_total counter
sparse_prefill_kept_pairs_total{layer="0"} 1.0e+09
sparse_prefill_kept_pairs_total{layer="10"} 4.0e+09
# TYPE sparse_prefill_causal_pairs_total counter
sparse_prefill_causal_pairs_total{layer="0"} 4.0e+09
sparse_prefill_causal_pairs_total{layer="10"} 8.0e+09
"""


def test_parse() -> None:
    report = parse(PAGE)
    assert report.rows == {("sparse", ""): 5, ("dense", "too_short"): 2, ("decode", ""): 31}
    assert report.layers == {
        0: LayerCounts(64, 1_000_000_000, 4_000_000_000),
        10: LayerCounts(64, 4_000_000_000, 8_000_000_000),
    }
    assert report.layers[0].density == 0.25
    assert report.problem() is None


def test_a_page_without_our_counters_is_a_problem() -> None:
    report = parse('# TYPE up gauge\nup{job="x"} 1\n')
    assert report == Report()
    assert report.problem() == "no row ran sparse (the server counted no rows at all)"


def test_dense_rows_alone_are_a_problem_with_their_reason() -> None:
    page = 'sparse_prefill_rows_total{path="dense",reason="too_short"} 3\n'
    assert (
        parse("# TYPE sparse_prefill_rows counter\n" + page).problem() == "no row ran sparse (dense rows: too_short: 3)"
    )


@pytest.mark.parametrize(("kept", "causal"), [(0, 10), (10, 10), (11, 10), (0, 0)])
def test_a_density_outside_0_and_1_is_a_problem(kept: int, causal: int) -> None:
    report = parse(PAGE)
    report.layers[3] = LayerCounts(1, kept, causal)
    problem = report.problem()
    assert problem is not None
    assert problem.startswith("layer 3 has density ")


def test_density_of_nothing() -> None:
    assert math.isnan(LayerCounts().density)
