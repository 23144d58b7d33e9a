# SPDX-License-Identifier: Apache-2.0
"""The endpoint plugin of vLLM that adds our middleware to an API server's app."""

from argparse import Namespace
from typing import Any

from vllm_sparse_backend.serving.frontend.metrics_endpoint import EnginePolls
from vllm_sparse_backend.serving.frontend.middleware import SparsePrefillMiddleware
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
