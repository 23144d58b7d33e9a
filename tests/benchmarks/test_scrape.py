# SPDX-License-Identifier: Apache-2.0
"""Timing of GET /metrics: pages that are late or lack this backend's series."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import scrape
from vllm_sparse_backend.evaluation.report import BenchError

OURS = b'x 1\nsparse_prefill_up{engine="0"} 1\nsparse_prefill_layers{attention="torch"} 4\n'
LATE_S = 0.15


class Clock:
    """A clock that advances only when a page is late, and between reads. It stands in for the module ``time``."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s

    monotonic = perf_counter

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def server(clock: Clock) -> Iterator[Any]:
    """Every fourth page is late, and every third page is a stock server's."""
    pages: list[int] = []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            pages.append(1)
            if len(pages) % 4 == 0:
                clock.sleep(LATE_S)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"x 1\n" if len(pages) % 3 == 0 else OURS)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
        threading.Thread(target=httpd.serve_forever, daemon=True).start()
        yield SimpleNamespace(url=f"http://127.0.0.1:{httpd.server_port}")
        httpd.shutdown()


def test_pages_that_are_late_and_pages_without_our_series(
    server: Any, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scrape, "time", clock)
    seconds, without = scrape.read_often(server, 12)
    assert without == 4
    assert seconds == pytest.approx([0, 0, 0, LATE_S] * 3)


@pytest.mark.parametrize(("count", "share", "expected"), [(200, 0.99, 198), (100, 0.5, 50), (1, 0.99, 1), (3, 0.5, 2)])
def test_percentiles(count: int, share: float, expected: int) -> None:
    assert scrape.percentile(list(range(count, 0, -1)), share) == expected


def test_a_load_that_there_is_not() -> None:
    with pytest.raises(BenchError, match="--load: given 'busy', expected"):
        scrape.main(load=["busy"])


def test_a_load_whose_requests_fail_is_no_load(server: Any) -> None:
    def post(path: str, body: Any) -> None:
        raise OSError("refused")

    server.model, server.post = "m", post
    with pytest.raises(BenchError, match="a request of the load failed: refused"), scrape.under_load(server, [(5, 1)]):
        pass
