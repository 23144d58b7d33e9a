# SPDX-License-Identifier: Apache-2.0
"""The metrics that a server exports on /metrics: one table for the workers, the page and its readers.

Names here have no prefix. Names of counters' samples end in ``_total``. Every sample has the labels of vLLM's own
metrics: ``model_name``, and ``engine``, the number of the data-parallel engine.
"""

from dataclasses import dataclass
from typing import Literal

PREFIX = "sparse_prefill_"
WORKER_METHOD = "sparse_prefill_samples"
"""Name of a worker's method, for ``collective_rpc``, that returns what it has counted since the last call."""

FRESH_QUERY = "sparse_prefill=fresh"
"""Query of /metrics that waits for counts polled after the request arrived, for tools that compare two scrapes."""
FRESH_METRICS_PATH = f"/metrics?{FRESH_QUERY}"

MODEL, ENGINE = "model_name", "engine"


@dataclass(frozen=True)
class Metric:
    """Definition of one metric."""

    name: str
    type: Literal["counter", "gauge"]
    help: str
    labels: tuple[str, ...] = ()
    seen_by_all: bool = False
    """Whether every pipeline stage counts the same: only the first that counts any is used."""

    @property
    def sample(self) -> str:
        """Name of the samples, as queries use it."""
        return PREFIX + self.name + ("_total" if self.type == "counter" else "")

    @property
    def all_labels(self) -> tuple[str, ...]:
        """Labels of every sample, in order."""
        return (MODEL, ENGINE, *self.labels)


LEVEL = "level"
"""Label: the level of the rows' requests. ``on`` is the server's own."""
LAYER_LEVEL = ("layer", LEVEL)
# fmt: off
METRICS = {metric.name: metric for metric in (
    Metric("rows", "counter", "Rows (one request in one step) by path, and by the reason where the path is dense.",
           ("path", "reason", LEVEL), seen_by_all=True),
    Metric("kept_pairs", "counter", "(query, key) pairs computed in sparse rows, all heads.", LAYER_LEVEL),
    Metric("causal_pairs", "counter", "(query, key) pairs of dense attention in sparse rows, all heads.", LAYER_LEVEL),
    Metric("compilations", "counter", "Kernels compiled or loaded from the disk cache, by phase: warmup or serving.",
           ("when",)),
    Metric("arena_overflows", "counter", "Allocations outside the arena (a bug)."),
    Metric("device_bytes", "gauge", "Device memory that the workers hold, without the driver's."),
    Metric("layers", "gauge", "Layers of the model, by the engine of their prefill attention.", ("attention",)),
    Metric("streaming_heads", "gauge",
           "Heads of the model that keep only the first and the nearest keys. Label: a hash of them.",
           ("fingerprint",)),
    Metric("up", "gauge", "Whether the engine answers the polls for these metrics: 1 or 0."),
)}
# fmt: on
