# SPDX-License-Identifier: Apache-2.0
"""The settings of a process, parsed once from vLLM's configuration and handed to all that ask.

The front process reads the files that they name and looks up for which device ``auto`` stands for what; both travel on
in the configuration (``carry_settings``). So every process has the same settings, on whatever device it runs.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from vllm.config import VllmConfig

from vllm_sparse_backend.config.model_shape import ModelShape
from vllm_sparse_backend.config.resolved import Resolved, carried_device, with_carried
from vllm_sparse_backend.config.settings import SparsePrefillConfig, load_config
from vllm_sparse_backend.config.source_files import Documents
from vllm_sparse_backend.identity import LOGGER
from vllm_sparse_backend.serving import compat

logger = logging.getLogger(LOGGER)

PARSED = 32
"""Settings that a process keeps: those of its engines, each for the whole model and for its tensor-parallel rank."""


@dataclass(frozen=True)
class _Given:
    """vLLM's additional_config, compared by its text, as it is plain values."""

    text: str
    values: Mapping[str, Any] | None = field(compare=False, repr=False)

    @staticmethod
    def of(vllm_config: VllmConfig) -> "_Given":
        return _Given(repr(vllm_config.additional_config), vllm_config.additional_config)


def carry_settings(vllm_config: VllmConfig) -> None:
    """Have ``vllm_config`` carry all that other processes need to resolve the settings as this one does.

    Where it carries that already, nothing changes.

    Raises:
        ConfigurationError: The settings are wrong, or a file that they name cannot be read.
    """
    given = vllm_config.additional_config
    config = settings_of(vllm_config)
    documents = Documents.carried(given or {}, config) or Documents.read(config, compat.model_shape(vllm_config))
    vllm_config.additional_config = with_carried(given, documents, carried_device(given) or compat.device_name())


def settings_of(vllm_config: VllmConfig) -> SparsePrefillConfig:
    """The operator's settings in vLLM's configuration. Raises ConfigurationError that names every wrong field."""
    return _settings(_Given.of(vllm_config))


def resolve(vllm_config: VllmConfig, tp_rank: int = 0, tp_size: int = 1) -> Resolved:
    """The settings of a process, as plans of the model that is served.

    Args:
        vllm_config: vLLM's configuration of an engine that runs this backend.
        tp_rank: The rank whose heads the plans are for.
        tp_size: How many ranks share a layer's heads; 1 for plans of the whole model.

    Raises:
        ConfigurationError: The settings are wrong, or do not fit the model.
    """
    given, shape = _Given.of(vllm_config), compat.model_shape(vllm_config)
    device, pools = compat.device_name(), compat.pools(vllm_config)
    if carried_device(given.values) is None:  # files may change until they are carried
        return Resolved.of(given.values, shape, device, tp_rank, tp_size, pools)
    return _resolved(given, shape, device, tp_rank, tp_size, pools)


def log_other_device(resolved: Resolved, rank: int) -> None:
    """Log where a worker's device is another one than ``auto`` was looked up for. Its numbers are the server's."""
    device = compat.device_name()
    if resolved.uses_auto and resolved.device.casefold() != device.casefold():
        logger.warning(
            "sparse-prefill: rank %d runs on %s, but auto stands for what was measured on %s, on which the server "
            "started: all processes must agree from which lengths on rows go sparse. Set min_tokens and "
            "min_query_tokens to choose other numbers", rank, device, resolved.device,
        )  # fmt: skip


@lru_cache(PARSED)
def _settings(given: _Given) -> SparsePrefillConfig:
    return load_config(given.values)


@lru_cache(PARSED)
def _resolved(given: _Given, shape: ModelShape, device: str, tp_rank: int, tp_size: int, pools: bool) -> Resolved:
    return Resolved.of(given.values, shape, device, tp_rank, tp_size, pools)
