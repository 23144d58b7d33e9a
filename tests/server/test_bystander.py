# SPDX-License-Identifier: Apache-2.0
"""A server of another backend with this package installed, under requests that contain our keys.

It answers like stock vLLM without plugins, for any value of these keys in any place, and does not end.
"""

import json
import os
import random
import re
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest

from tests.helpers import scenario
from tests.helpers.scenario import Servers
from tests.helpers.tiny_models import VOCAB_SIZE
from vllm_sparse_backend.config.keys import CARRIED
from vllm_sparse_backend.config.metrics import WORKER_METHOD
from vllm_sparse_backend.config.request_levels import FIELD
from vllm_sparse_backend.evaluation.vllm_server import Server

pytestmark = [pytest.mark.server, pytest.mark.full]
pytest.importorskip("vllm")

SEED = 20
REQUESTS = int(os.environ.get("HOSTILE_REQUESTS", "80"))
KEYS = (FIELD, FIELD, CARRIED, WORKER_METHOD, "sparse-prefill", "Sparse_Prefill")
"""The key of levels is listed twice, because the engine's core and workers read it if the backend is ours."""

VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, 5, -1, 1 << 70, 0.5, -0.0, 1e308, "", "exact", "default", "fastest", "\x00", "é" * 300,
    "[]", [], ["exact"], ["exact", "salt", 0], ["exact", None, 0], ["exact", "salt", -5], ["exact", "salt", "0"],
    ["exact", "salt", 1 << 70], ["exact", "salt", 0, 1], [1, 2, 3], [[]], [None, None, None], {}, {"level": "exact"},
    {"exact": ["salt", {"0": []}]},
)  # fmt: skip
PLACES = (
    ("vllm_xargs",), ("vllm_xargs",), ("vllm_xargs",), (), ("extra_body",), ("extra_body", "vllm_xargs"),
    ("extra_args",), ("metadata",), ("sampling_params",), ("sampling_params", "extra_args"), ("chat_template_kwargs",),
    ("kv_transfer_params",), ("messages", "0"), ("messages", "0", "vllm_xargs"), ("stream_options",),
)  # fmt: skip
PATHS = ("/v1/completions",) * 6 + ("/v1/chat/completions", "/v1/responses", "/tokenize", "/nothing")
CHANGES = re.compile(
    r'"(created|created_at|completed_at)":\s*[0-9.]+|"system_fingerprint":\s*"[^"]*"'
    r"|\b(resp|msg|rs|req|item|chatcmpl|cmpl)[-_][0-9a-f]{8,}"
)
"""Parts that differ in each answer, or with the arguments of the server."""


class Hostile(NamedTuple):
    path: str
    body: bytes
    headers: dict[str, str]


class Said(NamedTuple):
    status: int
    text: str


def place(body: dict[str, Any], where: tuple[str, ...], key: str, value: Any) -> None:
    """Put the key into a part of the body, which is created if it is missing."""
    part: Any = body
    for name in where:
        part = part[int(name)] if isinstance(part, list) else part.setdefault(name, {})
    part[key] = value


def hostile(number: int) -> Hostile:
    """Return a request that depends only on its number. Its prompt fills a block, which the engine's core hashes."""
    source = random.Random(f"{SEED} {number}")
    path = source.choice(PATHS)
    tokens = [source.randrange(2, VOCAB_SIZE) for _ in range(source.choice((3, 140, 300)))]
    body: dict[str, Any] = {"max_tokens": source.choice((1, 8, 140)), "temperature": 0, "ignore_eos": True}
    if path == "/v1/chat/completions":
        body["messages"] = [{"role": "user", "content": " ".join(map(str, tokens[:20]))}]
    elif path == "/v1/responses":
        body |= {"input": " ".join(map(str, tokens[:20])), "max_output_tokens": body["max_tokens"]}
    else:
        body["prompt"] = tokens
        body["messages"] = [{}]
    if source.random() < 0.2:
        body["stream"] = True
    for _ in range(source.choice((1, 1, 2, 5))):
        place(body, source.choice(PLACES), source.choice(KEYS), source.choice(VALUES))
    if source.random() < 0.1:
        body[source.choice(("vllm_xargs", "extra_body", *KEYS))] = source.choice(VALUES)
    if path != "/v1/chat/completions" and source.random() < 0.7:
        body.pop("messages", None)
    text = json.dumps(body).encode()
    if source.random() < 0.05:
        text = text[: source.randrange(len(text))]
    headers = {"Content-Type": "application/json", "X-Request-Id": f"hostile-{number}", FIELD: "exact"}
    return Hostile(path, text, headers)


def ask(server: Server, request: Hostile) -> Said:
    message = urllib.request.Request(server.url + request.path, request.body, request.headers)
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(message, timeout=scenario.DEADLINE_S) as response:
            said = Said(response.status, response.read().decode())
    except urllib.error.HTTPError as error:
        said = Said(error.code, error.read().decode())
    text = stream_content(said.text) if said.text.startswith(("data: ", "event: ")) else said.text
    return said._replace(text=CHANGES.sub("", text.replace(server.url, "")))


def stream_content(text: str) -> str:
    """Return the text of a stream of events. The number of tokens in an event depends on the machine's load."""
    events = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: {")]
    choices = [choice for event in events for choice in event.get("choices", ())]
    deltas = [choice.get("text", choice.get("delta")) for choice in choices] + [event.get("delta") for event in events]
    words = "".join(delta.get("content") or "" if isinstance(delta, dict) else delta or "" for delta in deltas)
    reasons = [choice["finish_reason"] for choice in choices if choice.get("finish_reason")]
    keys: dict[str, set[str]] = {}  # by type: on a busy machine a stream's only event may be its last, with more keys
    for event in events:
        keys.setdefault(str(event.get("type")), set()).update(event)
    return json.dumps([words, reasons, {name: sorted(keys[name]) for name in sorted(keys)}, "data: [DONE]" in text])


def test_it_answers_as_a_server_without_plugins(servers: Servers, bystander: Server) -> None:
    """Both get the same requests in the same order, one at a time, so they cache the same blocks."""
    both = (servers.stock, bystander)
    statuses, differing = [], []
    with ThreadPoolExecutor(len(both)) as pool:
        for number in range(REQUESTS):
            request = hostile(number)
            expected, said = pool.map(ask, both, (request, request))
            statuses.append(said.status)
            if said != expected:
                differing.append((number, request.path, request.body[:500], expected, said))
                assert bystander.exit_code() is None, (differing[-1], bystander.tail())
    assert not differing, (len(differing), differing[:5])
    assert [server.exit_code() for server in both] == [None, None]
    assert statuses.count(200) > REQUESTS // 10


def test_its_log_says_that_settings_are_not_read(servers: Servers, bystander: Server) -> None:
    """This also shows that the plugin was loaded."""
    log = bystander.log_path.read_text(errors="replace")
    assert log.count("sparse_prefill in --additional-config is ignored: another attention backend") == 1
    assert "sparse_prefill_" not in bystander.get("/metrics")
    assert "is ignored: another attention backend" not in servers.stock.log_path.read_text(errors="replace")
