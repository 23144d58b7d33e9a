"""What ran sparse, for /metrics: counted on the device, read back without waiting, told to Prometheus.

vLLM's server collects counters of its worker processes where PROMETHEUS_MULTIPROC_DIR is set before it starts.
"""

import time
from collections import Counter as Tally

import torch
from prometheus_client import Counter

from vllm_sparse_backend.reasons import Fallback
from vllm_sparse_kernels import SparseIndex
from vllm_sparse_kernels.index import causal_pairs

ROWS = Counter(
    "sparse_prefill_rows", "Rows (one request in one step) by what they ran on, and why dense.", ["path", "reason"]
)
TILES = Counter("sparse_prefill_tiles", "Tiles of 128 queries that ran sparse.", ["layer"])
KEPT_PAIRS = Counter("sparse_prefill_kept_pairs", "(query, key) pairs computed in sparse tiles.", ["layer"])
CAUSAL_PAIRS = Counter("sparse_prefill_causal_pairs", "(query, key) pairs that dense would compute there.", ["layer"])


class Recorder:
    """Counts of one worker. Kept pairs stay on the device until a copy of them has arrived on its own."""

    def __init__(self, device: torch.device, interval_s: float, counts_rows: bool = True) -> None:
        self.device = device
        self._interval_s = interval_s
        self._counts_rows = counts_rows
        self._due = time.monotonic() + interval_s
        self._places: dict[int, int] = {}
        self._kept = torch.zeros(0, dtype=torch.int64, device=device)
        self._told = [0]
        self._rows: Tally[tuple[str, str]] = Tally()
        self._tiles: Tally[int] = Tally()
        self._causal: Tally[int] = Tally()
        self._copy: tuple[torch.Tensor, torch.cuda.Event | None] | None = None

    def add_layers(self, layers: list[int]) -> None:
        """Make room for these layers; before the first step."""
        self._places = {layer: place for place, layer in enumerate(layers)}
        self._kept = torch.zeros(len(layers), dtype=torch.int64, device=self.device)
        self._told = [0] * len(layers)

    def count_row(self, path: str, reason: Fallback | None) -> None:
        if self._counts_rows:
            self._rows[path, reason.value if reason else ""] += 1

    def count_pairs(self, layer: int, index: SparseIndex) -> None:
        """Add one layer's index of this step. Stays on the device."""
        self._kept[self._places[layer]] += index.kept_pairs()
        self._tiles[layer] += index.rows.num_tiles
        self._causal[layer] += index.num_heads * causal_pairs(index.rows)

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
