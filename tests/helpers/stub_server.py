# SPDX-License-Identifier: Apache-2.0
"""OpenAI-compatible servers with preset speed, answers and faults: threads in this process, without a model.

Their speed is simulated: the times that a client measures do not depend on the machine or its load.
"""

import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from vllm_sparse_backend.evaluation import client

MODEL = "stub-model"
METRICS = """# TYPE sparse_prefill_up gauge
sparse_prefill_up{{engine="0"}} 1
# TYPE sparse_prefill_kept_pairs counter
sparse_prefill_kept_pairs_total{{layer="0"}} {kept}
# TYPE sparse_prefill_causal_pairs counter
sparse_prefill_causal_pairs_total{{layer="0"}} {causal}
"""
LEVELS = {"half": 0.5, "tenth": 0.1}
"""Share of pairs that a request at these levels keeps; a request without a level keeps a quarter."""

Send = Callable[[bytes], object]


class Api:
    """A server's answers; derived classes override them."""

    root: Path | None = None
    status = 200
    """HTTP status of the answer to requests for models."""

    def metrics(self) -> str:
        return ""

    def tokenize(self, text: str) -> list[int]:
        return [ord(c) for c in text][:5000]

    def refuses(self, body: dict[str, Any]) -> str | None:
        return None

    def complete(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        raise NotImplementedError

    def stream(self, body: dict[str, Any], send: Send) -> None:
        for _ in range(body["max_tokens"]):
            send(token())


def token(logprobs: list[float] | None = None) -> bytes:
    """Return an event of tokens with these log-probabilities."""
    choice = {"text": "x", "logprobs": {"token_logprobs": logprobs or [-1.5]}}
    return f"data: {json.dumps({'choices': [choice]})}\n\n".encode()


class SimulatedClock:
    """The clock of stubs and of the client that times them. Only stubs advance it, by the times that they should take.

    A stub first waits until the client has read the time at which the stub's last event arrived.
    """

    DEADLINE_S = 120.0

    def __init__(self) -> None:
        self._now_s, self._num_reads = 0.0, 0
        self._was_read = threading.Condition()

    @staticmethod
    def of_client(monkeypatch: pytest.MonkeyPatch) -> "SimulatedClock":
        """Return a new clock that ``evaluation.client`` reads."""
        clock = SimulatedClock()
        monkeypatch.setattr(client, "time", clock)
        return clock

    def perf_counter(self) -> float:
        with self._was_read:
            self._num_reads += 1
            self._was_read.notify_all()
            return self._now_s

    def advance(self, seconds: float) -> None:
        with self._was_read:
            self._now_s += seconds

    @contextmanager
    def until_arrival(self) -> Iterator[None]:
        """Wait until the client has read the time for the event that is sent in this context."""
        num_reads = self._num_reads
        yield
        with self._was_read:
            arrived = self._was_read.wait_for(lambda: self._num_reads > num_reads, self.DEADLINE_S)
        assert arrived, f"the client did not time an event within {self.DEADLINE_S:.0f} s"


class Stub(Api):
    """``first_s`` maps a prompt's length to the time of its first token; ``fault`` may name a request's fault.

    ``burst`` is the number of tokens that arrive at a time after the first.
    """

    def __init__(
        self, name: str, log: list[tuple[str, list[int]]], first_s: Callable[[int], float], clock: SimulatedClock,
        token_s: float = 0.002, fault: Callable[[int], str | None] = lambda length: None, burst: int = 1,
    ) -> None:  # fmt: skip
        self.name, self.log, self.fault = name, log, fault
        self.first_s, self.clock, self.token_s, self.burst = first_s, clock, token_s, burst
        self.lock = threading.Lock()
        self.kept = self.causal = 0

    def metrics(self) -> str:
        return METRICS.format(kept=self.kept, causal=self.causal) if self.name == "ours" else ""

    def refuses(self, body: dict[str, Any]) -> str | None:
        level = body.get("vllm_xargs", {"sparse_prefill": "half"})["sparse_prefill"]
        if level not in (0, 1, *LEVELS):
            return "expected one of half, tenth"
        return "prompt too long" if self.fault(len(body["prompt"])) == "refuse" else None

    def stream(self, body: dict[str, Any], send: Send) -> None:
        prompt = body["prompt"]
        level = body.get("vllm_xargs", {}).get("sparse_prefill")
        self.log.append((level or self.name, prompt))
        fault = self.fault(len(prompt))
        with self.lock:  # one request at a time, like prefill
            self.clock.advance(self.first_s(len(prompt)))
            self.causal += 100 * len(prompt)
            self.kept += round(100 * len(prompt) * LEVELS.get(level, 0.25))
        left = body["max_tokens"] - (fault == "short")
        if fault == "nan":  # the client refuses such an event, and does not time it
            send(token([float("nan")] * left))
            return
        count = 1
        while left > 0:
            with self.clock.until_arrival():
                send(token([-1.5] * min(left, count)))
            left, count = left - count, self.burst
            self.clock.advance(self.token_s * min(max(left, 0), count))
        if fault == "error":
            send(b'data: {"error": {"message": "out of cache"}}\n\n')


@contextmanager
def running(api: Api) -> Iterator[str]:
    """Yield the address of the server."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def reply(self, data: object, status: int = 200, kind: str = "application/json") -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.end_headers()
            self.wfile.write(data.encode() if isinstance(data, str) else json.dumps(data).encode())

        def do_GET(self) -> None:
            if self.path.partition("?")[0] == "/metrics":
                self.reply(api.metrics(), kind="text/plain")
            else:
                card = {"id": MODEL, "root": str(api.root)}
                self.reply({"data": [card]}, api.status)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert body["model"] == MODEL
            if self.path == "/tokenize":
                self.reply({"tokens": api.tokenize(body["prompt"])})
            elif said := api.refuses(body):
                self.reply({"error": said}, 400)
            elif body.get("stream"):
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.end_headers()
                with suppress(ConnectionError):  # a client may disconnect
                    api.stream(body, self.wfile.write)
                    self.wfile.write(b"data: [DONE]\n\n")
            else:
                status, answer = api.complete(body)
                self.reply(answer, status)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


FACT = re.compile(r"# The magic number of ([a-z ]+) is (\d{7})\.")
QUESTION = re.compile(r"# Question: what is the magic number of ([a-z ]+)\? Answer: (\d{7})\.")


class Words:
    """A tokenizer that is exact in both directions. ``digits`` digits of a number make a token, with or without a space
    before it."""

    def __init__(self, digits: int = 1, spaced: bool = False) -> None:
        space = " ?" if spaced else ""
        self.split = re.compile(rf"{space}\d{{1,{digits}}}|[A-Za-z]+|\s|[^\w\s]|_")
        self.ids: dict[str, int] = {"<s>": 0}

    def __call__(self, text: str) -> list[int]:
        tokens = re.findall(r"<s>", text) if text == "<s>" else self.split.findall(text)
        assert "".join(tokens) == text
        return [self.ids.setdefault(token, len(self.ids)) for token in tokens]

    def decode(self, ids: list[int]) -> str:
        names = {i: token for token, i in self.ids.items()}
        return "".join(names[i] for i in ids)


def entry(token: int, logprob: float = -0.5, rank: int = 1) -> dict[str, dict[str, object]]:
    likeliest = {} if rank == 1 else {"9999": {"logprob": -0.1, "rank": 1, "decoded_token": "y"}}
    return likeliest | {str(token): {"logprob": logprob, "rank": rank, "decoded_token": "x"}}
