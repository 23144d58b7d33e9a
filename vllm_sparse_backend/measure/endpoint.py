# SPDX-License-Identifier: Apache-2.0
"""An OpenAI-compatible vLLM server as a client sees it: prompts of given lengths, and when their tokens come."""

import json
import os
import random
import time
import urllib.error
import urllib.request
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from http.client import HTTPException
from itertools import pairwise
from typing import Any

from vllm_sparse_backend.demo.model import project_text
from vllm_sparse_backend.measure.report import BenchError
from vllm_sparse_backend.settings.requests import FIELD

# Loopback must not go through a proxy of the environment.
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))

TIMEOUT_S = 1800.0


class RequestError(RuntimeError):
    """A request was not answered as asked; the message says how."""


@dataclass(frozen=True)
class Answer:
    first_token_s: float
    """From sending the request to its first streamed token."""
    tokens: int
    waits_s: tuple[float, ...] = ()
    """For each of the later tokens, after the one before."""


@dataclass(frozen=True)
class Completion:
    text: str
    prompt_tokens: int | None
    """None where the server does not count them."""


@dataclass(frozen=True)
class Endpoint:
    """``url`` has no path: ``http://127.0.0.1:8000``."""

    name: str
    url: str
    model: str
    root: str | None = None
    """What the server loaded, a folder or a name, where it says so."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Goes with every request for a completion."""

    def at_level(self, level: int | str) -> "Endpoint":
        """The same server, asked for that level. Raises BenchError where it has none of that name.

        Levels share a cache's first blocks, which are dense in all of them. Here none finds what another one left: the
        same prompts are asked at each.
        """
        asked = replace(self, extra={"vllm_xargs": {FIELD: level}, "cache_salt": f"level {level}"})
        try:
            asked.ask([1] * 16, 1)
        except RequestError as error:
            raise BenchError(f"{self.name}: level {level!r}: {error}") from None
        return asked

    @staticmethod
    def connect(name: str, url: str) -> "Endpoint":
        """A running server, and the model that it serves. Raises BenchError where none answers."""
        url = url.rstrip("/").removesuffix("/v1")
        if not url.startswith(("http://", "https://")):
            raise BenchError(f"{name}: given {url!r}, expected a server's address such as http://127.0.0.1:8000")
        try:
            with _DIRECT.open(_request(f"{url}/v1/models"), timeout=30) as answer:
                models = json.load(answer)["data"]
            return Endpoint(name, url, models[0]["id"], models[0].get("root"))
        except (OSError, HTTPException, ValueError, KeyError, IndexError, TypeError) as error:
            raise BenchError(f"{name}: no model server answers at {url}: {error}") from None

    def ask(self, prompt: Sequence[int], max_tokens: int, stop_after: int | None = None, **more: Any) -> Answer:
        """Stream an answer of exactly ``max_tokens`` tokens. Raises RequestError on anything else.

        ``stop_after``: break off, and close the connection, once as many tokens are there. ``more`` goes with the
        request.
        """
        body = {
            "model": self.model, "prompt": list(prompt), "max_tokens": max_tokens, "stream": True, "temperature": 0,
            "ignore_eos": True, "logprobs": 1, **self.extra, **more,
        }  # fmt: skip
        wanted = max_tokens if stop_after is None else min(stop_after, max_tokens)
        request = _post(f"{self.url}/v1/completions", body)  # as text: that of a long prompt takes a while
        began = time.perf_counter()
        stamps: list[float] = []
        try:
            for choice in (stream := self._stream(request)):
                for logprob in (choice.get("logprobs") or {}).get("token_logprobs", []):
                    if logprob is None or not -1e4 < logprob <= 1e-6:
                        raise RequestError(f"log-probability {logprob}: not a number that a healthy model gives")
                    stamps.append(time.perf_counter())
                if stop_after is not None and len(stamps) >= wanted:
                    stream.close()
                    break
        except (OSError, ValueError, HTTPException) as error:
            raise RequestError(_said(error)) from None
        if len(stamps) != wanted and (stop_after is None or len(stamps) < wanted):
            raise RequestError(f"{len(stamps)} tokens answered, asked for {wanted}")
        waits = tuple(after - before for before, after in pairwise(stamps))
        return Answer(stamps[0] - began, len(stamps), waits)

    def _stream(self, request: urllib.request.Request) -> Generator[dict[str, Any], None, None]:
        with _DIRECT.open(request, timeout=TIMEOUT_S) as answer:
            for line in answer:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise RequestError(f"the server said: {event['error']}")
                yield from event.get("choices", [])[:1]

    def prompt_logprobs(self, prompt: Sequence[int]) -> list[dict[str, Any] | None]:
        """Of each token of a prompt, by vLLM's ``prompt_logprobs``: its own and the likeliest, with their ranks.

        The first has none. vLLM computes such a prompt whole: it takes nothing from its prefix cache. Raises
        RequestError on anything but an answer with such a list.
        """
        body = {
            "model": self.model, "prompt": list(prompt), "max_tokens": 1, "temperature": 0, "prompt_logprobs": 1,
            **self.extra,
        }  # fmt: skip
        try:
            with _DIRECT.open(_post(f"{self.url}/v1/completions", body), timeout=TIMEOUT_S) as got:
                found = json.load(got)["choices"][0]["prompt_logprobs"]
        except (OSError, ValueError, HTTPException) as error:
            raise RequestError(_said(error)) from None
        except (KeyError, IndexError, TypeError):
            found = None
        if not isinstance(found, list):
            raise RequestError("the answer has no prompt_logprobs: expected a vLLM server")
        return found

    def complete(self, prompt: str | Sequence[int], max_tokens: int, chat: bool = False, **more: Any) -> Completion:
        """The greedy answer to a prompt, or with ``chat`` to a user's message, of at most so many tokens.

        ``more`` goes with the request. Raises RequestError on anything but an answer that ended by itself or at
        ``max_tokens``.
        """
        body = {"model": self.model, "max_tokens": max_tokens, "temperature": 0, "seed": 0, **self.extra, **more}
        if chat:
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt if isinstance(prompt, str) else list(prompt)
        path = "/v1/chat/completions" if chat else "/v1/completions"
        try:
            with _DIRECT.open(_post(self.url + path, body), timeout=TIMEOUT_S) as got:
                found = json.load(got)
            choice = found["choices"][0]
            text = choice["message"]["content"] if chat else choice["text"]
        except (OSError, ValueError, HTTPException) as error:
            raise RequestError(_said(error)) from None
        except (KeyError, IndexError, TypeError):
            raise RequestError("the answer has no text: expected an OpenAI-compatible server") from None
        if (end := choice.get("finish_reason")) not in ("stop", "length", "repetition"):
            raise RequestError(f"the answer was not finished: {end!r}, expected stop or length")
        return Completion(text or "", (found.get("usage") or {}).get("prompt_tokens"))

    def tokenizes(self) -> bool:
        """Whether the server has /tokenize, vLLM's addition to OpenAI's interface."""
        try:
            with _DIRECT.open(_post(f"{self.url}/tokenize", {"model": self.model, "prompt": "a"}), timeout=120):
                return True
        except urllib.error.HTTPError as error:
            if error.code in (404, 405):
                return False
            raise BenchError(f"{self.name}: {self.url}/tokenize: {_said(error)}") from None
        except (OSError, HTTPException) as error:
            raise BenchError(f"{self.name}: {self.url}/tokenize: {_said(error)}") from None

    def tokenize(self, text: str, special: bool = True) -> list[int]:
        """Token ids of a text, by the server's own tokenizer; with ``special``, with those that it puts around it."""
        body = {"model": self.model, "prompt": text, "add_special_tokens": special}
        try:
            with _DIRECT.open(_post(f"{self.url}/tokenize", body), timeout=120) as got:
                return list(json.load(got)["tokens"])
        except (OSError, HTTPException, ValueError, KeyError, TypeError) as error:
            raise BenchError(f"{self.name}: {self.url}/tokenize: {_said(error)}") from None

    def metrics(self) -> str:
        """The text of /metrics; empty where there is none."""
        try:
            with _DIRECT.open(f"{self.url}/metrics", timeout=30) as answer:
                return str(answer.read().decode())
        except (OSError, HTTPException):
            return ""


