# SPDX-License-Identifier: Apache-2.0
"""The proxy before a stock decode server, as a process of its own, against a server that says what it was sent."""

import json
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="needs what vLLM installs")

PROXY = Path(__file__).parents[2] / "deploy/salting_proxy.py"
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Decode(BaseHTTPRequestHandler):
    """A decode server: answers with what it was sent; streams where it is asked for a stream."""

    protocol_version = "HTTP/1.1"
    release = threading.Event()

    def do_GET(self) -> None:
        self._answer(200, json.dumps({"path": self.path}).encode())

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        sent = {"path": self.path, "key": self.headers.get("Authorization"), "body": json.loads(body)}
        if not sent["body"].get("stream"):
            self._answer(418 if sent["body"].get("prompt") == "refused" else 200, json.dumps(sent).encode())
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for event in b"data: 1\n\n", b"data: [DONE]\n\n":
            self.wfile.write(b"%x\r\n%s\r\n" % (len(event), event))
            self.wfile.flush()
            self.release.wait(20)
        self.wfile.write(b"0\r\n\r\n")

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Request-Id", "7")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


def free_port() -> int:
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        return int(chosen.getsockname()[1])


@pytest.fixture(scope="module")
def decode() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Decode)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()


def started(decode_url: str) -> Iterator[str]:
    port = free_port()
    process = subprocess.Popen([sys.executable, PROXY, "--decode", decode_url, "--port", str(port)])
    try:
        for _ in range(600):
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                assert process.poll() is None
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(20)


@pytest.fixture(scope="module")
def url(decode: ThreadingHTTPServer) -> Iterator[str]:
    yield from started(f"http://127.0.0.1:{decode.server_port}")


def post(url: str, body: Any, path: str = "/v1/completions") -> tuple[int, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", "Authorization": "Bearer k"}
    try:
        with DIRECT.open(urllib.request.Request(url + path, data, headers), timeout=30) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def salt_of(url: str, path: str = "/v1/completions", **body: Any) -> str:
    status, sent = post(url, {"prompt": "a", **body}, path)
    assert status == 200
    assert sent["path"] == path
    assert sent["key"] == "Bearer k"
    salt = sent["body"].pop("cache_salt")
    body.pop("cache_salt", None)
    assert sent["body"] == {"prompt": "a", **body}
    assert salt
    return str(salt)


def asking(level: object) -> dict[str, Any]:
    return {"vllm_xargs": {"sparse_prefill": level}}


def test_levels_have_salts_of_their_own_however_they_are_written(url: str) -> None:
    alike = [[0, 0.0, False, "exact"], [1, 1.0, True, "on"], ["fast"], [0.97], [0.5], ["default of None"]]
    salts = [{salt_of(url, **asking(level)) for level in levels} for levels in alike]
    assert [len(salts_of_level) for salts_of_level in salts] == [1] * len(alike)
    assert len(set().union(*salts)) == len(alike)


def test_requests_that_ask_for_none_are_told_apart_by_model(url: str) -> None:
    unasked = [{}, {"vllm_xargs": None}, {"vllm_xargs": {"session_id": "s"}}]
    assert len({salt_of(url, model="a", **body) for body in unasked}) == 1
    assert len({salt_of(url, model=model) for model in ("a", "b")} | {salt_of(url, **asking(0))}) == 3


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/inference/v1/generate"])
def test_every_path_with_a_salt(url: str, path: str) -> None:
    assert salt_of(url, path, **asking(0)) == salt_of(url, **asking(0))


def test_sampling_parameters_of_token_requests(url: str) -> None:
    exact = salt_of(url, "/inference/v1/generate", sampling_params={"extra_args": {"sparse_prefill": 0}})
    assert exact == salt_of(url, **asking("exact"))


def test_a_clients_salt_counts_on_top(url: str) -> None:
    salts = [salt_of(url, cache_salt=salt, **asking(level)) for salt in ("u", "v", '"') for level in (0, 1)]
    salts += [salt_of(url, **asking(level)) for level in (0, 1)]
    assert len({*salts}) == len(salts)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"no JSON", "the body of POST /v1/completions"),
        (b"[1]", "given no JSON object"),
        (b"[" * 100_000, "the body of POST"),
        ({"vllm_xargs": [1]}, "vllm_xargs: given list, expected an object"),
        ({"cache_salt": 3}, "cache_salt: given int, expected a string"),
    ],
)
def test_what_cannot_be_salted_is_refused(url: str, body: Any, said: str) -> None:
    status, answer = post(url, body)
    assert status == 400
    assert said in answer["error"]["message"]


def test_what_has_no_salt_is_refused(url: str) -> None:
    status, answer = post(url, {}, "/v1/messages")
    assert status == 501
    assert "POST /v1/messages has no cache_salt" in answer["error"]["message"]


def test_other_requests_and_answers_pass_as_they_are(url: str) -> None:
    with DIRECT.open(f"{url}/metrics?a=b%20c", timeout=30) as answer:
        assert json.load(answer) == {"path": "/metrics?a=b%20c"}
        assert answer.headers["X-Request-Id"] == "7"
    assert post(url, {"prompt": "refused"})[0] == 418


def test_a_stream_is_passed_on_part_by_part(url: str) -> None:
    """The first event comes before the second is made."""
    Decode.release.clear()
    data = json.dumps({"stream": True}).encode()
    with DIRECT.open(urllib.request.Request(f"{url}/v1/completions", data), timeout=30) as answer:
        assert answer.headers["Content-Type"] == "text/event-stream"
        assert answer.read(9) == b"data: 1\n\n"
        Decode.release.set()
        assert answer.read() == b"data: [DONE]\n\n"


def test_a_decode_server_that_does_not_answer() -> None:
    for url in started(f"http://127.0.0.1:{free_port()}"):
        status, answer = post(url, {"prompt": "a"})
        assert status == 502
        assert "does not answer" in answer["error"]["message"]
