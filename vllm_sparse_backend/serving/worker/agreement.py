# SPDX-License-Identifier: Apache-2.0
"""Compares the settings of all workers before the model loads.

A node started with ``--headless`` builds its own configuration. Workers that disagree would write keys and values that
the front process does not expect, or wait for each other in a collective that only some of them enter. All workers
therefore enter a single exchange first, whatever they decided.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from itertools import chain

from vllm import envs
from vllm.config import VllmConfig

from vllm_sparse_backend.config.errors import ConfigurationError
from vllm_sparse_backend.config.keys import KEY, OPTION
from vllm_sparse_backend.config.resolved import Resolved
from vllm_sparse_backend.identity import PACKAGE, package_version
from vllm_sparse_backend.serving import compat
from vllm_sparse_backend.serving.resolution import resolve
from vllm_sparse_backend.serving.streaming_startup import describe, warn_of_weights

TIMEOUT_S = 60.0
"""Seconds to wait for the other workers. vLLM has just connected them, so they arrive together."""

ERROR = "error"
"""Key of an answer: why this worker cannot resolve its settings; empty if it can."""

Answer = Mapping[str, str]
"""What a worker tells the others, by name. Other versions of this package may have other names."""


def agree(vllm_config: VllmConfig) -> None:
    """Refuse workers with other settings."""
    if getattr(vllm_config.parallel_config, "enable_elastic_ep", False):
        return  # a worker that joins later has no peers here, and gets its configuration from the first process
    answers = compat.gather_over_world(_answer(vllm_config), TIMEOUT_S)
    _refuse_disagreement(answers)
    if not compat.is_first_rank(vllm_config):
        return
    if extension := getattr(vllm_config.parallel_config, "worker_extension_cls", ""):
        warn_of_weights(vllm_config, f"the worker extension {extension}")
    if getattr(vllm_config, "weight_transfer_config", None) is not None:
        warn_of_weights(vllm_config, "--weight-transfer-config")
    if envs.VLLM_SERVER_DEV_MODE:  # serves /collective_rpc
        warn_of_weights(vllm_config, "VLLM_SERVER_DEV_MODE (reload_weights)")


def _answer(vllm_config: VllmConfig) -> Answer:
    """Return this worker's settings as texts. It never raises, because the other workers wait for the answer."""
    try:
        resolved = resolve(vllm_config, *compat.tensor_parallel(vllm_config))
        return {ERROR: "", **settings_of_worker(resolved)}
    except Exception as error:
        return {ERROR: describe(error)}


def settings_of_worker(resolved: Resolved) -> dict[str, str]:
    """Return all settings that must be the same on all workers."""
    config, carried, streaming = resolved.config, resolved.carried, resolved.streaming_heads
    profile = "" if carried.profile is None else hashlib.sha256(carried.profile.encode()).hexdigest()[:12]
    after = "off" if streaming is None else f"after {streaming.min_context_tokens} tokens"
    lengths = {
        f"lengths of level {level} with engine {engine}": str(lengths_on_engine)
        for level in resolved.plans
        for engine, lengths_on_engine in resolved.lengths_by_engine(level).items()
    }
    return {
        "version of this package": package_version(PACKAGE),
        "method": f"{carried.source} {json.dumps(config.params, sort_keys=True)} {profile}".rstrip(),
        "dense_layers": json.dumps(config.dense_layers),
        "engine": config.engine,
        "streaming_heads": after + (", set by the operator" if config.requires_streaming_heads else ""),
        **lengths,
    }


def _refuse_disagreement(answers: Sequence[Answer]) -> None:
    for rank, answer in enumerate(answers):
        if answer.get(ERROR):
            raise ConfigurationError(f"sparse-prefill: rank {rank} cannot resolve its settings: {answer[ERROR]}")
    first = answers[0]
    for rank, answer in enumerate(answers):
        names = dict.fromkeys(chain(first, answer))
        differing = [name for name in names if answer.get(name) != first.get(name)]
        if differing:
            raise ConfigurationError(
                f"sparse-prefill: rank {rank} has {_shown(answer, differing)}, expected {_shown(first, differing)} as "
                f"rank 0; start all nodes with the same version and the same {OPTION} {KEY}, and set min_tokens and "
                "min_query_tokens where their devices differ"
            )


def _shown(answer: Answer, names: Sequence[str]) -> str:
    return "; ".join(f"{name}: {answer.get(name, 'nothing')}" for name in names)
