"""What ran sparse, for /metrics: counted on the device, read back without waiting, told to Prometheus.

vLLM's server collects counters of its worker processes where PROMETHEUS_MULTIPROC_DIR is set before it starts.
"""

import time
from collections import Counter as Tally
from collections.abc import Iterable, Mapping

import torch
from prometheus_client import Counter, Gauge

from vllm_sparse_backend.settings.reasons import Fallback
from vllm_sparse_kernels import SparseIndex
from vllm_sparse_kernels.index import causal_pairs

ROWS = Counter(
    "sparse_prefill_rows", "Rows (one request in one step) by what they ran on, and why dense.", ["path", "reason"]
)
TILES = Counter("sparse_prefill_tiles", "Tiles of 128 queries that ran sparse.", ["layer"])
KEPT_PAIRS = Counter("sparse_prefill_kept_pairs", "(query, key) pairs computed in sparse tiles.", ["layer"])
CAUSAL_PAIRS = Counter("sparse_prefill_causal_pairs", "(query, key) pairs that dense would compute there.", ["layer"])
MORE: dict[str, Counter | Gauge] = {
    "guard_checks": Counter("sparse_prefill_guard_checks", "Times that the online guard checked a layer.", ["layer"]),
    "guard_trips": Counter("sparse_prefill_guard_trips", "Times that the guard turned a layer dense.", ["layer"]),
    "guard_error": Gauge(
        "sparse_prefill_guard_error", "Mean relative error in the guard's last checks.", ["layer"],
        multiprocess_mode="livemax",
    ),
    "guard_dense": Gauge(
        "sparse_prefill_guard_dense", "Whether the guard keeps the layer dense at present.", ["layer"],
        multiprocess_mode="livemax",
    ),
}  # fmt: skip
"""What is told as soon as it is known."""


class Recorder:
    """Counts of one worker. Kept pairs stay on the device until a copy of them has arrived on its own.

    Of the tensor-parallel ranks, which share a layer's heads, ``is_first_rank`` alone counts what is the same on all.
    """

    def __init__(self, device: torch.device, interval_s: float, is_first_rank: bool = True) -> None:
        self.device = device
        self._interval_s = interval_s
        self._is_first_rank = is_first_rank
        self._due = time.monotonic() + interval_s
        self._places: dict[int, int] = {}
        self._kept = torch.zeros(0, dtype=torch.int64, device=device)
        self._told: list[int] = []
        self._rows: Tally[tuple[str, str]] = Tally()
        self._tiles: Tally[int] = Tally()
        self._causal: Tally[int] = Tally()
        self._copy: tuple[torch.Tensor, torch.cuda.Event | None] | None = None

    def add_layers(self, layers: Iterable[int]) -> None:
        """Make room for these layers, if there is none yet; before the first step."""
        for layer in layers:
            self._places.setdefault(layer, len(self._places))
        new = len(self._places) - len(self._told)
        self._kept = torch.cat([self._kept, self._kept.new_zeros(new)])
        self._told += [0] * new

    def count_rows(self, path: str, reason: Fallback | None, rows: int = 1) -> None:
        if self._is_first_rank:
            self._rows[path, reason.value if reason else ""] += rows

    def count_pairs(self, layer: int, index: SparseIndex) -> None:
        """Add one layer's index of this step. Stays on the device."""
        self._kept[self._places[layer]] += index.kept_pairs()
        self._causal[layer] += index.num_heads * causal_pairs(index.rows)
        if self._is_first_rank:
            self._tiles[layer] += index.rows.num_tiles

    def count(self, name: str, labels: Mapping[str, object], amount: float = 1) -> None:
        """Add to one of the counters in ``MORE``."""
        counter = MORE[name].labels(*map(str, labels.values()))
        counter.inc(amount)

    def gauge(self, name: str, labels: Mapping[str, object], value: float) -> None:
        """Set one of the gauges in ``MORE``."""
        gauge = MORE[name].labels(*map(str, labels.values()))
        assert isinstance(gauge, Gauge)
        gauge.set(value)

    def flush_when_due(self) -> None:
        """Tell Prometheus what has arrived, and once an interval start another copy from the device."""
        if self._copy is not None and (self._copy[1] is None or self._copy[1].query()):
            self._tell_pairs(self._copy[0])
            self._copy = None
        if self._copy is None and time.monotonic() >= self._due:
            self._due = time.monotonic() + self._interval_s
            self._tell_rows()
            self._start_copy()

    def _tell_rows(self) -> None:
        for (path, reason), count in self._rows.items():
            ROWS.labels(path, reason).inc(count)
        for counter, tally in ((TILES, self._tiles), (CAUSAL_PAIRS, self._causal)):
            for layer, count in tally.items():
                counter.labels(str(layer)).inc(count)
            tally.clear()
        self._rows.clear()

    def _start_copy(self) -> None:
        if self.device.type != "cuda":
            self._copy = self._kept.clone(), None
            return
        host = torch.empty(self._kept.shape, dtype=torch.int64, pin_memory=True)
        host.copy_(self._kept, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        self._copy = host, arrived

    def _tell_pairs(self, kept: torch.Tensor) -> None:
        for layer, place in self._places.items():
            total = int(kept[place])
            if total > self._told[place]:
                KEPT_PAIRS.labels(str(layer)).inc(total - self._told[place])
                self._told[place] = total
