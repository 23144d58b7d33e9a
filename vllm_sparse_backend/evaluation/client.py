# SPDX-License-Identifier: Apache-2.0
"""Client of a running vLLM server: sends prompts, and times the tokens of answers.

`vllm bench serve` does not replace it: each call takes 15 s, it cannot alternate requests between servers, and it
counts answers that are too short, that have NaN log-probabilities or that end with an error as successful.
"""

import json
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from vllm_sparse_backend.config.errors import ConfigurationError
from vllm_sparse_backend.config.input_files import read_text
from vllm_sparse_backend.config.metrics import FRESH_METRICS_PATH
from vllm_sparse_backend.config.request_levels import FIELD
from vllm_sparse_backend.evaluation.report import BenchError
from vllm_sparse_backend.prompts.texts import project_text

TIMEOUT_S = 1800.0
BURST_S = 1e-3
"""Seconds within which tokens count as arrived together: shorter times come from the client, not the server."""
MOST_CHARS = 200_000
"""Maximum number of characters in one request to tokenize."""


class RequestError(RuntimeError):
    """A request without a valid answer. The message has the reason, and ``status`` the HTTP status, if any."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


@contextmanager
def connected(url: str, timeout_s: float = TIMEOUT_S) -> Iterator[Callable[..., HTTPResponse]]:
    """Connect to a server, and yield ``send(path, body=None)``, which GETs a path or POSTs a body to it as JSON.

    Any failure of the request or of reading its answer raises RequestError.
    """

    def send(path: str, body: Mapping[str, Any] | None = None) -> HTTPResponse:
        key = os.environ.get("OPENAI_API_KEY") or "none"
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        data = None if body is None else json.dumps(body).encode()
        connection.request("GET" if body is None else "POST", parts.path + path, data, headers)
        response = connection.getresponse()
        if not 200 <= response.status < 300:
            said = response.read().decode(errors="replace")
            raise RequestError(f"answered {response.status}: {said[:2000]}", response.status)
        return response

    try:
        parts = urlsplit(url)
        # A direct connection: requests to loopback must not use the environment's proxy.
        connection = (HTTPSConnection if parts.scheme == "https" else HTTPConnection)(parts.netloc, timeout=timeout_s)
        with closing(connection):
            connection.connect()
            yield send
    except (OSError, HTTPException, ValueError, LookupError, TypeError) as error:
        raise RequestError(f"{type(error).__name__}: {error}") from None


@dataclass(frozen=True)
class TimedAnswer:
    """Times of an answer, in seconds from sending the request. Later releases of vLLM stream several tokens at once."""

    first_token_s: float
    last_token_s: float
    tokens: int

    @property
    def token_s(self) -> float | None:
        """Mean time per token after the first token; None without such tokens, or if all tokens arrived at once."""
        taken = self.last_token_s - self.first_token_s
        return taken / (self.tokens - 1) if self.tokens > 1 and taken > BURST_S else None


@dataclass(frozen=True)
class Endpoint:
    """A model on a running server. ``url`` has no path, as in ``http://127.0.0.1:8000``."""

    name: str
    url: str
    model: str
    root: str | None = None
    """The folder or name that the server loaded, if the server reports it."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Fields of every completion request."""

    @staticmethod
    def connect(name: str, address: str) -> "Endpoint":
        """Connect to a running server, and find its model. Raises BenchError if no server answers."""
        url = address.rstrip("/").removesuffix("/v1")
        if not url.startswith(("http://", "https://")):
            raise BenchError(f"{name}: given {address!r}, expected a server's address such as http://127.0.0.1:8000")
        try:
            with connected(url) as send:
                model = json.load(send("/v1/models"))["data"][0]
                return Endpoint(name, url, model["id"], model.get("root"))
        except RequestError as error:
            if error.status in (401, 403):
                raise BenchError(
                    f"{name}: the server at {url} refuses the request ({error}); set OPENAI_API_KEY to its --api-key"
                ) from None
            raise BenchError(f"{name}: no model server at {url}: {error}") from None

    def at_level(self, level: float | str) -> "Endpoint":
        """Return the same server with requests at this level. Raises BenchError if it has no such level."""
        endpoint = replace(self, extra={"vllm_xargs": {FIELD: level}})
        try:
            endpoint.ask([1] * 16, 1)
        except RequestError as error:
            raise BenchError(f"{self.name}: level {level!r}: {error}") from None
        return endpoint

    def ask(self, prompt: Sequence[int], max_tokens: int) -> TimedAnswer:
        """Stream an answer of exactly ``max_tokens`` tokens. Raises RequestError otherwise."""
        body = self.body(prompt, max_tokens) | {"stream": True, "ignore_eos": True, "logprobs": 1}
        tokens, first_s, last_s = 0, 0.0, 0.0
        with connected(self.url) as send:
            began = time.perf_counter()
            for line in send("/v1/completions", body):
                if num_tokens := _num_tokens(line):
                    last_s = time.perf_counter() - began
                    first_s = last_s if tokens == 0 else first_s
                    tokens += num_tokens
        if tokens != max_tokens:
            raise RequestError(f"the answer has {tokens} tokens, expected {max_tokens}")
        return TimedAnswer(first_s, last_s, tokens)

    def body(self, prompt: Sequence[int], max_tokens: int) -> dict[str, Any]:
        """Return the fields that every completion request has."""
        return {"model": self.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **self.extra}

    def prompt_logprobs(self, prompt: Sequence[int], top: int = 1) -> list[dict[str, Any] | None]:
        """Return vLLM's ``prompt_logprobs``: for each token, its own entry and those of the ``top`` most likely tokens,
        with ranks.

        The first token has no entry. vLLM computes such a prompt as a whole, without its prefix cache. Raises
        RequestError if the answer has no such list.
        """
        with connected(self.url) as send:
            answer = json.load(send("/v1/completions", self.body(prompt, 1) | {"prompt_logprobs": top}))
            returned = answer["choices"][0].get("prompt_logprobs")
        if not isinstance(returned, list):
            raise RequestError("the answer has no prompt_logprobs, expected a vLLM server")
        return returned

    def tokenize(self, text: str, special: bool = False) -> list[int]:
        """Return the token ids of a text by the server's tokenizer. Long texts are sent in pieces of whole lines.

        With ``special``, the tokenizer adds its special tokens. Raises BenchError.
        """
        ids: list[int] = []
        try:
            while text:
                cut = text.rfind("\n", 0, MOST_CHARS) + 1 if len(text) > MOST_CHARS else len(text)
                piece, text = text[: cut or MOST_CHARS], text[cut or MOST_CHARS :]
                with connected(self.url) as send:
                    body = {"model": self.model, "prompt": piece, "add_special_tokens": special}
                    ids += json.load(send("/tokenize", body))["tokens"]
        except RequestError as error:
            raise BenchError(f"{self.name}: {self.url}/tokenize: {error}") from None
        return ids

    def metrics(self) -> str:
        """Return the text of /metrics with current counts; empty if the server has no /metrics."""
        try:
            with connected(self.url) as send:
                return send(FRESH_METRICS_PATH).read().decode()
        except RequestError:
            return ""

    def first_tokens(self) -> list[int]:
        """Return the first tokens of prompts: those that the tokenizer adds, or the model folder's bos token.

        The tokenizer of a model trained with a bos token does not always add that token. Its absence changes attention.
        """
        plain, full = self.tokenize("a"), self.tokenize("a", special=True)
        if plain and plain[0] in full and (added := full[: full.index(plain[0])]):
            return added
        return self.tokenize(bos) if (bos := _bos_token(self.root)) else []


