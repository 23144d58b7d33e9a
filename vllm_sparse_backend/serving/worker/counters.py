# SPDX-License-Identifier: Apache-2.0
"""Counts sparse and dense rows and their pairs. Each worker counts, partly on its device; the server collects.

Nothing here waits for the device, and counting sends nothing. The server calls its workers when somebody reads its
/metrics (``metrics_endpoint``). The counts of host and device in an answer are from the same moment.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import accumulate, product
from typing import NamedTuple

import torch

from vllm_sparse_backend.config.fallback import Fallback
from vllm_sparse_backend.config.metrics import HISTOGRAM_SUM, METRICS
from vllm_sparse_backend.config.plan import DEFAULT
from vllm_sparse_kernels import SparseIndex
from vllm_sparse_kernels.index import causal_pairs
from vllm_sparse_kernels.pair_counts import add_listed_pairs
from vllm_sparse_kernels.share_counts import (
    EDGES,
    LIFTED,
    SHARE_FIELDS,
    SUM,
    UNIT,
    add_share_counts,
    least_share,
    merge_counts,
)

Sample = tuple[str, list[str], float]
"""A metric's name, the values of its labels, and its value: a float, because messages between processes cannot contain
integers beyond 2^64."""

Key = tuple[str, tuple[str, ...]]
"""A metric's name and the values of its labels."""

RowLabels = tuple[str, Fallback | None, str]
"""How a row ran, why it ran dense, and the name of its level (empty for a decode)."""

PADDING, DECODE, DENSE, SPARSE = "padding", "decode", "dense", "sparse"

COUNTER_RANGE = 1 << 64
"""Number of distinct values of a counter on the device, which wraps around."""

_dummy_runs = 0
"""Dummy runs that this process is in.

This is state of the module because vLLM has no place for it. A dummy run is known only to the wrapper of the worker's
method (``hooks``), and vLLM passes neither this method's name nor a flag to metadata builders. Our ``Worker`` cannot
hold it either: layers create it within the first of these runs.
"""


@contextmanager
def not_counting() -> Iterator[None]:
    """Suspend counting within the context, for runs without requests: warm-up, graph capture and dummy steps."""
    global _dummy_runs
    _dummy_runs += 1
    try:
        yield
    finally:
        _dummy_runs -= 1


def is_counting() -> bool:
    """Return whether this process is outside of any ``not_counting``. Metadata builders read it, once per step."""
    return _dummy_runs == 0


class HostCopy:
    """An asynchronous copy of a tensor to the host, queued behind the work that computes the tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        on_device = tensor.device.type == "cuda"
        self.host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=on_device)
        self.host.copy_(tensor, non_blocking=on_device)
        self._event = torch.cuda.Event() if on_device else None
        if self._event is not None:
            self._event.record()

    def arrived(self) -> bool:
        """Return whether the copy is complete. Does not wait."""
        return self._event is None or bool(self._event.query())


class PendingCounts(NamedTuple):
    """Counts of one moment. The copy of the device's part to the host may still be running."""

    host_counts: dict[Key, float]
    """Counted on the host, as integers of any size."""
    listed: HostCopy
    """Listed pairs, counted on the device."""
    shares: HostCopy
    """Kept shares, counted on the device: [levels, SHARE_FIELDS]."""
    variance_shares: HostCopy
    """Shares of the score variance, counted on the device: [levels, SHARE_FIELDS]."""

    def arrived(self) -> bool:
        """Return whether all copies are complete. Does not wait."""
        return all(copy.arrived() for copy in (self.listed, self.shares, self.variance_shares))


class DeviceTotals:
    """Totals of counters on the device, corrected for the wrap-around of their 64 bits."""

    def __init__(self) -> None:
        self.totals: list[int] = []
        self._last: list[int] = []

    def update(self, counters: list[int]) -> None:
        """Add what the counters have counted since the last call, each less than ``COUNTER_RANGE``."""
        new = [0] * (len(counters) - len(self.totals))
        last, totals = self._last + new, self.totals + new
        self.totals = [
            total + (now - before) % COUNTER_RANGE for total, now, before in zip(totals, counters, last, strict=True)
        ]
        self._last = counters


