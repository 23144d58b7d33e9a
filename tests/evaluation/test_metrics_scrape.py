# SPDX-License-Identifier: Apache-2.0
"""Reading the counters back from a /metrics page."""

from tests.helpers.scenario import layers_of
from vllm_sparse_backend.evaluation.metrics_scrape import Pairs, parse_metrics

PAGE = """\
vllm:num_requests_running{engine="0"} 1.0
sparse_prefill_rows_total{engine="0",path="sparse",reason=""} 5.0
sparse_prefill_rows_total{engine="0",path="dense",reason="too_short"} 2.0
sparse_prefill_kept_pairs_total{engine="0",layer="0"} 1.0e+09
sparse_prefill_kept_pairs_total{engine="0",layer="10"} 4.0e+09
sparse_prefill_causal_pairs_total{engine="0",layer="0"} 4.0e+09
sparse_prefill_causal_pairs_total{engine="0",layer="10"} 8.0e+09
sparse_prefill_compilations_total{engine="0",when="warmup"} 12.0
sparse_prefill_arena_overflows_total{engine="0"} 1.0
sparse_prefill_layers{engine="0",attention="hopper"} 30.0
sparse_prefill_layers{engine="0",attention="dense"} 2.0
"""


def test_parse() -> None:
    report = parse_metrics(PAGE)
    assert report.rows == {("sparse", ""): 5, ("dense", "too_short"): 2}
    assert layers_of(report) == {
        0: Pairs(1_000_000_000, 4_000_000_000),
        10: Pairs(4_000_000_000, 8_000_000_000),
    }
    assert layers_of(report)[0].density == 0.25
    assert report.pairs == Pairs(5_000_000_000, 12_000_000_000)
    assert report.by("layers", "attention") == {"hopper": 30, "dense": 2}
    assert report.by("compilations", "when") == {"warmup": 12}
    assert report.by("arena_overflows").total() == 1


def test_engines_add_up() -> None:
    """Each line appears with the first engine's label, and again with the second engine's."""
    single, double = parse_metrics(PAGE), parse_metrics(PAGE + PAGE.replace('engine="0"', 'engine="1"'))
    assert double.rows == single.rows + single.rows
    assert double.by("layers", "attention") == single.by("layers", "attention") + single.by("layers", "attention")
    assert layers_of(double)[0].kept == 2 * layers_of(single)[0].kept
    assert layers_of(double)[0].density == layers_of(single)[0].density
