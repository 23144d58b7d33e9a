# SPDX-License-Identifier: Apache-2.0
"""Timing on a simulated clock."""

from types import SimpleNamespace

import pytest
import torch

from vllm_sparse_backend.calibration import cuda_device as module
from vllm_sparse_backend.calibration.cuda_device import AHEAD_CYCLES, CYCLES_A_MS, PASSES, Card
from vllm_sparse_backend.config.errors import ConfigurationError


class Clock:
    """A clock in milliseconds that advances when something runs. The device's time includes requested waits."""

    def __init__(self) -> None:
        self.ms = 0.0
        self.launching_ms = 0.0
        self.slept = 0
        self.waited_ms: list[float] = []

    def takes(self, ms: float, host_ms: float = 0.0):
        def run() -> None:
            self.ms += ms
            self.launching_ms += host_ms

        return run

    def sleep(self, cycles: int) -> None:
        if cycles == AHEAD_CYCLES:
            self.slept += 1
        else:
            self.waited_ms.append(cycles / CYCLES_A_MS)
        self.ms += cycles / CYCLES_A_MS

    def event(self, enable_timing: bool):
        event = SimpleNamespace(at=None)
        event.record = lambda: setattr(event, "at", self.ms)
        event.elapsed_time = lambda stop: stop.at - event.at
        return event


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(torch.cuda, "_sleep", clock.sleep)
    monkeypatch.setattr(torch.cuda, "Event", clock.event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(module.time, "perf_counter", lambda: clock.ms / 1e3)
    monkeypatch.setattr(module.time, "thread_time", lambda: clock.launching_ms / 1e3)
    return clock


@pytest.fixture
def card():
    made = object.__new__(Card)
    made.device, made.flash_version = torch.device("cpu"), 3
    return made


def test_device_time_is_that_of_the_spans_alone(card, clock):
    """Times are summed by name over a pass. The wait before a pass, runs that stabilise the clock, and new passes do
    not count."""
    passes = []
    dense = [("dense", clock.takes(40)), ("dense", clock.takes(30))]
    ours = [("select", clock.takes(1)), ("attend", clock.takes(9))]
    taken = card.spans_ms([dense, ours], lambda: passes.append(clock.takes(50)()))
    times = {"dense": 70, "select": 1, "attend": 9}
    assert taken == {name: [pytest.approx(ms)] * PASSES for name, ms in times.items()}
    assert clock.slept == (PASSES + 2) * 2  # two warm-up passes; each contestant has a turn
    # 70 ms reach the 60 ms of a stable clock at once, 10 ms after six runs; the first pass does not know this yet.
    assert len(passes) == 2 + (PASSES + 1) * (2 + 7)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_no_card_is_an_error_that_says_so():
    with pytest.raises(ConfigurationError, match="needs a CUDA device"):
        Card()
