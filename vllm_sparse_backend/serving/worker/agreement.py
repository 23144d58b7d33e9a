# SPDX-License-Identifier: Apache-2.0
"""Compares the settings of all workers before the model loads.

A node started with ``--headless`` builds its own configuration. Workers that disagree would write keys and values that
the front process does not expect, or wait for each other in a collective that only some of them enter. All workers
therefore enter a single exchange first, whatever they decided.
"""

import json
from collections.abc import Mapping, Sequence

from vllm import envs
from vllm.config import VllmConfig

from vllm_sparse_backend.config.errors import ConfigurationError
from vllm_sparse_backend.config.keys import SETTINGS
from vllm_sparse_backend.config.resolved import Resolved
from vllm_sparse_backend.identity import PACKAGE, digest, package_version
from vllm_sparse_backend.serving import compat
from vllm_sparse_backend.serving.resolution import resolve
from vllm_sparse_backend.serving.streaming_startup import describe, warn_of_weights

TIMEOUT_S = 60.0
"""Seconds to wait for the other workers. vLLM has just connected them, so they arrive together."""

ERROR = "error"
"""Name under which a worker that cannot resolve its settings sends the reason instead of them."""


def agree(vllm_config: VllmConfig) -> None:
    """Refuse workers with other settings."""
    if vllm_config.parallel_config.enable_elastic_ep:
        return  # a worker that joins later has no peers here, and gets its configuration from the first process
    gathered = compat.gather_over_world(_settings_or_error(vllm_config), TIMEOUT_S)
    for rank, settings in enumerate(gathered):
        if settings.get(ERROR):
            raise ConfigurationError(f"sparse-prefill: rank {rank} cannot resolve its settings: {settings[ERROR]}")
    first, *others = gathered
    for rank, settings in enumerate(others, start=1):
        # Another version of this package may have other names.
        differing = [name for name in first | settings if settings.get(name) != first.get(name)]
        if differing:
            raise ConfigurationError(
                f"sparse-prefill: rank {rank} has {_shown(settings, differing)}, expected {_shown(first, differing)} "
                f"as rank 0; start all nodes with the same version and the same {SETTINGS}, and set min_tokens and "
                "min_query_tokens where their devices differ"
            )
    if not compat.is_first_rank(vllm_config):
        return
    if extension := vllm_config.parallel_config.worker_extension_cls:
        warn_of_weights(vllm_config, f"the worker extension {extension}")
    if vllm_config.weight_transfer_config is not None:
        warn_of_weights(vllm_config, "--weight-transfer-config")
    if envs.VLLM_SERVER_DEV_MODE:  # serves /collective_rpc
        warn_of_weights(vllm_config, "VLLM_SERVER_DEV_MODE (reload_weights)")


def _settings_or_error(vllm_config: VllmConfig) -> dict[str, str]:
    """Return this worker's settings as texts. It never raises, because the other workers wait for them."""
    try:
        return settings_of_worker(resolve(vllm_config, compat.tensor_parallel_rank()))
    except Exception as error:
        return {ERROR: describe(error)}


def settings_of_worker(resolved: Resolved) -> dict[str, str]:
    """Return all settings that must be the same on all workers, as texts."""
    config, carried = resolved.config, resolved.carried
    profile = "" if carried.profile is None else digest(carried.profile, 12)
    return {
        "version of this package": package_version(PACKAGE),
        "method": f"{carried.source} {json.dumps(config.params, sort_keys=True)} {profile}".rstrip(),
        "dense_layers": json.dumps(config.dense_layers),
        "engine": config.engine,
        "streaming_heads": f"{config.streaming_heads}, found: {bool(carried.finds_streaming_heads)}",
        "lengths": "; ".join(
            f"level {level} with engine {engine}: {lengths}"
            for level in resolved.plans
            for engine, lengths in resolved.lengths_by_engine(level).items()
        ),
    }


def _shown(settings: Mapping[str, str], names: Sequence[str]) -> str:
    return "; ".join(f"{name}: {settings.get(name, 'nothing')}" for name in names)