class Recorder:
    """Counts of one worker."""

    def __init__(self, device: torch.device, is_first_rank: bool = True) -> None:
        self.device = device
        self.is_first_rank = is_first_rank
        self._places: dict[tuple[int, str], int] = {}
        self._listed = torch.zeros(0, dtype=torch.int64, device=device)
        self._total_listed = DeviceTotals()
        self._levels: dict[str, int] = {}
        self._shares = torch.zeros(0, SHARE_FIELDS.value, dtype=torch.int64, device=device)
        """[levels, SHARE_FIELDS], kept shares; see ``share_counts``."""
        self._variance_shares = torch.zeros_like(self._shares)
        """[levels, SHARE_FIELDS], shares of the score variance."""
        self._total_shares = DeviceTotals()
        self._total_variance_shares = DeviceTotals()
        self._counts: dict[Key, float] = {}
        self._pending: PendingCounts | None = None
        self._arrived: list[Sample] = []

    def add_layers(self, layers: Iterable[int], levels: Iterable[str] = (DEFAULT,)) -> None:
        """Add counters for layers, before the first step. Layers that already have counters keep their counts."""
        levels = tuple(levels)
        for place in product(layers, levels):
            self._places.setdefault(place, len(self._places))
        self._listed = torch.cat([self._listed, self._listed.new_zeros(len(self._places) - len(self._listed))])
        for level in levels:
            self._levels.setdefault(level, len(self._levels))
        new_lines = self._shares.new_zeros(len(self._levels) - len(self._shares), SHARE_FIELDS.value)
        self._shares = torch.cat([self._shares, new_lines])
        self._variance_shares = torch.cat([self._variance_shares, new_lines])

    def count_rows(self, labels: RowLabels, rows: int = 1) -> None:
        """Count rows that ran in the same way. Padding rows are not counted."""
        path, reason, level = labels
        if self.is_first_rank and path != PADDING:
            self._add("rows", (path, reason.value if reason else "", level), rows)

    def count_pairs(self, layer: int, index: SparseIndex, level: str = DEFAULT) -> None:
        """Count the pairs and the shares of one layer in a step. Does not wait for the device."""
        if index.kept_shares is not None:
            self._count_shares(index.kept_shares, self._shares, level)
        if index.variance_shares is not None:
            self._count_shares(index.variance_shares, self._variance_shares, level)
        if self.device.type == "cpu":
            self._listed[self._places[layer, level]] += index.listed_pairs().sum()
        else:
            add_listed_pairs(index, self._listed, self._places[layer, level])
        causal = index.num_heads * causal_pairs(index.rows)
        counts = {"kept_pairs": -index.masked_pairs, "causal_pairs": causal, "tiles": index.rows.num_tiles}
        for name, amount in counts.items():
            if name != "tiles" or self.is_first_rank:
                self._add(name, (layer, level), amount)

    def kept_pairs_counter(self, layer: int, level: str, causal_pairs: int, num_tiles: int) -> torch.Tensor:
        """Count a call whose kernels count the pairs that they keep. Does not wait for the device."""
        amounts = {"kept_pairs": 0, "causal_pairs": causal_pairs, "tiles": num_tiles if self.is_first_rank else 0}
        for name, amount in amounts.items():
            if name != "tiles" or amount:
                self._add(name, (layer, level), amount)
        place = self._places[layer, level]
        return self._listed[place : place + 1]

    def _count_shares(self, row_counts: torch.Tensor, totals: torch.Tensor, level: str) -> None:
        """Add the counts of all rows to the line of a level.

        ``row_counts`` is [num_rows, SHARE_FIELDS], and ``totals`` [levels, SHARE_FIELDS].
        """
        i_level = self._levels[level]
        if self.device.type != "cpu":
            add_share_counts(row_counts, totals, i_level)
            return
        for counts in row_counts:
            totals[i_level] = merge_counts(totals[i_level], counts)

    def count(self, name: str, labels: Mapping[str, object], amount: float = 1) -> None:
        """Add to a counter."""
        self._add(*_key(name, "counter", labels), amount)

    def gauge(self, name: str, labels: Mapping[str, object], value: float) -> None:
        """Set a gauge."""
        self._counts[_key(name, "gauge", labels)] = value

    def _add(self, name: str, labels: Iterable[object], amount: float) -> None:
        key = name, tuple(map(str, labels))
        self._counts[key] = self._counts.get(key, 0) + amount

    def samples(self, start: bool = True) -> tuple[list[Sample], bool]:
        """Return the latest counts that have arrived on the host. Never waits for the device."""
        self._take_arrived()
        if start and self._pending is None:
            self._start_copy()
            self._take_arrived()
        return self._arrived, self._pending is not None

    def _start_copy(self) -> None:
        tensors = self._listed, self._shares, self._variance_shares
        self._pending = PendingCounts(dict(self._counts), *map(HostCopy, tensors))

    def _take_arrived(self) -> None:
        """Turn pending counts into samples, if they have arrived."""
        if self._pending is None:
            return
        if self._pending.arrived():
            counts, listed, shares, variance_shares = self._pending
            self._total_listed.update(listed.host.tolist())
            self._total_shares.update(shares.host.flatten().tolist())
            self._total_variance_shares.update(variance_shares.host.flatten().tolist())
            for (layer, level), place in self._places.items():
                key = "kept_pairs", (str(layer), level)
                if key in counts and place < len(self._total_listed.totals):
                    counts[key] += self._total_listed.totals[place]
            self._arrived = [(name, [*labels], float(value)) for (name, labels), value in counts.items()]
            for level, i_level in self._levels.items():
                line = slice(i_level * SHARE_FIELDS.value, (i_level + 1) * SHARE_FIELDS.value)
                self._arrived += kept_share_samples(level, self._total_shares.totals[line])
                variance_counts = self._total_variance_shares.totals[line]
                self._arrived += share_samples("score_variance_share", level, variance_counts)
            self._pending = None


def kept_share_samples(level: str, counts: list[int]) -> list[Sample]:
    """Return the samples of a level's kept shares."""
    samples = share_samples("kept_share", level, counts)
    return [*samples, ("lifted_queries", [level], float(counts[LIFTED.value]))] if samples else []


def share_samples(name: str, level: str, counts: list[int]) -> list[Sample]:
    """Return the samples of a level's shares."""
    least = least_share(counts) if counts else None
    if least is None:
        return []
    ends = [*map(str, EDGES), "+Inf"]
    cumulative = accumulate(counts[: len(ends)])
    buckets: list[Sample] = [(name, [level, end], float(count)) for end, count in zip(ends, cumulative, strict=True)]
    total = counts[SUM.value] / UNIT.value
    return [*buckets, (name, [level, HISTOGRAM_SUM], total), (f"{name}_least", [level], least)]


def _key(name: str, kind: str, labels: Mapping[str, object]) -> Key:
    metric = METRICS.get(name)
    if metric is None or metric.type != kind or set(metric.labels) != set(labels):
        raise ValueError(f"Recorder: given {kind} {name!r} with labels {sorted(labels)}, expected a metric of METRICS")
    return name, tuple(str(labels[label]) for label in metric.labels)