def _post(url: str, body: Mapping[str, Any]) -> urllib.request.Request:
    return _request(url, json.dumps(body).encode())


def _request(url: str, data: bytes | None = None) -> urllib.request.Request:
    """With the key that OpenAI's clients take from the environment, for servers that ask for one."""
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get("OPENAI_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    return urllib.request.Request(url, data, headers)


def _said(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"answered {error.code}: {error.read().decode(errors='replace')[:500]}"
    return f"{type(error).__name__}: {error}"


class Prompts:
    """Stretches of a text, no two of which begin alike: none is found in a prefix cache."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        if len(token_ids) < 1024:
            raise BenchError(f"text: given {len(token_ids)} tokens, expected at least 1,024")
        self.token_ids = list(token_ids)
        self.made = 0

    @staticmethod
    def of(endpoint: Endpoint, text: str | None = None) -> "Prompts":
        return Prompts(endpoint.tokenize(text or project_text()[:400_000]))

    def take(self, length: int) -> list[int]:
        """The next prompt of so many tokens; a text that is too short starts again."""
        # Stretches of one text would meet again some day: the first tokens of each are drawn.
        ids, base = self.token_ids, len(self.token_ids)
        head = random.Random(self.made).choices(ids, k=8)
        start = self.made * 997 % base
        self.made += 1
        around = [ids[(start + i) % base] for i in range(length)]
        return [*head, *around][:length]
