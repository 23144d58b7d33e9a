# SPDX-License-Identifier: Apache-2.0
"""Posts large bodies to a server without its API key, and times its answers and its /health.

    python -m benchmarks.large_bodies [--megabytes 25] [--results docs/results/mend.json]

Stock vLLM and this backend serve a small model with an API key, one after the other. Bodies consist of many keys that
look like ours, of a prompt, or of a prompt with a level. They go to a path that does not exist, to a guarded path, and
to an open path, where vLLM itself parses them on the event loop before anything refuses them. There, the target applies
to the difference between the waits of /health on this server and on stock.
"""

import http.client
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, NamedTuple
from urllib.parse import urlsplit

import typer
from rich.console import Console

from benchmarks.figures import Report
from benchmarks.options import Json, Results
from tests.helpers.tiny_models import make_model
from vllm_sparse_backend.evaluation.report import table_of
from vllm_sparse_backend.evaluation.vllm_server import Server, device_name, sparse_args

SETTINGS = {"method": "a_shape", "params": {"sink_tokens": 64, "local_tokens": 128}, "min_tokens": 128}
ARGS = ("--max-model-len", "4096", "--api-key", "key")
OPEN_PATH = "/tokenize"
PATHS = ("/nothing", "/v1/completions", OPEN_PATH)
HEALTH_S = 0.2
"""Target: maximum wait of /health, in seconds."""


def bodies(num_bytes: int) -> dict[str, bytes]:
    """Return bodies by the kind of their content."""
    keys = ", ".join(f'"sparse_prefil{i:08d}": 0' for i in range(num_bytes // 28))
    prompt = "a word " * (num_bytes // 7)
    return {
        "keys": f"{{{keys}}}".encode(),
        "prompt": json.dumps({"model": "m", "prompt": prompt}).encode(),
        "prompt, level": json.dumps({"model": "m", "prompt": prompt, "vllm_xargs": {"sparse_prefill": 0}}).encode(),
    }


class Waiting(NamedTuple):
    status: int
    answer_s: float
    health_s: float
    """Longest wait for /health in the meantime, in seconds."""


def timed(address: str, ask: Callable[[http.client.HTTPConnection], int]) -> tuple[int, float]:
    connection = http.client.HTTPConnection(address, timeout=120)
    begun = time.monotonic()
    try:
        status = ask(connection)
    finally:
        connection.close()
    return status, time.monotonic() - begun


def post(address: str, path: str, body: bytes) -> Waiting:
    """Post a body, and request /health repeatedly until the post is answered."""
    waits: list[float] = []
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            waits.append(timed(address, _health)[1])
            time.sleep(0.005)

    def send(connection: http.client.HTTPConnection) -> int:
        headers = {"Content-Type": "application/json"}
        try:
            connection.request("POST", path, body, headers)
            return connection.getresponse().status
        except ConnectionError:  # the server answered and closed before it read the body
            return 0

    watcher = threading.Thread(target=watch)
    watcher.start()
    time.sleep(0.1)
    try:
        status, seconds = timed(address, send)
    finally:
        time.sleep(0.2)  # includes work after the answer
        done.set()
        watcher.join()
    return Waiting(status, seconds, max(waits))


def _health(connection: http.client.HTTPConnection) -> int:
    connection.request("GET", "/health")
    answer = connection.getresponse()
    answer.read()
    return answer.status


def main(
    megabytes: Annotated[int, typer.Option(help="Size of the bodies, in megabytes.")] = 25,
    json_path: Json = None,
    results: Results = None,
) -> None:
    """Measure both servers, and print the table."""
    report = Report("large_bodies", device_name(), json_path, results)
    posted = bodies(megabytes * 1_000_000)
    stock_health_s: dict[tuple[str, str], float] = {}
    with TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "model")
        for name, args in ("stock", ()), ("ours", sparse_args(SETTINGS)):
            with Server(model, (*args, *ARGS)) as server:
                address = urlsplit(server.url).netloc
                for path in PATHS:
                    for kind, body in posted.items():
                        slowest = max((post(address, path, body) for _ in range(3)), key=lambda wait: wait.health_s)
                        report.add_case({"server": name, "path": path, "body": kind, **slowest._asdict()})
                        figure = f"{megabytes} MB of {kind} to {path} without a key, {name}"
                        is_bound = name == "ours" and path != OPEN_PATH
                        report.add_figure(
                            f"{figure}: /health", slowest.health_s, "s", "lower", HEALTH_S if is_bound else None
                        )
                        report.add_figure(f"{figure}: answered", slowest.answer_s, "s", "lower")
                        if name == "stock":
                            stock_health_s[path, kind] = slowest.health_s
                        elif path == OPEN_PATH:
                            above_s = slowest.health_s - stock_health_s[path, kind]
                            report.add_figure(f"{figure}: /health above stock's", above_s, "s", "lower", HEALTH_S)
    columns = {column: column for column in ("server", "path", "body", *Waiting._fields)}
    Console(width=140).print(table_of("Large bodies", columns, report.cases, ""))


if __name__ == "__main__":
    typer.run(main)
