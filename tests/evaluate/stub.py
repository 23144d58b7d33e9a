# SPDX-License-Identifier: Apache-2.0
"""A vLLM server as evaluation sees it, in a thread of this process: a stub says what it answers."""

import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Protocol

FACT = re.compile(r"# The magic number of ([a-z ]+) is (\d{7})\.")
QUESTION = re.compile(r"# Question: what is the magic number of ([a-z ]+)\? Answer: (\d{7})\.")


class Words:
    """A tokenizer that is exact both ways; ``digits`` of a number make one token, with a space before it or without."""

    def __init__(self, digits: int = 1, spaced: bool = False) -> None:
        space = " ?" if spaced else ""
        self.split = re.compile(rf"{space}\d{{1,{digits}}}|[A-Za-z]+|\s|[^\w\s]|_")
        self.ids: dict[str, int] = {"<s>": 0}

    def __call__(self, text: str) -> list[int]:
        found = re.findall(r"<s>", text) if text == "<s>" else self.split.findall(text)
        assert "".join(found) == text
        return [self.ids.setdefault(token, len(self.ids)) for token in found]

    def decode(self, ids: list[int]) -> str:
        names = {i: token for token, i in self.ids.items()}
        return "".join(names[i] for i in ids)


def entry(token: int, logprob: float = -0.5, rank: int = 1) -> dict[str, dict[str, object]]:
    likeliest = {} if rank == 1 else {"9999": {"logprob": -0.1, "rank": 1, "decoded_token": "y"}}
    return likeliest | {str(token): {"logprob": logprob, "rank": rank, "decoded_token": "x"}}


class Stub(Protocol):
    """``complete`` answers a request with a status and JSON; no two at a time, though many may wait."""

    encode: Words
    tokenizes: bool
    api_key: str | None
    pause_s: float
    busy: int
    most_busy: int
    lock: threading.Lock

    def metrics(self) -> str: ...

    def complete(self, body: dict) -> tuple[int, dict]: ...


@contextmanager
def running(stub: Stub, root: Path | None = None) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def reply(self, status: int, data: object) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(data).encode())

        def refused(self) -> bool:
            if stub.api_key is None or self.headers.get("Authorization") == f"Bearer {stub.api_key}":
                return False
            self.reply(401, {"error": "no key"})
            return True

        def do_GET(self) -> None:
            if self.refused():
                return
            if self.path == "/metrics":
                self.send_response(200)
                self.end_headers()
                self.wfile.write(stub.metrics().encode())
            else:
                self.reply(200, {"data": [{"id": "stub-model", "root": str(root)}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.refused():
                return
            if self.path == "/tokenize" and not stub.tokenizes:
                self.reply(404, {"detail": "Not Found"})
            elif self.path == "/tokenize":
                self.reply(200, {"tokens": stub.encode(body["prompt"])})
            elif body.get("stream"):
                self.send_response(200)
                self.end_headers()
                choice = {"choices": [{"text": "x", "logprobs": {"token_logprobs": [-1.0]}}]}
                self.wfile.write(f"data: {json.dumps(choice)}\n\n".encode() * body["max_tokens"])
            else:
                with stub.lock:
                    stub.busy += 1
                    stub.most_busy = max(stub.most_busy, stub.busy)
                time.sleep(stub.pause_s)
                with stub.lock:
                    stub.busy -= 1
                    answer = stub.complete(body)
                self.reply(*answer)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
