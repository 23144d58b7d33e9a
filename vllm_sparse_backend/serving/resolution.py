# SPDX-License-Identifier: Apache-2.0
"""The settings of a process, parsed once from vLLM's configuration."""

import json
from dataclasses import replace
from functools import lru_cache

from vllm.config import VllmConfig

from vllm_sparse_backend.config.carried import Carried
from vllm_sparse_backend.config.layer_weights import layer_weights_if_known
from vllm_sparse_backend.config.model_shape import ModelShape
from vllm_sparse_backend.config.resolved import Resolved
from vllm_sparse_backend.config.settings import SparsePrefillConfig, load_config
from vllm_sparse_backend.serving import compat


def carry_settings(vllm_config: VllmConfig) -> None:
    """Add the data from which other processes resolve the same settings to the configuration, unless it is there."""
    values = vllm_config.additional_config
    if Carried.of(values) is None:
        vllm_config.additional_config = Carried.read(settings_of(vllm_config), compat.device_name()).into(values)


def carry_streaming(vllm_config: VllmConfig, finds_streaming_heads: bool) -> None:
    """Add to the configuration whether workers find streaming heads, so that all processes agree."""
    carried = Carried.of(vllm_config.additional_config)
    assert carried is not None
    carried = replace(carried, finds_streaming_heads=finds_streaming_heads)
    vllm_config.additional_config = carried.into(vllm_config.additional_config)


def settings_of(vllm_config: VllmConfig) -> SparsePrefillConfig:
    """Return the operator's settings."""
    return load_config(vllm_config.additional_config)


def resolve(vllm_config: VllmConfig, tp_rank: int | None = None) -> Resolved:
    """Resolve the settings for the served model, or for the heads of one tensor-parallel rank."""
    config = compat.hf_config(vllm_config)
    shape = ModelShape.from_config(config, vllm_config.model_config.model)
    weights = layer_weights_if_known(config, shape)
    rank_of = (0, 1) if tp_rank is None else (tp_rank, vllm_config.parallel_config.tensor_parallel_size)
    # A text, because results are cached by it. Other plugins' values may be objects.
    additional_config = json.dumps(vllm_config.additional_config, default=repr)
    return _resolved(additional_config, shape, weights, compat.device_name(), *rank_of)


@lru_cache(32)  # a process resolves settings per engine, for the whole model and for its own rank
def _resolved(
    additional_config: str, shape: ModelShape, layer_weights: int | None, device: str, tp_rank: int, tp_size: int
) -> Resolved:
    values = json.loads(additional_config)
    return Resolved.from_additional_config(values, shape, layer_weights, device, tp_rank, tp_size)
