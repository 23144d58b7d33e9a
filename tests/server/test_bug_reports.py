# SPDX-License-Identifier: Apache-2.0
"""Faults that public bug reports of vLLM and of other sparse backends describe, tested against a stock server.

``exact`` requests run on our server's dense backend, requests at level ``everything`` on the sparse path with all
blocks kept. Both must equal stock.
"""

import http.client
import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.helpers import scenario
from tests.helpers.scenario import Servers
from tests.helpers.servers import Server

pytestmark = pytest.mark.server

TOLERANCE = 2e-5
"""Tolerance of log-probabilities: stock vLLM differs from itself by up to 2.4e-6 if batched differently."""
LEVELS = (pytest.param("exact", marks=pytest.mark.full), "everything")
"""``test_serve.py`` tests exact requests in the quick suite."""


def complete(server: Server, prompt: list[int], level: str | None = None, **more: Any) -> list[dict[str, Any]]:
    """Return the choices of a completion, by default of a single token."""
    body = {"model": server.model, "prompt": prompt, "max_tokens": 1, "temperature": 0, **more}
    if level is not None:
        body["vllm_xargs"] = {"sparse_prefill": level}
    choices: list[dict[str, Any]] = server.post("/v1/completions", body)["choices"]
    return choices


def prompt_logprobs(server: Server, prompt: list[int], level: str | None = None) -> list[float]:
    """Return the log-probability of each token of the prompt except the first."""
    (choice,) = complete(server, prompt, level, prompt_logprobs=0)
    positions = choice["prompt_logprobs"]
    assert len(positions) == len(prompt)
    return [position[str(token)]["logprob"] for position, token in zip(positions[1:], prompt[1:], strict=True)]


def assert_close(values: list[float], expected: list[float]) -> None:
    assert values == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.parametrize("level", LEVELS)
def test_prompt_logprobs_in_chunks_whatever_was_asked_before(servers: Servers, level: str) -> None:
    """vllm#42019 and #14239: prompts of three chunks, partly cached by other requests and other levels."""
    prompt = scenario.prompt(1300, seed=1001)
    expected = prompt_logprobs(servers.stock, prompt)
    complete(servers.ours, prompt[:900])
    complete(servers.ours, prompt[:900], level)
    assert_close(prompt_logprobs(servers.ours, prompt, level), expected)
    # Later requests may read the blocks that these wrote.
    (choice,) = complete(servers.ours, prompt, level, logprobs=0)
    (stock,) = complete(servers.stock, prompt, logprobs=0)
    assert_close(choice["logprobs"]["token_logprobs"], stock["logprobs"]["token_logprobs"])


@pytest.mark.parametrize("level", LEVELS)
def test_echo_with_logprobs_over_a_cached_prefix(servers: Servers, level: str) -> None:
    """vllm#5344 and #8268."""
    prompt = scenario.prompt(700, seed=1002)
    options = {"echo": True, "logprobs": 1, "max_tokens": 3}
    (stock,) = complete(servers.stock, prompt, **options)
    for _ in range(2):  # all of it is cached the second time
        complete(servers.ours, prompt, level)
        (choice,) = complete(servers.ours, prompt, level, **options)
        assert choice["text"] == stock["text"]
        first, *logprobs = choice["logprobs"]["token_logprobs"]
        assert first is None
        assert_close(logprobs, stock["logprobs"]["token_logprobs"][1:])


@pytest.mark.parametrize("level", [*LEVELS, pytest.param(None, marks=pytest.mark.full)])
def test_structured_output_on_long_prompts(servers: Servers, level: str | None) -> None:
    """vllm#15790. At the server's default level, an answer may differ from stock's, but must keep its form."""
    prompt = scenario.prompt(1100, seed=1004)
    options = {"structured_outputs": {"regex": "(red|green|blue): [0-9]{3}"}, "max_tokens": 24}
    (stock,), (choice,) = complete(servers.stock, prompt, **options), complete(servers.ours, prompt, level, **options)
    for text in (stock["text"], choice["text"]):
        assert re.fullmatch("(red|green|blue): [0-9]{3}", text), text
    assert level is None or choice["text"] == stock["text"]


ANSWER_TOKENS = 3


def broken_off(server: Server, prompt: list[int], num_tokens: int) -> int:
    """Stream an answer of three tokens, and disconnect once this many have arrived; return the number received.

    On a busy machine, vLLM puts several tokens into one event, so events do not count tokens.
    """
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=scenario.DEADLINE_S)
    options = {"max_tokens": ANSWER_TOKENS, "ignore_eos": True, "stream": True, "return_token_ids": True}
    body = {"model": server.model, "prompt": prompt, **options}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    received = 0
    while received < num_tokens and (line := answer.readline()):
        if line.startswith(b"data: {"):
            (choice,) = json.loads(line.removeprefix(b"data: "))["choices"]
            received += len(choice["token_ids"])
    connection.close()
    return received


@pytest.mark.full
def test_requests_broken_off_in_their_last_step(servers: Servers) -> None:
    """vllm#29987: the client disconnects while the engine computes the last token."""
    prompts = [scenario.prompt(300 + 10 * i, seed=3000 + i) for i in range(16)]
    with ThreadPoolExecutor(4) as pool:
        least = [1 + i % ANSWER_TOKENS for i in range(len(prompts))]
        received = list(pool.map(lambda i: broken_off(servers.ours, prompts[i], least[i]), range(len(prompts))))
    assert all(wanted <= num_tokens <= ANSWER_TOKENS for wanted, num_tokens in zip(least, received, strict=True))
    token_ids = scenario.prompt(900, seed=1005)
    expected, answer = scenario.ask(servers.stock, token_ids), scenario.ask(servers.ours, token_ids, level="exact")
    assert answer.token_ids == expected.token_ids
    assert answer.logprobs == pytest.approx(expected.logprobs, abs=TOLERANCE)
    running = re.findall(r"(?m)^vllm:num_requests_running{.*} (\S+)$", servers.ours.get("/metrics"))
    assert [float(value) for value in running] == [0.0] * len(running)
