# SPDX-License-Identifier: Apache-2.0
"""Servers to which tests send requests of any kind."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_sparse_backend.evaluation import vllm_server
from vllm_sparse_backend.evaluation.client import RequestError, connected
from vllm_sparse_backend.evaluation.vllm_server import ServerError


class Server(vllm_server.Server):
    """The server of `eval` and `bench` that also sends requests, and can keep its log after it has stopped."""

    def __init__(self, *args: Any, log_path: Path | None = None, **more: Any) -> None:
        super().__init__(*args, **more)
        self.log_path = log_path or self.log_path

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def get(self, path: str, *, timeout_s: float = 60) -> str:
        with connected(self.url, timeout_s) as send:
            return send(path).read().decode()

    def post(self, path: str, body: Mapping[str, Any], *, timeout_s: float = 600) -> dict[str, Any]:
        """POST ``body`` as JSON. An answer other than 2xx raises ``ServerError`` with the server's message."""
        answer: dict[str, Any] = json.loads(self.post_text(path, body, timeout_s=timeout_s))
        return answer

    def post_text(self, path: str, body: Mapping[str, Any], *, timeout_s: float = 600) -> str:
        """POST ``body`` as JSON, and return the raw answer, which may be a stream."""
        try:
            with connected(self.url, timeout_s) as send:
                return send(path, body).read().decode()
        except RequestError as error:
            log = "" if error.status and error.status < 500 else f"\n{self._end_of_log()}"
            raise ServerError(f"POST {path}: {error}{log}") from error
