# SPDX-License-Identifier: Apache-2.0
"""The settings of a process, parsed once from vLLM's configuration.

The front process reads the files that the settings name, and the name of the device for which ``auto`` is resolved.
Both travel in the configuration (``carry_settings``), so all processes have the same settings on any device.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from vllm.config import VllmConfig

from vllm_sparse_backend.config.keys import STREAMING
from vllm_sparse_backend.config.model_shape import ModelShape
from vllm_sparse_backend.config.resolved import Resolved, carried_device, with_carried
from vllm_sparse_backend.config.settings import SparsePrefillConfig, load_config
from vllm_sparse_backend.config.source_files import Documents
from vllm_sparse_backend.identity import LOGGER
from vllm_sparse_backend.serving import compat

logger = logging.getLogger(LOGGER)

PARSED = 32
"""Number of cached results: a process resolves settings per engine, for the whole model and for its own rank."""


@dataclass(frozen=True)
class _AdditionalConfig:
    """vLLM's ``additional_config``, which consists of plain values, compared by its text."""

    text: str
    values: Mapping[str, Any] | None = field(compare=False, repr=False)

    @staticmethod
    def of(vllm_config: VllmConfig) -> "_AdditionalConfig":
        return _AdditionalConfig(repr(vllm_config.additional_config), vllm_config.additional_config)


def carry_settings(vllm_config: VllmConfig) -> None:
    """Add the data from which other processes resolve the same settings to the configuration, unless it is there."""
    values = vllm_config.additional_config
    config = settings_of(vllm_config)
    documents = Documents.carried(values) or Documents.read(config)
    vllm_config.additional_config = with_carried(values, documents, carried_device(values) or compat.device_name())


def carry_streaming(vllm_config: VllmConfig, finds_streaming_heads: bool) -> None:
    """Add to the configuration whether workers find streaming heads, so that all processes agree."""
    vllm_config.additional_config = {**(vllm_config.additional_config or {}), STREAMING: finds_streaming_heads}


def settings_of(vllm_config: VllmConfig) -> SparsePrefillConfig:
    """Return the operator's settings."""
    return _settings(_AdditionalConfig.of(vllm_config))


def resolve(vllm_config: VllmConfig, tp_rank: int = 0, tp_size: int = 1) -> Resolved:
    """Resolve the settings of a process for the served model."""
    additional_config, shape = _AdditionalConfig.of(vllm_config), compat.model_shape(vllm_config)
    weights, device = compat.layer_weights(vllm_config, shape), compat.device_name()
    if carried_device(additional_config.values) is None:  # not cached: a file may still change
        return Resolved.from_additional_config(additional_config.values, shape, weights, device, tp_rank, tp_size)
    return _resolved(additional_config, shape, weights, device, tp_rank, tp_size)


def log_other_device(resolved: Resolved, rank: int) -> None:
    """Warn if a worker's device differs from the device for which ``auto`` was resolved. The server's numbers apply."""
    device = compat.device_name()
    if resolved.uses_auto and resolved.device.casefold() != device.casefold():
        logger.warning(
            "sparse-prefill: rank %d runs on %s, but auto uses the measurements of %s, where the server started, "
            "because all processes need the same lengths. Set min_tokens and min_query_tokens to "
            "choose other numbers", rank, device, resolved.device,
        )  # fmt: skip


@lru_cache(PARSED)
def _settings(additional_config: _AdditionalConfig) -> SparsePrefillConfig:
    return load_config(additional_config.values)


@lru_cache(PARSED)
def _resolved(
    additional_config: _AdditionalConfig, shape: ModelShape, layer_weights: int | None, device: str, tp_rank: int,
    tp_size: int,
) -> Resolved:  # fmt: skip
    return Resolved.from_additional_config(additional_config.values, shape, layer_weights, device, tp_rank, tp_size)
