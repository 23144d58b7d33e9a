# SPDX-License-Identifier: Apache-2.0
"""Load on a server: exact and sparse requests at once, some aborted, while its counters are read."""

import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import pairwise
from threading import Event
from typing import NamedTuple

from tests.helpers import scenario
from tests.helpers.servers import Server
from vllm_sparse_backend.evaluation.client import Endpoint, connected

SERVER_ENV = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "8"}
"""On a CPU, torch caches a compiled product for each of the last 1,024 shapes, which looks like a memory leak."""

QUIET_S = 10.0
"""Seconds; longer than any step."""

LEAST_READINGS = 11
"""Minimum readings of the counters, on a server of any speed."""


def counters(page: str) -> dict[str, float]:
    """Return this backend's counters on a page of /metrics, by sample."""
    return {name: float(value) for name, value in re.findall(r"(?m)^(sparse_prefill_\w+_total{.*}) (\S+)$", page)}


class Load(NamedTuple):
    """Results of eight clients' requests."""

    differing: list[int]
    """Exact requests that completed with an answer other than stock's."""
    fallen: set[str]
    """Counters with a reading lower than an earlier reading."""
    exact: int
    readings: int


def ask_mixed(server: Server, stock: Server, endpoint: Endpoint, prompts: Sequence[list[int]]) -> Load:
    """Send prompts, half of them exact, abort a tenth, and read counters meanwhile."""
    exact = [i for i in range(len(prompts)) if i % 2 == 0 and i % 10 != 4]
    over, readings = Event(), []

    def send(i: int) -> scenario.Answer | None:
        if i % 10 == 4:
            body = {"model": endpoint.model, "prompt": prompts[i], "max_tokens": 8, "ignore_eos": True, "stream": True}
            with connected(endpoint.url) as post:
                post("/v1/completions", body | {"vllm_xargs": {"sparse_prefill": 0}}).readline()
            return None  # closing the connection after the first token aborts the request
        return scenario.ask(server, prompts[i], level=0 if i % 2 == 0 else (None, "fast")[i % 4 == 1])

    def read() -> None:
        while not over.wait(0.2) or len(readings) < LEAST_READINGS:
            readings.append(counters(server.get("/metrics")))

    with ThreadPoolExecutor(9) as pool:  # eight clients, and the reader
        reading = pool.submit(read)
        try:
            answers = list(pool.map(send, range(len(prompts))))
        finally:
            over.set()
        reading.result()
        expected = dict(zip(exact, pool.map(lambda i: scenario.ask(stock, prompts[i]), exact)))
    fallen = {
        name
        for earlier, later in pairwise(readings)
        for name in earlier
        if later.get(name, earlier[name]) < earlier[name]
    }
    differing = [i for i, answer in expected.items() if answers[i].token_ids != answer.token_ids]
    return Load(differing, fallen, len(exact), len(readings))


def wait_until_idle(server: Server) -> None:
    """Wait until aborted requests have left the server: its counters no longer change."""
    deadline = time.monotonic() + scenario.DEADLINE_S
    before, rows = None, scenario.counted(server).rows
    while rows != before:
        assert time.monotonic() < deadline, f"the server is still busy after {scenario.DEADLINE_S:.0f} s"
        time.sleep(QUIET_S)
        before, rows = rows, scenario.counted(server).rows


def resident_bytes_of(pid: int) -> int:
    """Return the memory of a process and its children."""
    import psutil  # comes with vLLM

    parent = psutil.Process(pid)
    total = 0
    for process in (parent, *parent.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):  # processes may end in the meantime
            total += process.memory_info().rss
    return total
