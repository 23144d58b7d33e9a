# SPDX-License-Identifier: Apache-2.0
"""What a server exports on its /metrics: one table for the workers that count, the page, and those who read it.

Names here go without the prefix; a counter's samples end in ``_total``. Every sample has the labels of vLLM's own:
``model_name``, and ``engine``, the number of the data-parallel engine.
"""

from dataclasses import dataclass
from typing import Literal

PREFIX = "sparse_prefill_"
WORKER_METHOD = "sparse_prefill_samples"
"""What the server calls its workers' counts by: vLLM's ``collective_rpc`` takes any name."""
REPORT_METHOD = "sparse_prefill_report_of"
"""And what they have of the requests of one answer."""
AGREEMENT_METHOD = "sparse_prefill_numbers"
"""And from which lengths on their rows go sparse, which all processes must agree on (``serving.agreement``)."""
SWITCH_METHOD = "sparse_prefill_switch"
"""What the engine's core answers itself, before its workers are asked."""
SWITCH_PATH = "/v1/sparse_prefill/switch"
"""vLLM asks for its API key, where it has one, for all that begins with /v1."""

FRESH_QUERY = "sparse_prefill=fresh"
"""Query of /metrics that waits for counts asked for after the request came, for tools that compare before and after."""
FRESH_METRICS_PATH = f"/metrics?{FRESH_QUERY}"

MODEL, ENGINE, RANK = "model_name", "engine", "rank"


@dataclass(frozen=True)
class Metric:
    """One metric. What an engine's workers count adds up; with ``per_rank`` each worker has a sample of its own.

    ``seen_by_all``: workers that have samples at all count the same things, so that one speaks for them.
    """

    name: str
    type: Literal["counter", "gauge"]
    help: str
    labels: tuple[str, ...] = ()
    per_rank: bool = False
    seen_by_all: bool = False

    @property
    def sample(self) -> str:
        """The name that queries use."""
        return PREFIX + self.name + ("_total" if self.type == "counter" else "")

    @property
    def all_labels(self) -> tuple[str, ...]:
        return (MODEL, ENGINE, *((RANK,) if self.per_rank else ()), *self.labels)


LAYER = ("layer",)
LEVEL = "level"
"""What rows' requests asked for: ``default`` is the server's own."""
LAYER_LEVEL = (*LAYER, LEVEL)
# fmt: off
_TABLE = (
    Metric("rows", "counter", "Rows (one request in one step) by what they ran on, and why dense.",
           ("path", "reason", LEVEL), seen_by_all=True),
    Metric("tiles", "counter", "Tiles of 128 queries that ran sparse.", LAYER_LEVEL),
    Metric("kept_pairs", "counter", "(query, key) pairs computed in sparse tiles, of all heads.", LAYER_LEVEL),
    Metric("causal_pairs", "counter", "(query, key) pairs that dense would compute there, of all heads.", LAYER_LEVEL),
    Metric("prefill_pairs", "counter",
           "(query, key) pairs that dense would compute in all prefills, of all heads of all layers that attend."),
    Metric("compilations", "counter", "Kernels that were compiled, or read from disk, and when: warmup or serving.",
           ("when",)),
    Metric("arena_overflows", "counter", "Allocations outside the arena (a bug)."),
    Metric("arena_bytes", "gauge", "Memory reserved for selection and attention.", per_rank=True),
    Metric("arena_peak_bytes", "gauge", "The most of it that was in use at a time.", per_rank=True),
    Metric("device_bytes", "gauge", "Memory of the device that the worker holds, not counting drivers.", per_rank=True),
    Metric("layers", "gauge", "The model's layers by what computes the attention of their prefills.", ("attention",)),
    Metric("guard_checks", "counter", "Calls of which the guard computed some queries densely and compared.",
           LAYER_LEVEL),
    Metric("guard_trips", "counter", "Times that the guard turned a layer dense.", LAYER_LEVEL),
    Metric("guard_error", "gauge", "Mean relative error of the guard's last checks.", LAYER_LEVEL, per_rank=True),
    Metric("guard_dense", "gauge", "Whether the guard keeps the layer dense at present: 1 or 0.", LAYER_LEVEL,
           per_rank=True),
    Metric("switched_exact", "gauge", "Whether all new requests are exact, as the server was switched: 1 or 0."),
    Metric("up", "gauge", "Whether the engine answers when it is asked for its counts: 1 or 0."),
)
# fmt: on

METRICS: dict[str, Metric] = {metric.name: metric for metric in _TABLE}
