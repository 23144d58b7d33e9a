# SPDX-License-Identifier: Apache-2.0
"""The metrics that a server exports on /metrics: one table for the workers, the page and its readers.

Names here have no prefix. Names of counters' samples end in ``_total``. Every sample has the labels of vLLM's own
metrics: ``model_name``, and ``engine``, the number of the data-parallel engine.
"""

from dataclasses import dataclass
from typing import Literal

PREFIX = "sparse_prefill_"
WORKER_METHOD = "sparse_prefill_samples"
"""Name of the ``collective_rpc`` call that returns a worker's samples."""
REPORT_METHOD = "sparse_prefill_report_of"
"""Name of the ``collective_rpc`` call that returns how the requests of one response were prefilled."""
AGREEMENT_METHOD = "sparse_prefill_numbers"
"""Name of the ``collective_rpc`` call that returns the lengths from which a worker's rows run sparse. All processes
must agree on them (``serving/frontend/worker_agreement.py``)."""
SWITCH_METHOD = "sparse_prefill_switch"
"""Name of the call that the engine core answers itself, without its workers."""
SWITCH_PATH = "/v1/sparse_prefill/switch"
"""Path of the switch. It begins with /v1, so that vLLM requires the server's API key, if there is a key."""

FRESH_QUERY = "sparse_prefill=fresh"
"""Query of /metrics that waits for counts polled after the request arrived, for tools that compare two scrapes."""
FRESH_METRICS_PATH = f"/metrics?{FRESH_QUERY}"

MODEL, ENGINE, RANK = "model_name", "engine", "rank"
BUCKET_END = "le"
"""Label: the upper end of a histogram's bucket, which counts all smaller and equal values."""
HISTOGRAM_SUM = "sum"
"""Value of ``BUCKET_END`` in a worker's sample with the sum of a histogram's values."""


@dataclass(frozen=True)
class Metric:
    """Definition of one metric."""

    name: str
    type: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    per_rank: bool = False
    seen_by_all: bool = False

    @property
    def sample(self) -> str:
        """Name of the samples, as queries use it; for a histogram, the common prefix of its samples' names."""
        return PREFIX + self.name + ("_total" if self.type == "counter" else "")

    @property
    def samples(self) -> tuple[str, ...]:
        """Names of all samples, as queries use them: a histogram has three."""
        if self.type == "histogram":
            return tuple(f"{self.sample}_{part}" for part in ("bucket", "sum", "count"))
        return (self.sample,)

    @property
    def all_labels(self) -> tuple[str, ...]:
        """Labels of every sample, in order, without the ``le`` of a histogram's buckets."""
        return (MODEL, ENGINE, *((RANK,) if self.per_rank else ()), *self.labels)

    @property
    def worker_labels(self) -> tuple[str, ...]:
        """Labels of the samples that a worker sends.

        A worker sends a sample for each bucket of a histogram, and one whose ``le`` is ``HISTOGRAM_SUM``. The last
        bucket, whose ``le`` is ``+Inf``, is also the count.
        """
        return (*self.labels, BUCKET_END) if self.type == "histogram" else self.labels


LAYER = ("layer",)
LEVEL = "level"
"""Label: the level of the rows' requests. ``default`` is the server's own."""
LAYER_LEVEL = (*LAYER, LEVEL)
# fmt: off
_TABLE = (
    Metric("rows", "counter", "Rows (one request in one step) by path, and by the reason where the path is dense.",
           ("path", "reason", LEVEL), seen_by_all=True),
    Metric("tiles", "counter", "Tiles of 128 queries that ran sparse.", LAYER_LEVEL),
    Metric("kept_pairs", "counter", "(query, key) pairs computed in sparse tiles, all heads.", LAYER_LEVEL),
    Metric("causal_pairs", "counter", "(query, key) pairs of dense attention in sparse tiles, all heads.",
           LAYER_LEVEL),
    Metric("kept_share", "histogram",
           "Shares of their own estimated attention that queries keep, for methods with a floor; a sample of queries.",
           (LEVEL,)),
    Metric("kept_share_least", "gauge", "Least of these shares since the worker started.", (LEVEL,), per_rank=True),
    Metric("lifted_queries", "counter",
           "Queries in that histogram that were below the floor and added blocks.", (LEVEL,)),
    Metric("score_variance_share", "histogram",
           "Shares of the score variance that the maps of low_rank hold, by row, layer and kv head of a step.",
           (LEVEL,)),
    Metric("score_variance_share_least", "gauge", "Least of these shares since the worker started.", (LEVEL,),
           per_rank=True),
    Metric("prefill_pairs", "counter",
           "(query, key) pairs of dense attention in all prefills, all heads of all attention layers."),
    Metric("compilations", "counter", "Kernels compiled or loaded from the disk cache, by phase: warmup or serving.",
           ("when",)),
    Metric("arena_overflows", "counter", "Allocations outside the arena (a bug)."),
    Metric("arena_bytes", "gauge", "Memory reserved for selection and attention.", per_rank=True),
    Metric("arena_peak_bytes", "gauge", "Peak use of the reserved memory.", per_rank=True),
    Metric("device_bytes", "gauge", "Device memory that the worker holds, without the driver's.", per_rank=True),
    Metric("layers", "gauge", "Layers of the model, by the engine of their prefill attention.", ("attention",)),
    Metric("streaming_heads", "gauge",
           "Heads of the model that keep only the first and the nearest keys in long prompts."),
    Metric("guard_checks", "counter", "Attention calls that the guard compared with dense attention.", LAYER_LEVEL),
    Metric("guard_trips", "counter", "Times the guard forced a layer dense.", LAYER_LEVEL),
    Metric("guard_error", "gauge", "Mean relative error of the guard's last checks.", LAYER_LEVEL, per_rank=True),
    Metric("guard_peak_error", "gauge", "Largest error of a query in any head in the guard's last checks.", LAYER_LEVEL,
           per_rank=True),
    Metric("guard_dense", "gauge", "Whether the guard currently keeps the layer dense: 1 or 0.", LAYER_LEVEL,
           per_rank=True),
    Metric("switched_exact", "gauge", "Whether the switch makes all new requests exact: 1 or 0."),
    Metric("up", "gauge", "Whether the engine answers the polls for these metrics: 1 or 0."),
)
# fmt: on

METRICS: dict[str, Metric] = {metric.name: metric for metric in _TABLE}
