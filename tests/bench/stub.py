# SPDX-License-Identifier: Apache-2.0
"""An OpenAI-compatible server whose speed and mistakes are chosen: threads in this process, no model."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

METRICS = """# TYPE sparse_prefill_up gauge
sparse_prefill_up{{engine="0"}} 1
# TYPE sparse_prefill_kept_pairs counter
sparse_prefill_kept_pairs_total{{layer="0"}} {kept}
# TYPE sparse_prefill_causal_pairs counter
sparse_prefill_causal_pairs_total{{layer="0"}} {causal}
"""
LEVELS = {"half": 0.5, "tenth": 0.1}
"""What share of its pairs a request of these levels keeps; one that names none keeps a quarter."""


class Stub:
    """``first_s`` of a prompt's length is how long its first token takes; ``fault`` may name one of a request.

    ``metrics`` ends its /metrics; ``{{requests}}`` in it stands for how many there were.
    """

    def __init__(
        self,
        name: str,
        log: list[tuple[str, list[int]]],
        first_s: Callable[[int], float],
        token_s: float = 0.001,
        fault: Callable[[int], str | None] = lambda length: None,
        metrics: str = "",
    ) -> None:
        self.name, self.log, self.first_s, self.token_s, self.fault = name, log, first_s, token_s, fault
        self.more_metrics = metrics
        self.lock = threading.Lock()
        self.most_at_once = self.at_once = 0
        self.kept = self.causal = 0

    def metrics(self) -> str:
        page = METRICS.format(kept=self.kept, causal=self.causal) if self.name == "ours" else ""
        return page + self.more_metrics.format(requests=len(self.log))

    def answer(self, body: dict[str, Any], send: Callable[[bytes], None]) -> None:
        prompt = body["prompt"]
        level = body.get("vllm_xargs", {}).get("sparse_prefill")
        self.log.append((level or self.name, prompt))
        fault = self.fault(len(prompt))
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        with self.lock:  # one request after the other, as prefill is
            time.sleep(self.first_s(len(prompt)))
            self.causal += 100 * len(prompt)
            self.kept += round(100 * len(prompt) * LEVELS.get(level, 0.25))
        self.at_once -= 1
        count = body["max_tokens"] - (fault == "short")
        for i in range(count):
            time.sleep(self.token_s if i else 0)
            logprob = float("nan") if fault == "nan" else -1.5
            choice = {"text": "x", "logprobs": {"token_logprobs": [logprob]}}
            send(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())
        if fault == "error":
            send(b'data: {"error": {"message": "out of cache"}}\n\n')
        send(b"data: [DONE]\n\n")


@contextmanager
def running(stub: Stub) -> Iterator[str]:
    """The address of the stub's server."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def reply(self, data: bytes, kind: str = "application/json", status: int = 200) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            if self.path == "/metrics":
                self.reply(stub.metrics().encode(), "text/plain")
            else:
                self.reply(json.dumps({"data": [{"id": "stub-model"}]}).encode())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert body["model"] == "stub-model"
            if self.path == "/tokenize":
                self.reply(json.dumps({"tokens": [ord(c) for c in body["prompt"]][:5000]}).encode())
            elif body.get("vllm_xargs", {"sparse_prefill": "half"})["sparse_prefill"] not in (0, 1, *LEVELS):
                self.reply(b'{"error": "expected one of half, tenth"}', status=400)
            elif stub.fault(len(body["prompt"])) == "refuse":
                self.reply(b'{"error": "prompt too long"}', status=400)
            else:
                self.send_response(200)
                self.end_headers()
                stub.answer(body, self.wfile.write)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
