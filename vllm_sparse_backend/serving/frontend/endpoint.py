# SPDX-License-Identifier: Apache-2.0
"""The endpoint plugin of vLLM that adds our middleware to an API server's app."""

from argparse import Namespace
from typing import Any

from vllm_sparse_backend.serving.frontend.metrics_endpoint import EnginePolls, poll_for_page
from vllm_sparse_backend.serving.frontend.middleware import inspect
from vllm_sparse_backend.serving.registration import is_selected


class SparsePrefillEndpoint:
    """Each app of a server process has an instance."""

    name = "sparse_prefill"
    required_tasks = None
    polls: EnginePolls | None = None
    """None if the server does not run this backend: its requests and pages then pass unchanged."""

    def attach_router(self, app: Any) -> None:
        app.add_middleware(SparsePrefillMiddleware, endpoint=self)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Turn the middleware on if the server runs this backend."""
        config = getattr(engine_client, "vllm_config", None)
        if config is not None and is_selected(config.attention_config):
            self.polls = EnginePolls(engine_client, config.model_config.served_model_name)


class SparsePrefillMiddleware:
    """ASGI middleware that polls the engines before a GET /metrics, and refuses levels that vLLM would drop.

    It runs inside vLLM's own middleware, which has already checked the API key.
    """

    def __init__(self, app: Any, endpoint: SparsePrefillEndpoint) -> None:
        self.app = app
        self.endpoint = endpoint

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        polls = self.endpoint.polls
        if polls is not None and scope["type"] == "http":
            path = scope["path"].removeprefix(scope.get("root_path", "")).rstrip("/")  # below the app's mount point
            if path == "/metrics":
                await poll_for_page(polls, scope)
            elif scope["method"] == "POST":
                receive = inspect(path, scope, receive)
        await self.app(scope, receive, send)
