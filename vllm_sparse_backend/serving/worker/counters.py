# SPDX-License-Identifier: Apache-2.0
"""What ran sparse: counted by each worker, on its device where the numbers are there, and pulled by the server.

Nothing here waits for the device, nor does counting tell anybody: ``metrics_endpoint`` has the server ask when somebody
reads its /metrics. What it then gets is of one moment: host's and device's counts were taken together.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import product
from typing import NamedTuple

import torch

from vllm_sparse_backend.config.fallback import Fallback
from vllm_sparse_backend.config.metrics import METRICS
from vllm_sparse_backend.config.plan import DEFAULT
from vllm_sparse_kernels import SparseIndex
from vllm_sparse_kernels.index import causal_pairs
from vllm_sparse_kernels.pair_counts import add_listed_pairs

Sample = tuple[str, list[str], float]
"""A metric's name, its labels' values, and its own, a float: messages between processes hold no integer past 2^64."""

Key = tuple[str, tuple[str, ...]]
"""A metric's name, and its labels' values."""

Way = tuple[str, Fallback | None, str]
"""What a row ran on, why dense, and its level, of which a decode has none."""

PADDING, DECODE, DENSE, SPARSE = "padding", "decode", "dense", "sparse"

COUNTER_RANGE = 1 << 64
"""Of a device's counters: past it they begin anew."""

_dummies = 0


@contextmanager
def not_counting() -> Iterator[None]:
    """Around what this process's worker does for no request: warm-up, graph capture, steps beside busy ranks."""
    global _dummies
    _dummies += 1
    try:
        yield
    finally:
        _dummies -= 1


def is_counting() -> bool:
    return _dummies == 0


class HostCopy:
    """A tensor on its way to the host, behind the work that it is of: there once it has ``arrived``."""

    def __init__(self, tensor: torch.Tensor) -> None:
        on_device = tensor.device.type == "cuda"
        self.host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=on_device)
        self.host.copy_(tensor, non_blocking=on_device)
        self._event = torch.cuda.Event() if on_device else None
        if self._event is not None:
            self._event.record()

    def arrived(self) -> bool:
        return self._event is None or bool(self._event.query())


class OnItsWay(NamedTuple):
    """Counts of one moment; the device's are there once its copy is. Counters of the host are integers of any size."""

    of_host: dict[Key, float]
    listed: HostCopy


class Recorder:
    """Counts of one worker.

    Of the tensor-parallel ranks, which share a layer's heads, ``is_first_rank`` alone counts what is the same on all.
    """

    def __init__(self, device: torch.device, is_first_rank: bool = True) -> None:
        self.device = device
        self.is_first_rank = is_first_rank
        self._places: dict[tuple[int, str], int] = {}
        self._listed = torch.zeros(0, dtype=torch.int64, device=device)
        self._last_listed: list[int] = []
        self._total_listed: list[int] = []
        """Of all that the device has counted, however often its 64 bits were full."""
        self._counts: dict[Key, float] = {}
        self._on_its_way: OnItsWay | None = None
        self._arrived: list[Sample] = []

    def add_layers(self, layers: Iterable[int], levels: Iterable[str] = (DEFAULT,)) -> None:
        """Make room for these layers at these levels, if there is none yet; before the first step."""
        for place in product(layers, levels):
            self._places.setdefault(place, len(self._places))
        self._listed = torch.cat([self._listed, self._listed.new_zeros(len(self._places) - len(self._listed))])

    def count_rows(self, way: Way, rows: int = 1) -> None:
        path, reason, level = way
        if self.is_first_rank and is_counting() and path != PADDING:
            self._add("rows", (path, reason.value if reason else "", level), rows)

    def count_pairs(self, layer: int, index: SparseIndex, level: str = DEFAULT) -> None:
        """Add one layer's index of this step's rows of a level. Stays on the device."""
        if not is_counting():
            return
        if self.device.type == "cpu":
            self._listed[self._places[layer, level]] += index.listed_pairs().sum()
        else:
            add_listed_pairs(index, self._listed, self._places[layer, level])
        causal = index.num_heads * causal_pairs(index.rows)
        counts = {"kept_pairs": -index.masked_pairs, "causal_pairs": causal, "tiles": index.rows.num_tiles}
        for name, amount in counts.items():
            if name != "tiles" or self.is_first_rank:
                self._add(name, (layer, level), amount)

    def count(self, name: str, labels: Mapping[str, object], amount: float = 1) -> None:
        """Add to one of the counters in ``settings.metrics``; labels: all that are its own."""
        self._add(*_key(name, "counter", labels), amount)

    def gauge(self, name: str, labels: Mapping[str, object], value: float) -> None:
        """Set one of the gauges in ``settings.metrics``; labels: all that are its own."""
        self._counts[_key(name, "gauge", labels)] = value

    def _add(self, name: str, labels: Iterable[object], amount: float) -> None:
        key = name, tuple(map(str, labels))
        self._counts[key] = self._counts.get(key, 0) + amount

    def samples(self, start: bool = True) -> tuple[list[Sample], bool]:
        """What was counted up to some moment, and whether a later one's counts are on their way from the device.

        start: have the counts of now set out, unless some are under way. Never waits for them to arrive.
        """
        self._arrive()
        if start and self._on_its_way is None:
            self._set_out()
            self._arrive()
        return self._arrived, self._on_its_way is not None

    def _set_out(self) -> None:
        self._on_its_way = OnItsWay(dict(self._counts), HostCopy(self._listed))

    def _arrive(self) -> None:
        if self._on_its_way is None:
            return
        found, listed = self._on_its_way
        if listed.arrived():
            self._add_listed(listed.host.tolist())
            for (layer, level), place in self._places.items():
                key = "kept_pairs", (str(layer), level)
                if key in found and place < len(self._total_listed):
                    found[key] += self._total_listed[place]
            self._arrived = [(name, [*labels], float(value)) for (name, labels), value in found.items()]
            self._on_its_way = None

    def _add_listed(self, listed: list[int]) -> None:
        """Add what the device has counted since it was last read, less than ``COUNTER_RANGE`` for each place."""
        added = [0] * (len(listed) - len(self._total_listed))
        before, totals = self._last_listed + added, self._total_listed + added
        self._total_listed = [
            total + (now - then) % COUNTER_RANGE for total, now, then in zip(totals, listed, before, strict=True)
        ]
        self._last_listed = listed


def _key(name: str, kind: str, labels: Mapping[str, object]) -> Key:
    metric = METRICS.get(name)
    if metric is None or metric.type != kind or set(metric.labels) != set(labels):
        raise ValueError(f"Recorder: given {kind} {name!r} with labels {sorted(labels)}, expected one of METRICS")
    return name, tuple(str(labels[label]) for label in metric.labels)
