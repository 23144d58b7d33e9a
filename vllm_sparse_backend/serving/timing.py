# SPDX-License-Identifier: Apache-2.0
"""How long selection and attention take on the device: a few calls are timed, and read long after.

An event costs the host a few microseconds, so one call in a round of the layers is timed, another layer each time.
Nothing waits: a lap is read when its last event has passed, and where all laps are still running none begins.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

from vllm_sparse_kernels import SparseIndex
from vllm_sparse_kernels.layer import UNWATCHED, Watch

LAPS = 8
"""So many calls may be timed and not yet read. A server's host is one or two steps ahead of its device."""


class HostEvent:
    """What a CUDA event offers, by the host's clock: on a CPU a call is over when it returns."""

    at = 0.0

    def record(self) -> None:
        self.at = time.perf_counter()

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: "HostEvent") -> float:
        """Milliseconds, as of CUDA's."""
        return (end.at - self.at) * 1e3


class Lap(Watch):
    """One call that is timed: its selection, then its attention."""

    def __init__(self, new_event: Callable[[], Any]) -> None:
        self.layer = 0
        self.causal_pairs = 0
        self._events = [new_event() for _ in range(3)]

    def begins(self) -> None:
        self._events[0].record()

    def selected(self, index: SparseIndex) -> None:
        self._events[1].record()

    def attended(self) -> None:
        self._events[2].record()

    def is_over(self) -> bool:
        return bool(self._events[2].query())

    def seconds(self) -> tuple[float, float]:
        """Of selection, and of attention; once it is over."""
        begun, selected, attended = self._events
        return begun.elapsed_time(selected) / 1e3, selected.elapsed_time(attended) / 1e3


class Timer:
    """Chooses the calls that are timed, and reads them when they are over."""

    def __init__(self, device: torch.device) -> None:
        on_cuda = device.type == "cuda"
        new_event = (lambda: torch.cuda.Event(enable_timing=True)) if on_cuda else HostEvent
        self._free = [Lap(new_event) for _ in range(LAPS)]
        self._running: deque[Lap] = deque()
        self._calls = 0

    def start(self, layer: int, num_layers: int) -> Watch:
        """A lap for one call in ``num_layers`` + 1, so that each layer's turn comes; else nothing."""
        self._calls += 1
        if self._calls <= num_layers or not self._free:
            return UNWATCHED
        self._calls = 0
        lap = self._free.pop()
        lap.layer = layer
        return lap

    def stop(self, lap: Lap, causal_pairs: int) -> None:
        lap.causal_pairs = causal_pairs
        self._running.append(lap)

    def read(self) -> Iterator[Lap]:
        """The laps that are over by now; each of them once."""
        while self._running and self._running[0].is_over():
            lap = self._running.popleft()
            yield lap
            self._free.append(lap)
