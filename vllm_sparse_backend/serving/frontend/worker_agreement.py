# SPDX-License-Identifier: Apache-2.0
"""Whether a server's workers go sparse from the lengths on that its front process tells requests' blocks apart by.

Workers that get their configuration from the front process do, on whatever device. A node that is started with
``--headless`` builds a configuration of its own: where it finds other settings, another table or another device, blocks
that all levels share would hold sparse keys and values. So the server asks, and does not start where they differ.
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
from vllm_sparse_backend.serving.registration import is_ours
from vllm_sparse_backend.serving.resolution import resolve

logger = logging.getLogger(LOGGER)

TIMEOUT_S = 60.0


def worker_numbers(worker: Any) -> dict[str, Any]:
    """A worker's answer to ``AGREEMENT_METHOD``: its rank and device, and the numbers that it resolved."""
    resolved = resolve(worker.vllm_config, *compat.tensor_parallel(worker.vllm_config))
    return {"rank": worker.rank, "device": compat.device_name(), "numbers": resolved.numbers()}


def refuse_disagreement(ours: Numbers, answers: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Compare the front process's numbers with those of all workers.

    Args:
        ours: What the front process resolved.
        answers: By engine, ``worker_numbers`` of each of its workers.

    Raises:
        ConfigurationError: A worker has other numbers.
    """
    for engine, workers in answers.items():
        for worker in workers:
            theirs: Numbers = worker["numbers"]
            if theirs != ours:
                raise ConfigurationError(
                    f"sparse-prefill: engine {engine}, rank {worker['rank']}, on {worker['device']}: rows go sparse "
                    f"from {_differing(theirs, ours)} (min_tokens, min_query_tokens by level and engine), expected "
                    f"{_differing(ours, theirs)} as in the server's front process; start all nodes with the same "
                    "settings and the same version, and set min_tokens and min_query_tokens where their devices differ"
                )


def _differing(numbers: Numbers, others: Numbers) -> str:
    """What of ``numbers`` is otherwise in ``others``."""
    parts = [
        f"{level}.{engine}: {tuple(counts)}"
        for level, by_engine in numbers.items()
        for engine, counts in by_engine.items()
        if others.get(level, {}).get(engine) != counts
    ]
    return ", ".join(parts) or "nothing else"


class AgreementEndpoint:
    """An endpoint plugin as vLLM defines it, of each app that a server process builds. It adds no route."""

    name = "sparse_prefill_agreement"
    required_tasks = None

    def attach_router(self, app: Any) -> None:
        """Leave the app as it is."""

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Ask all workers before the server answers any request. Raises ConfigurationError where one disagrees."""
        config = getattr(engine_client, "vllm_config", None)
        if config is None or not is_ours(config.attention_config.backend) or not hasattr(engine_client, "engine_core"):
            return
        answers, failed = await call_engines(engine_client, AGREEMENT_METHOD, timeout_s=TIMEOUT_S)
        for engine, why in failed.items():
            logger.warning(
                "sparse-prefill: engine %s: cannot tell whether its workers agree with this process from which lengths "
                "on rows go sparse: %s", engine, why,
            )  # fmt: skip
        refuse_disagreement(resolve(config).numbers(), answers)