def _bos_token(folder: str | None) -> str | None:
    """Return the bos token of a local model folder; None for a hub name or another machine's folder."""
    try:
        config = json.loads(read_text(Path(folder or "/dev/null") / "tokenizer_config.json"))
    except (ConfigurationError, ValueError):
        return None
    bos = config.get("bos_token")
    return bos.get("content") if isinstance(bos, dict) else bos


def _num_tokens(line: bytes) -> int:
    """Count the tokens of a line of a stream. Raises RequestError for an error or an unhealthy model's answer."""
    if not line.startswith(b"data: {"):
        return 0
    event = json.loads(line.removeprefix(b"data: "))
    if "error" in event:
        raise RequestError(f"the stream ended with {event['error']}")
    choices = event.get("choices") or [{}]
    logprobs = (choices[0].get("logprobs") or {}).get("token_logprobs") or ()
    for logprob in logprobs:
        if logprob is None or not -1e4 < logprob <= 1e-6:
            raise RequestError(f"the answer has log-probability {logprob}, expected a finite number of at most 0")
    return len(logprobs)


class Prompts:
    """Stretches of a text that all begin differently, so that a prefix cache contains none of them."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        if len(token_ids) < 1024:
            raise BenchError(f"text: given {len(token_ids)} tokens, expected at least 1,024")
        self.token_ids = token_ids
        self.made = 0

    @staticmethod
    def of(endpoint: Endpoint, text: str | None = None) -> "Prompts":
        """Tokenize a text, or this project's sources."""
        return Prompts(endpoint.tokenize(text or project_text()[:400_000]))

    def take(self, length: int) -> list[int]:
        """Return the next prompt of ``length`` tokens. A short text starts again."""
        # Stretches of a text repeat eventually, so the first tokens of each prompt are random.
        ids, base = self.token_ids, len(self.token_ids)
        head = random.Random(self.made).choices(ids, k=8)
        start = self.made * 997 % base
        self.made += 1
        stretch = [ids[(start + i) % base] for i in range(length)]
        return [*head, *stretch][:length]
