# SPDX-License-Identifier: Apache-2.0
"""salting_proxy.py --decode URL [--prefill URL]: pair a sparse prefill server with a stock decode server.

A stock vLLM server that decodes for sparse prefill servers does not know about levels: its prefix cache may serve an
exact request with the blocks of a sparse request. This proxy sets ``cache_salt`` from the level in ``vllm_xargs``, so
requests of different levels share no cached blocks. If the client sends a salt, it becomes part of the new salt.

With ``--prefill``, clients connect to this proxy. It sends the prompt to the prefill server, then passes the location
of the keys and values (``kv_transfer_params`` of vLLM's ``NixlConnector``) to the decode server, which answers. Without
``--prefill``, the proxy only adds salts: put it between your own disaggregation proxy and the decode server.

It needs only packages that vLLM installs: aiohttp, starlette and uvicorn.
"""

import argparse
import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

FIELD = "sparse_prefill"
EXACT, ON = "exact", "on"

SALTED = {"/v1/completions", "/v1/chat/completions", "/v1/responses", "/inference/v1/generate"}
"""Paths whose bodies have a field ``cache_salt``. POST requests to other paths are refused."""

GENERATE = "/inference/v1/generate"

PAIRED = {"/v1/completions", "/v1/chat/completions", GENERATE}
"""Paths that a pair of servers supports: their answers contain the location of the prompt's keys and values."""

REMOTE_DECODE = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
    "remote_host": None, "remote_port": None,
}  # fmt: skip
"""``kv_transfer_params`` of a request whose keys and values another server will fetch."""

ENDINGS = ("stop", "stop_token_ids", "stream_options")
"""Fields that a prefill request must not have. Connectors do not transfer the blocks of a request that ended at a stop
string."""

KEPT_S = 2.0
"""Seconds for which an unused connection is kept. vLLM's server closes it after 5 seconds, and a POST that is sent at
that moment fails."""

NOT_FORWARDED = {
    "host", "content-length", "transfer-encoding", "connection", "keep-alive", "upgrade", "te", "trailer",
    "proxy-authenticate", "proxy-authorization", "expect",
}  # fmt: skip
"""Headers that belong to a single connection, or that the proxy generates itself."""


def level_of(body: Mapping[str, Any]) -> str:
    """Return the level that a body requests. All spellings of a level give the same name.

    Raises:
        ValueError: ``vllm_xargs`` is not an object.
    """
    sampling_params = body.get("sampling_params")
    nested = sampling_params.get("extra_args") if isinstance(sampling_params, dict) else None
    level = None
    for name, extra_args in ("vllm_xargs", body.get("vllm_xargs")), ("sampling_params.extra_args", nested):
        if extra_args is not None and not isinstance(extra_args, dict):
            raise ValueError(f"{name}: given {type(extra_args).__name__}, expected an object")
        if extra_args and level is None:
            level = extra_args.get(FIELD)
    if level is None:
        return "default"
    if isinstance(level, (bool, int, float)) and level in (0, 1):
        return ON if level else EXACT
    return level if isinstance(level, str) else json.dumps(level)


