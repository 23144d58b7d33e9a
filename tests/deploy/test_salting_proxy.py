# SPDX-License-Identifier: Apache-2.0
"""The proxy in front of a stock decode server, as a separate process, against servers that return the requests they
receive."""

import http.client
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar
from urllib.parse import urlsplit

import pytest

from tests.helpers.proxies import closed_port, started_proxy

pytest.importorskip("aiohttp", reason="needs what vLLM installs")

DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
DEADLINE_S = 120.0
"""Seconds in which an answer or an abort must arrive on a machine of any load."""


class Decode(BaseHTTPRequestHandler):
    """A decode server that returns the request, streamed if requested."""

    protocol_version = "HTTP/1.1"
    release = threading.Event()
    waits, aborted = threading.Event(), threading.Event()
    """Whether a slow request is waiting, and whether the proxy closed its connection."""

    def do_GET(self) -> None:
        self._answer(200, json.dumps({"path": self.path}).encode())

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        sent = {"path": self.path, "key": self.headers.get("Authorization"), "body": json.loads(body)}
        if sent["body"].get("prompt") == "slow":
            self.waits.set()
            if not self.connection.recv(1):
                self.aborted.set()
            return
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
            self.release.wait(DEADLINE_S)
        self.wfile.write(b"0\r\n\r\n")

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Request-Id", "7")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def decode() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Decode)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()


@pytest.fixture(scope="module")
def url(decode: ThreadingHTTPServer) -> Iterator[str]:
    with started_proxy(f"http://127.0.0.1:{decode.server_port}") as address:
        yield address


def post(url: str, body: Any, path: str = "/v1/completions") -> tuple[int, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", "Authorization": "Bearer k"}
    try:
        with DIRECT.open(urllib.request.Request(url + path, data, headers), timeout=DEADLINE_S) as answer:
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
    alike = [[0, 0.0, False, "exact"], [1, 1.0, True, "on"], ["fast"], [0.97], ["default"]]
    requests = [[asking(level) for level in levels] for levels in alike]
    requests[-1] += [{}, {"vllm_xargs": None}, {"vllm_xargs": {"session_id": "s"}}]
    requests += [[{"cache_salt": salt, **asking(level)}] for salt in ("u", '"') for level in (0, 1)]
    salts = [{salt_of(url, **body) for body in bodies} for bodies in requests]
    assert [len(salts_of_level) for salts_of_level in salts] == [1] * len(requests)
    assert len(set().union(*salts)) == len(requests)


def test_vllm_takes_the_salt(url: str) -> None:
    from vllm.entrypoints.generate.base.protocol import validate_cache_salt

    validate_cache_salt(salt_of(url, cache_salt='"é@/\\' + "x" * 1000, **asking("no level / at all" + "x" * 1000)))


class Impatient(Decode):
    """A server that closes a connection that was unused for 2.5 seconds, when the next request arrives on it."""

    answered_at: float | None = None

    def do_POST(self) -> None:
        if self.answered_at is not None and time.monotonic() > self.answered_at + 2.5:
            self.close_connection = True
            return
        super().do_POST()
        self.answered_at = time.monotonic()


def test_a_connection_that_the_server_may_close_is_not_used_again() -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Impatient)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with started_proxy(f"http://127.0.0.1:{server.server_port}") as address:
        for wait_s in 0, 3, 0:
            time.sleep(wait_s)
            assert salt_of(address)
    server.shutdown()


def test_every_path_has_the_same_salts(url: str) -> None:
    exact = salt_of(url, **asking(0))
    for path in ("/v1/chat/completions", "/v1/responses", "/inference/v1/generate"):
        assert salt_of(url, path, **asking(0)) == exact
    sampling_params = {"extra_args": {"sparse_prefill": 0}}
    assert salt_of(url, "/inference/v1/generate", sampling_params=sampling_params) == exact


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"no JSON", "the body of POST /v1/completions"),
        (b"[" * 100_000, "the body of POST"),
        ({"vllm_xargs": [1]}, "vllm_xargs: given list, expected an object"),
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
    with DIRECT.open(f"{url}/metrics?a=b%20c", timeout=DEADLINE_S) as answer:
        assert json.load(answer) == {"path": "/metrics?a=b%20c"}
        assert answer.headers["X-Request-Id"] == "7"
    assert post(url, {"prompt": "refused"})[0] == 418


