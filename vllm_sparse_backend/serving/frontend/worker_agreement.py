# SPDX-License-Identifier: Apache-2.0
"""A start-up check that all workers and the front process agree on the lengths from which rows run sparse.

The front process salts cached blocks by these lengths. Workers that get their configuration from it agree with it on
any device. A node started with ``--headless`` builds its own configuration. If its settings, table or device differ,
blocks that all levels share would contain sparse keys and values. The server therefore compares all workers' lengths
with its own before it serves requests.
"""

import logging
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

from vllm_sparse_backend.config.errors import ConfigurationError
from vllm_sparse_backend.config.metrics import AGREEMENT_METHOD
from vllm_sparse_backend.config.resolved import Numbers
from vllm_sparse_backend.identity import LOGGER
from vllm_sparse_backend.serving import compat
from vllm_sparse_backend.serving.frontend.engine_rpc import call_engines
from vllm_sparse_backend.serving.registration import is_selected
from vllm_sparse_backend.serving.resolution import resolve

logger = logging.getLogger(LOGGER)

TIMEOUT_S = 60.0
"""Seconds to wait for the workers."""


def worker_numbers(worker: Any) -> dict[str, Any]:
    """Answer ``AGREEMENT_METHOD`` in a worker."""
    resolved = resolve(worker.vllm_config, *compat.tensor_parallel(worker.vllm_config))
    return {"rank": worker.rank, "device": compat.device_name(), "numbers": resolved.numbers()}


def refuse_disagreement(expected: Numbers, answers: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Compare the front process's numbers with those of all workers."""
    for engine, workers in answers.items():
        for worker in workers:
            reported: Numbers = worker["numbers"]
            if reported != expected:
                raise ConfigurationError(
                    f"sparse-prefill: engine {engine}, rank {worker['rank']}, on {worker['device']}: rows run sparse "
                    f"from {_differing(reported, expected)} (min_tokens, min_query_tokens by level and engine), "
                    f"expected {_differing(expected, reported)} as in the server's front process; start all nodes "
                    "with the same settings and the same version, and set min_tokens and min_query_tokens where their "
                    "devices differ"
                )


def _differing(numbers: Numbers, others: Numbers) -> str:
    """Format the part of ``numbers`` that differs from ``others``."""
    parts = [
        f"{level}.{engine}: {tuple(counts)}"
        for level, by_engine in numbers.items()
        for engine, counts in by_engine.items()
        if others.get(level, {}).get(engine) != counts
    ]
    return ", ".join(parts) or "nothing else"


class AgreementEndpoint:
    """vLLM endpoint plugin that compares the workers' lengths; each app of a server process has an instance."""

    name = "sparse_prefill_agreement"
    required_tasks = None

    def attach_router(self, app: Any) -> None:
        """Leave the app unchanged: this plugin has no route."""

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Compare all workers' lengths before the server answers any request."""
        config = getattr(engine_client, "vllm_config", None)
        if config is None or not is_selected(config.attention_config) or not hasattr(engine_client, "engine_core"):
            return
        answers, failed = await call_engines(engine_client, AGREEMENT_METHOD, timeout_s=TIMEOUT_S)
        for engine, why in failed.items():
            logger.warning(
                "sparse-prefill: engine %s: cannot check that its workers use this process's min_tokens and "
                "min_query_tokens: %s", engine, why,
            )  # fmt: skip
        refuse_disagreement(resolve(config).numbers(), answers)
