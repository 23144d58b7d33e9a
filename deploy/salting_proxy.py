# SPDX-License-Identifier: Apache-2.0
"""salting_proxy.py --decode URL [--host ADDRESS] [--port PORT]: gives requests to a stock decode server a cache salt.

A stock vLLM server that decodes for sparse prefill servers does not know levels: its prefix cache may give an exact
request the blocks that a sparse request left. Put this proxy before such a server, and let the disaggregation proxy
send decode requests here. It sets ``cache_salt`` by the level in ``vllm_xargs``, so that requests of different levels
share no cached blocks. A salt that the client sends becomes part of it.

It needs what vLLM itself installs: aiohttp, starlette and uvicorn.
"""

import argparse
import json
from collections.abc import AsyncIterator, Mapping
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
"""Paths whose bodies have a field ``cache_salt``. Others that are posted to are refused."""

NOT_FORWARDED = {
    "host", "content-length", "transfer-encoding", "connection", "keep-alive", "upgrade", "te", "trailer",
    "proxy-authenticate", "proxy-authorization", "expect",
}  # fmt: skip
"""Headers that belong to one connection, or are made anew."""


def level_of(body: Mapping[str, Any]) -> str:
    """The level that a body asks for, one name for all ways to write it.

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
    if level is None:  # what such requests get may depend on the model that they name (the policy of requests)
        return f"default of {body.get('model')}"
    if isinstance(level, (bool, int, float)) and level in (0, 1):
        return ON if level else EXACT
    return level if isinstance(level, str) else json.dumps(level)


def salted(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body with a ``cache_salt`` that holds the level, and the salt that it had.

    Raises:
        ValueError: its ``vllm_xargs`` or its ``cache_salt`` is of another type than vLLM's.
    """
    salt = body.get("cache_salt")
    if salt is not None and not isinstance(salt, str):
        raise ValueError(f"cache_salt: given {type(salt).__name__}, expected a string")
    # As JSON no two pairs of level and salt are written alike.
    return {**body, "cache_salt": json.dumps([FIELD, level_of(body), salt])}


def error(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": {"message": f"salting proxy: {message}", "code": status}}, status)


class Proxy:
    """Forwards requests to one decode server."""

    def __init__(self, decode: str) -> None:
        self.decode = decode.rstrip("/")
        self.session: aiohttp.ClientSession | None = None

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        timeout = aiohttp.ClientTimeout(total=None, connect=10)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector, auto_decompress=False) as self.session:
            yield

    async def forward(self, request: Request) -> Response:
        body = await request.body()
        if request.method == "POST":
            path = request.url.path
            if path not in SALTED:
                known = ", ".join(sorted(SALTED))
                what_to_do = "send others to a decode server without prefix caching"
                return error(501, f"POST {path} has no cache_salt, expected one of {known}; {what_to_do}")
            try:
                fields = json.loads(body)
                if not isinstance(fields, dict):
                    raise ValueError("given no JSON object")
                body = json.dumps(salted(fields)).encode()
            except (ValueError, RecursionError) as wrong:
                return error(400, f"the body of POST {path}: {wrong}")
        return await self._send(request, body)

    async def _send(self, request: Request, body: bytes) -> Response:
        assert self.session is not None
        url = f"{self.decode}{request.url.path}"
        if request.url.query:
            url += f"?{request.url.query}"
        headers = [(name, value) for name, value in request.headers.items() if name.lower() not in NOT_FORWARDED]
        try:
            answer = await self.session.request(request.method, url, data=body, headers=headers, allow_redirects=False)
        except (aiohttp.ClientError, TimeoutError) as wrong:
            return error(502, f"the decode server {self.decode} does not answer: {type(wrong).__name__}: {wrong}")

        async def parts() -> AsyncIterator[bytes]:
            async with answer:  # closed, and so aborted there, when the client goes
                async for part in answer.content.iter_any():
                    yield part

        streamed = StreamingResponse(parts(), answer.status)
        kept = [(name, value) for name, value in answer.headers.items() if name.lower() not in NOT_FORWARDED]
        streamed.raw_headers = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in kept]
        return streamed


def app_of(decode: str) -> Starlette:
    """The proxy before the decode server at the URL ``decode``, as an ASGI app."""
    proxy = Proxy(decode)
    methods = ["GET", "HEAD", "POST"]
    return Starlette(routes=[Route("/{path:path}", proxy.forward, methods=methods)], lifespan=proxy.lifespan)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--decode", required=True, metavar="URL", help="the stock decode server: http://10.0.0.2:8200")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    parser.add_argument("--port", type=int, default=8201, help="port to listen on (8201)")
    options = parser.parse_args()
    if not options.decode.startswith(("http://", "https://")):
        parser.error(f"--decode: given {options.decode!r}, expected http://HOST:PORT")
    uvicorn.run(app_of(options.decode), host=options.host, port=options.port, log_level="warning")


if __name__ == "__main__":
    main()
