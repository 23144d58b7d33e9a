# SPDX-License-Identifier: Apache-2.0
"""Times GET /metrics on a stock server and on ours, with many reads per second.

    python -m benchmarks.scrape [--load idle] [--reads 200] [--results docs/results/edges.json]

Routers read vLLM's queue lengths there, and drop slow servers. Both servers run the same small model, one after the
other, with the same load: none, one long prompt after another, or long and short prompts that decode.
"""

import json
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer
from rich.console import Console

from benchmarks.figures import Report
from benchmarks.options import Json, Results
from tests.helpers.tiny_models import VOCAB_SIZE, make_model
from vllm_sparse_backend.config.errors import not_one_of
from vllm_sparse_backend.config.metrics import PREFIX
from vllm_sparse_backend.evaluation.report import BenchError, table_of
from vllm_sparse_backend.evaluation.vllm_server import Server, device_name, sparse_args

EVERY_S = 0.05
MAX_LEN = 8192
SERVER_ARGS = ("--max-model-len", str(MAX_LEN), "--max-num-batched-tokens", "2048")
SETTINGS = {"min_tokens": 512, "min_query_tokens": 1, "guard": {}}
ALLOWED_S = 0.05
"""Seconds that our page may take longer than stock's, at p99."""

LOADS = {
    "idle": (),
    "long prefills": ((8000, 1), (8000, 1)),
    "mixed load": ((8000, 16), (3000, 64), (200, 128), (100, 128), (50, 128), (20, 128)),
}
"""Clients of each load by name: (prompt tokens, output tokens) of a client that sends requests one after another."""

COLUMNS = {
    "load": "load", "server": "server", "p50_ms": "p50, ms", "p99_ms": "p99, ms", "most_ms": "longest, ms",
    "without": "answers without our series", "answered": "requests answered",
}  # fmt: skip

_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def read_page(url: str) -> tuple[float, bool]:
    """Return the duration of a GET /metrics in seconds, and whether the page has our counters."""
    began = time.perf_counter()
    with _DIRECT.open(f"{url}/metrics", timeout=60) as response:
        page = response.read()
    return time.perf_counter() - began, f"\n{PREFIX}up{{".encode() in page and f"\n{PREFIX}layers{{".encode() in page


class Client(threading.Thread):
    """Sends prompts with different beginnings one after another, until it is stopped."""

    def __init__(self, server: Server, number: int, tokens: int, max_tokens: int, stop: threading.Event) -> None:
        super().__init__(daemon=True)
        self.server, self.number, self.tokens, self.max_tokens, self.stop = server, number, tokens, max_tokens, stop
        self.answered = 0
        self.error: Exception | None = None

    def run(self) -> None:
        while not self.stop.is_set():
            seed = 7919 * (self.answered + 1) + 104729 * self.number
            prompt = [2 + (seed + 31 * i * i + i) % (VOCAB_SIZE - 2) for i in range(self.tokens)]
            body = {"model": self.server.model, "prompt": prompt, "max_tokens": self.max_tokens, "ignore_eos": True}
            try:
                self.server.post("/v1/completions", body)
            except Exception as error:  # reported by the main thread
                self.error = error
                return
            self.answered += 1


@contextmanager
def under_load(server: Server, load: Sequence[tuple[int, int]]) -> Iterator[list[Client]]:
    """Yield the clients of a load when each client has an answer, or after two seconds."""
    stop = threading.Event()
    clients = [Client(server, number, *size, stop) for number, size in enumerate(load)]
    for client in clients:
        client.start()
    time.sleep(2)
    try:
        yield clients
    finally:
        stop.set()
        for client in clients:
            client.join(timeout=120)
    for client in clients:
        if client.error is not None:
            raise BenchError(f"a request of the load failed: {client.error}")


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least this share of the values does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-int(share * 1000) * len(ordered) // 1000) - 1)]


def read_often(server: Server, reads: int) -> tuple[list[float], int]:
    """Return the seconds of ``reads`` answers, one every ``EVERY_S``, and the number that lacked our series."""
    seconds, without = [], 0
    due = time.monotonic()
    for _ in range(reads):
        time.sleep(max(due - time.monotonic(), 0))
        due = max(due, time.monotonic()) + EVERY_S
        taken, is_ours = read_page(server.url)
        seconds.append(taken)
        without += not is_ours
    return seconds, without


def measure(server: Server, name: str, loads: Sequence[str], reads: int, report: Report) -> dict[str, dict[str, Any]]:
    """Return a case for each load on one server."""
    cases = {}
    for load in loads:
        with under_load(server, LOADS[load]) as clients:
            seconds, without = read_often(server, reads)
        cases[load] = {
            "load": load, "server": name, "reads": reads,
            "p50_ms": 1e3 * percentile(seconds, 0.5), "p99_ms": 1e3 * percentile(seconds, 0.99),
            "most_ms": 1e3 * max(seconds), "without": without,
            "answered": sum(client.answered for client in clients),
        }  # fmt: skip
        report.add_case(cases[load])
    return cases


def main(
    load: Annotated[list[str] | None, typer.Option(help=f"One of {', '.join(LOADS)}; repeatable.")] = None,
    reads: Annotated[int, typer.Option(min=1, help="Timed answers under each load.")] = 200,
    settings: Annotated[str, typer.Option(help="The sparse_prefill object of our server, as JSON.")] = "",
    json_path: Json = None,
    results: Results = None,
) -> None:
    loads = list(load or LOADS)
    for name in loads:
        if name not in LOADS:
            raise BenchError(f"--load: {not_one_of(name, LOADS)}")
    report = Report("scrape", device_name(), json_path, results)
    with TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "model")
        with Server(model, SERVER_ARGS, env={"VLLM_PLUGINS": "none"}) as server:
            stock = measure(server, "stock", loads, reads, report)
        ours_args = (*sparse_args(json.loads(settings) if settings else SETTINGS), *SERVER_ARGS)
        with Server(model, ours_args) as server:
            ours = measure(server, "ours", loads, reads, report)
    for name in loads:
        about = f"GET /metrics, {name}"
        longer_s = (ours[name]["p99_ms"] - stock[name]["p99_ms"]) / 1e3
        report.add_figure(f"{about}: p99 of stock", stock[name]["p99_ms"] / 1e3, "s", "lower")
        report.add_figure(f"{about}: p99", ours[name]["p99_ms"] / 1e3, "s", "lower")
        report.add_figure(f"{about}: p99 above stock's", longer_s, "s", "lower", ALLOWED_S)
        report.add_figure(f"{about}: answers without our series", ours[name]["without"], "answers", "lower", 0)
    Console(width=150).print(
        table_of(f"GET /metrics every {EVERY_S * 1e3:.0f} ms, {report.device}", COLUMNS, report.cases)
    )


if __name__ == "__main__":
    typer.run(main)