def test_a_stream_is_passed_on_part_by_part(url: str) -> None:
    """The first event arrives before the server sends the second."""
    Decode.release.clear()
    data = json.dumps({"stream": True}).encode()
    with DIRECT.open(urllib.request.Request(f"{url}/v1/completions", data), timeout=DEADLINE_S) as answer:
        assert answer.headers["Content-Type"] == "text/event-stream"
        assert answer.read(9) == b"data: 1\n\n"
        Decode.release.set()
        assert answer.read() == b"data: [DONE]\n\n"


def test_a_decode_server_that_does_not_answer() -> None:
    with closed_port() as port, started_proxy(f"http://127.0.0.1:{port}") as url:
        status, answer = post(url, {"prompt": "a"})
        assert status == 502
        assert "does not answer" in answer["error"]["message"]


def go_while_it_waits(url: str, waits: threading.Event) -> None:
    """Send a slow request, and close the connection when the server has started on it."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=DEADLINE_S)
    connection.request("POST", "/v1/completions", json.dumps({"prompt": "slow"}).encode())
    assert waits.wait(DEADLINE_S)
    connection.close()


def test_a_client_that_goes_aborts_a_request_without_a_stream(url: str) -> None:
    go_while_it_waits(url, Decode.waits)
    assert Decode.aborted.wait(DEADLINE_S)


TRANSFER = {"do_remote_prefill": True, "remote_block_ids": [[1, 2]], "remote_host": "10.0.0.1", "remote_port": 5600}
CHAT = "/v1/chat/completions"


class Prefill(BaseHTTPRequestHandler):
    """A prefill server that returns the location of a prompt's keys and values, or another answer that the prompt
    selects."""

    protocol_version = "HTTP/1.1"
    bodies: ClassVar[list[tuple[str, dict[str, Any]]]] = []
    waits, aborted = threading.Event(), threading.Event()
    is_healthy = True

    def do_GET(self) -> None:
        self._answer(200 if self.is_healthy else 503, {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.bodies.append((self.path, body))
        match body.get("prompt"):
            case "refused":
                self._answer(400, {"error": {"message": "no such level"}})
            case "without connector":
                self._answer(200, {"choices": []})
            case "no JSON":
                self._answer(200, "<html>")
            case "slow":
                self.waits.set()
                if not self.connection.recv(1):
                    self.aborted.set()
            case _:
                self._answer(200, {"kv_transfer_params": TRANSFER})

    def _answer(self, status: int, answer: Any) -> None:
        body = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def prefill() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Prefill)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()


@pytest.fixture(scope="module")
def pair_url(decode: ThreadingHTTPServer, prefill: ThreadingHTTPServer) -> Iterator[str]:
    urls = (f"http://127.0.0.1:{server.server_port}" for server in (decode, prefill))
    with started_proxy(*urls) as address:
        yield address


def sent_to_prefill(url: str, body: dict[str, Any], path: str = "/v1/completions") -> tuple[dict[str, Any], Any]:
    """Return the requests that the prefill server and the decode server received."""
    Prefill.bodies.clear()
    status, sent = post(url, body, path)
    assert status == 200
    ((prefill_path, prefilled),) = Prefill.bodies
    assert prefill_path == sent["path"] == path
    return prefilled, sent["body"]


class TestPair:
    """The proxy with a prefill server."""

    def test_the_prefill_server_computes_the_prompt_and_the_decode_server_fetches_it(self, pair_url: str) -> None:
        body = {"prompt": "a", "max_tokens": 9, "stop": ["x"], "min_tokens": 2, **asking("fast")}
        prefilled, decoded = sent_to_prefill(pair_url, body)
        assert prefilled.pop("kv_transfer_params")["do_remote_decode"] is True
        assert prefilled == {
            "prompt": "a", "max_tokens": 1, "ignore_eos": True, "stream": False, **asking("fast")
        }  # fmt: skip
        assert decoded.pop("kv_transfer_params") == TRANSFER
        assert decoded.pop("cache_salt").startswith("level:")
        assert decoded == body

    def test_chats_and_tokens(self, pair_url: str) -> None:
        prefilled, _ = sent_to_prefill(pair_url, {"messages": [], "max_completion_tokens": 9, "stream": False}, CHAT)
        assert (prefilled["max_tokens"], prefilled["max_completion_tokens"]) == (1, 1)
        body = {"token_ids": [1], "sampling_params": {"max_tokens": 9, "stop_token_ids": [2], "seed": 1}}
        prefilled, decoded = sent_to_prefill(pair_url, body, "/inference/v1/generate")
        assert prefilled["sampling_params"] == {"max_tokens": 1, "ignore_eos": True, "seed": 1}
        assert decoded["sampling_params"] == body["sampling_params"]

    @pytest.mark.parametrize(
        ("body", "message"),
        [
            ({"n": 2}, "n: given 2, expected 1"),
            ({"prompt": [[1], [2]]}, "prompt: given 2 prompts, expected one"),
            ({"echo": True, "logprobs": 1}, "prompt_logprobs, or echo with logprobs"),
            ({"kv_transfer_params": {"remote_host": "10.6.6.6"}}, "kv_transfer_params: given by the client"),
        ],
    )
    def test_what_a_pair_cannot_divide_is_refused(self, pair_url: str, body: dict[str, Any], message: str) -> None:
        Prefill.bodies.clear()
        status, answer = post(pair_url, {"prompt": "a", **body})
        assert (status, Prefill.bodies) == (400, [])
        assert message in answer["error"]["message"]

    def test_one_prompt_in_a_list_and_token_ids_are_divided(self, pair_url: str) -> None:
        for prompt in (["a"], [[1, 2]], [1, 2], "a"):
            assert sent_to_prefill(pair_url, {"prompt": prompt, "n": 1})[0]["prompt"] == prompt

    def test_paths_that_cannot_be_divided(self, pair_url: str) -> None:
        status, answer = post(pair_url, {}, "/v1/responses")
        assert status == 501
        assert "POST /v1/responses cannot be divided between two servers" in answer["error"]["message"]

    def test_the_prefill_servers_refusal_is_the_answer(self, pair_url: str) -> None:
        assert post(pair_url, {"prompt": "refused"}) == (400, {"error": {"message": "no such level"}})

    @pytest.mark.parametrize(
        ("prompt", "message"),
        [("without connector", "answered without kv_transfer_params"), ("no JSON", "gave no whole answer")],
    )
    def test_a_prefill_server_that_gives_no_keys(self, pair_url: str, prompt: str, message: str) -> None:
        status, answer = post(pair_url, {"prompt": prompt})
        assert status == 502
        assert message in answer["error"]["message"]

    def test_a_client_that_goes_aborts_the_prefill(self, pair_url: str) -> None:
        go_while_it_waits(pair_url, Prefill.waits)
        assert Prefill.aborted.wait(DEADLINE_S)

    def test_a_pair_is_healthy_if_each_server_is(self, pair_url: str) -> None:
        with DIRECT.open(f"{pair_url}/health", timeout=DEADLINE_S) as answer:
            assert answer.status == 200
        Prefill.is_healthy = False
        try:
            with pytest.raises(urllib.error.HTTPError) as refused:
                DIRECT.open(f"{pair_url}/health", timeout=DEADLINE_S)
            assert refused.value.code == 503
        finally:
            Prefill.is_healthy = True

    def test_a_prefill_server_that_does_not_answer(self, decode: ThreadingHTTPServer) -> None:
        decode_url = f"http://127.0.0.1:{decode.server_port}"
        with closed_port() as port, started_proxy(decode_url, f"http://127.0.0.1:{port}") as url:
            status, answer = post(url, {"prompt": "a"})
        assert status == 502
        assert "the prefill server" in answer["error"]["message"]