def salted(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body with a ``cache_salt`` that depends on the level and on the client's salt.

    Raises:
        ValueError: ``vllm_xargs`` or ``cache_salt`` has a type that vLLM does not accept.
    """
    salt = body.get("cache_salt")
    if salt is not None and not isinstance(salt, str):
        raise ValueError(f"cache_salt: given {type(salt).__name__}, expected a string")
    # A digest, because vLLM refuses some characters and salts over 128 characters.
    digest = hashlib.sha256(json.dumps([level_of(body), salt]).encode()).hexdigest()
    return {**body, "cache_salt": f"level:{digest}"}


def refusal_of_pair(path: str, body: Mapping[str, Any]) -> str | None:
    """Return why a pair of servers cannot answer this request, and what to do; None if it can."""
    sampling = (body.get("sampling_params") or {}) if path == GENERATE else body
    if not isinstance(sampling, Mapping):
        return f"sampling_params: given {type(sampling).__name__}, expected an object"
    if body.get("kv_transfer_params") is not None:
        return "kv_transfer_params: given by the client, expected none; the prefill server's answer has them"
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) > 1 and not all(isinstance(token, int) for token in prompt):
        return f"prompt: given {len(prompt)} prompts, expected one; send a request for each"
    if (choices := sampling.get("n")) not in (None, 1):
        return f"n: given {choices}, expected 1, because a decode server fetches a prompt once; send {choices} requests"
    if body.get("prompt_embeds") is not None:
        return "prompt_embeds: given, expected a prompt of text or tokens"
    if sampling.get("use_beam_search"):
        return "use_beam_search: given true, expected false, because a decode server fetches a prompt once"
    asks_for_logprobs = sampling.get("prompt_logprobs") is not None or (
        body.get("echo") and body.get("logprobs") is not None
    )
    if asks_for_logprobs:
        what = "given prompt_logprobs, or echo with logprobs, expected neither"
        return f"{what}, because the decode server would compute the prompt again, densely; ask the prefill server"
    return None


def prefill_body(path: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the request for the prefill server: the same prompt and a single token. The server keeps the blocks."""
    limits: dict[str, Any] = {"max_tokens": 1, "ignore_eos": True}

    def limited(fields: Mapping[str, Any]) -> dict[str, Any]:
        kept = {name: value for name, value in fields.items() if name not in (*ENDINGS, "min_tokens")}
        return {**kept, **limits}

    if path == GENERATE:
        kept = {name: value for name, value in body.items() if name not in ENDINGS}
        return {
            **kept,
            "sampling_params": limited(body.get("sampling_params") or {}),
            "stream": False,
            "kv_transfer_params": REMOTE_DECODE,
        }
    if path == "/v1/chat/completions":
        limits["max_completion_tokens"] = 1
    return {**limited(body), "stream": False, "kv_transfer_params": REMOTE_DECODE}


class RefusedError(Exception):
    """Ends a request with ``response`` as the client's answer."""

    def __init__(self, response: Response) -> None:
        self.response = response


def error(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": {"message": f"salting proxy: {message}", "code": status}}, status)


class Proxy:
    """Forwards requests to a decode server, after the prefill server if there is one."""

    def __init__(self, decode: str, prefill: str | None = None) -> None:
        self.decode = decode.rstrip("/")
        self.prefill = None if prefill is None else prefill.rstrip("/")
        self.session: aiohttp.ClientSession | None = None

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        timeout = aiohttp.ClientTimeout(total=None, connect=10)
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEPT_S)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector, auto_decompress=False) as self.session:
            yield

    async def forward(self, request: Request) -> Response:
        try:
            body = await request.body()
            if request.method == "POST":
                path = request.url.path
                fields = self._fields(path, body)
                if self.prefill is not None:
                    transfer = await _while_connected(request, self._prefill(request, path, fields))
                    fields = {**fields, "kv_transfer_params": transfer}
                body = json.dumps(salted(fields)).encode()
            elif self.prefill is not None and request.url.path == "/health":
                await _while_connected(request, self._require_prefill_server(request))
            answer = await _while_connected(request, self._send(request, self.decode, "decode", body))
        except RefusedError as refused:
            return refused.response
        return _streamed(answer)

    def _fields(self, path: str, body: bytes) -> dict[str, Any]:
        """Return the fields of a body. Refuse a request that cannot be salted or divided between two servers."""
        known = SALTED if self.prefill is None else PAIRED
        if path not in known:
            what = "has no cache_salt" if path not in SALTED else "cannot be divided between two servers"
            to_do = "send requests to other paths to a decode server without prefix caching"
            raise RefusedError(error(501, f"POST {path} {what}, expected one of {', '.join(sorted(known))}; {to_do}"))
        try:
            fields = json.loads(body)
            if not isinstance(fields, dict):
                raise ValueError("given no JSON object")
            salted(fields)
            refusal = None if self.prefill is None else refusal_of_pair(path, fields)
            if refusal is not None:
                raise ValueError(refusal)
        except (ValueError, RecursionError) as wrong:
            raise RefusedError(error(400, f"the body of POST {path}: {wrong}")) from None
        return fields

    async def _prefill(self, request: Request, path: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return the location of the prompt's keys and values, for the decode server."""
        assert self.prefill is not None
        sent = json.dumps(prefill_body(path, fields)).encode()
        answer = await self._send(request, self.prefill, "prefill", sent)
        if answer.status != 200:  # a refusal, such as of an unknown level
            raise RefusedError(_streamed(answer))
        async with answer:
            try:
                said = json.loads(await answer.read())
            except (aiohttp.ClientError, TimeoutError, ValueError) as wrong:
                problem = f"the prefill server {self.prefill} gave no whole answer: {type(wrong).__name__}: {wrong}"
                raise RefusedError(error(502, problem)) from None
        transfer = said.get("kv_transfer_params") if isinstance(said, dict) else None
        if not isinstance(transfer, dict):
            expected = 'expected a server with --kv-transfer-config \'{"kv_connector": "NixlConnector", ...}\''
            raise RefusedError(
                error(502, f"the prefill server {self.prefill} answered without kv_transfer_params, {expected}")
            )
        return transfer

    async def _require_prefill_server(self, request: Request) -> None:
        """Refuse a health check if the prefill server is not healthy."""
        assert self.prefill is not None
        answer = await self._send(request, self.prefill, "prefill", b"")
        if answer.status != 200:
            raise RefusedError(_streamed(answer))
        answer.release()

    async def _send(self, request: Request, server: str, name: str, body: bytes) -> aiohttp.ClientResponse:
        assert self.session is not None
        url = f"{server}{request.url.path}"
        if request.url.query:
            url += f"?{request.url.query}"
        # The proxy reads the prefill server's answer itself, so it must not be compressed.
        skipped = NOT_FORWARDED if server == self.decode else {*NOT_FORWARDED, "accept-encoding"}
        headers = [(name, value) for name, value in request.headers.items() if name.lower() not in skipped]
        try:
            return await self.session.request(request.method, url, data=body, headers=headers, allow_redirects=False)
        except (aiohttp.ClientError, TimeoutError) as wrong:
            problem = f"the {name} server {server} does not answer: {type(wrong).__name__}: {wrong}"
            raise RefusedError(error(502, problem)) from None


async def _while_connected(request: Request, work: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of ``work``. If the client disconnects, cancel it, which aborts the request at the server."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise RefusedError(error(499, "the client closed the connection"))
        return task.result()
    finally:
        gone.cancel()
        task.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _streamed(answer: aiohttp.ClientResponse) -> StreamingResponse:
    """Return a server's answer as a stream."""

    async def parts() -> AsyncIterator[bytes]:
        async with answer:  # closed when the client disconnects, which aborts the request at the server
            async for part in answer.content.iter_any():
                yield part

    streamed = StreamingResponse(parts(), answer.status)
    kept = [(name, value) for name, value in answer.headers.items() if name.lower() not in NOT_FORWARDED]
    streamed.raw_headers = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in kept]
    return streamed


def app_of(decode: str, prefill: str | None = None) -> Starlette:
    """Return the proxy for the decode server at ``decode`` and, if given, the prefill server at ``prefill``."""
    proxy = Proxy(decode, prefill)
    methods = ["GET", "HEAD", "POST"]
    return Starlette(routes=[Route("/{path:path}", proxy.forward, methods=methods)], lifespan=proxy.lifespan)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--decode", required=True, metavar="URL", help="the stock decode server: http://10.0.0.2:8200")
    parser.add_argument("--prefill", metavar="URL", help="the prefill server; leave it out to only add salts")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    parser.add_argument("--port", type=int, default=8201, help="port to listen on (8201)")
    options = parser.parse_args()
    for name, url in (("--decode", options.decode), ("--prefill", options.prefill)):
        if url is not None and not url.startswith(("http://", "https://")):
            parser.error(f"{name}: given {url!r}, expected http://HOST:PORT")
    app = app_of(options.decode, options.prefill)
    uvicorn.run(app, host=options.host, port=options.port, log_level="warning")


if __name__ == "__main__":
    main()
