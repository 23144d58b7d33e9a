# SPDX-License-Identifier: Apache-2.0
"""Counts sparse and dense rows and their pairs. Each worker counts, partly on its device; the server collects.

Counting neither waits for the device nor sends anything. The server calls its workers when somebody reads its /metrics
(``metrics_endpoint``). The counts of host and device in an answer are from the same moment: of now if the device is
idle, and of the answer before if it is busy.
"""

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import product
from typing import NamedTuple

import torch

from vllm_sparse_backend.config.fallback import Fallback
from vllm_sparse_backend.config.profile import ON
from vllm_sparse_backend.identity import logger
from vllm_sparse_kernels import SparseIndex
from vllm_sparse_kernels.index import causal_pairs

Key = tuple[str, tuple[str, ...]]
"""A metric's name and the values of its labels."""

COPY_WAIT_S = 0.0005
"""Seconds that an answer waits for a copy of counts from the device: an idle device needs about 50 µs."""

PADDING, DECODE, DENSE, SPARSE = "padding", "decode", "dense", "sparse"
"""How a row of a batch runs. Padding rows have no tokens: they fill a batch up to the size of a CUDA graph."""


class RowKind(NamedTuple):
    """How a row of a batch runs, why it runs dense, and the name of its level (empty for a decode)."""

    path: str
    reason: Fallback | None = None
    level: str = ON


DECODE_ROW = RowKind(DECODE, level="")
PADDING_ROW = RowKind(PADDING)


class PendingCounts:
    """Counts of one moment. The copy of the device's part to the host is queued behind the work that computes it."""

    def __init__(self, counts: dict[Key, int], listed: torch.Tensor) -> None:
        on_device = listed.device.type == "cuda"
        self.counts = counts
        """Counted on the host, as integers of any size."""
        self.listed = torch.empty(listed.shape, dtype=listed.dtype, pin_memory=on_device)
        """Listed pairs, counted on the device."""
        self.listed.copy_(listed, non_blocking=on_device)
        self._event = torch.cuda.Event() if on_device else None
        if self._event is not None:
            self._event.record()

    def arrived(self) -> bool:
        """Return whether the copy is complete. Does not wait."""
        return self._event is None or self._event.query()


class Recorder:
    """Counts of one worker."""

    def __init__(self, device: torch.device, num_layers: int, levels: Iterable[str]) -> None:
        self._places = {place: i for i, place in enumerate(product(range(num_layers), levels))}
        """Positions in ``_listed`` by layer and level."""
        self._listed = torch.zeros(len(self._places), dtype=torch.int64, device=device)
        self._counts: Counter[Key] = Counter()
        self._pending: PendingCounts | None = None
        self._arrived: Mapping[Key, int] = {}
        self._logged: set[Fallback] = set()

    def count_rows(self, kinds: Mapping[RowKind, int]) -> None:
        """Count the rows of a step, and log each new reason for dense rows. Padding rows are not counted."""
        for kind, rows in kinds.items():
            if kind.path != PADDING:
                reason = kind.reason.value if kind.reason else ""
                self._add("rows", (kind.path, reason, kind.level), rows)
            if kind.reason is not None and kind.reason not in self._logged:
                self._logged.add(kind.reason)
                logger.info("sparse-prefill: a row prefills dense: %s (logged once)", kind.reason.explain)

    def count_pairs(self, layer: int, index: SparseIndex, level: str = ON) -> None:
        """Count the pairs of one layer in a step. Does not wait for the device."""
        index.add_listed_pairs(self._listed, self._places[layer, level])
        causal = index.num_heads * causal_pairs(index.rows)
        self._add("kept_pairs", (layer, level), -index.masked_pairs)
        self._add("causal_pairs", (layer, level), causal)

    def kept_pairs_counter(self, layer: int, level: str, causal_pairs: int) -> torch.Tensor:
        """Count a call whose kernels count the pairs that they keep. Does not wait for the device."""
        self._add("kept_pairs", (layer, level), 0)
        self._add("causal_pairs", (layer, level), causal_pairs)
        place = self._places[layer, level]
        return self._listed[place : place + 1]

    def _add(self, name: str, labels: Iterable[object], amount: int) -> None:
        self._counts[name, tuple(map(str, labels))] += amount

    def samples(self) -> Mapping[Key, int]:
        """Return the latest counts that have arrived on the host. Waits ``COPY_WAIT_S`` for the device."""
        self._take_arrived()
        if self._pending is None:
            self._pending = PendingCounts(dict(self._counts), self._listed)
            if not self._pending.arrived():
                time.sleep(COPY_WAIT_S)
            self._take_arrived()
        return self._arrived

    def _take_arrived(self) -> None:
        """Take over pending counts, if they have arrived."""
        if self._pending is None or not self._pending.arrived():
            return
        counts = self._pending.counts
        totals = self._pending.listed.tolist()  # of 64 bits, which the fastest GPU fills in ten years
        for (layer, level), place in self._places.items():
            key = "kept_pairs", (str(layer), level)
            if key in counts:
                counts[key] += totals[place]
        self._arrived, self._pending = counts, None
