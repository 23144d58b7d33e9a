# SPDX-License-Identifier: Apache-2.0
"""What is checked before a model loads: the configuration, its profile, and that some layer can go sparse at all."""

from vllm.config import VllmConfig

from vllm_sparse_backend.serving import compat
from vllm_sparse_backend.serving.engines import refuse_on_cpu
from vllm_sparse_backend.serving.refusals import refuse
from vllm_sparse_backend.serving.requests import choices, warn_of_stores
from vllm_sparse_backend.serving.worker import resolve
from vllm_sparse_backend.settings.errors import ConfigurationError
from vllm_sparse_backend.settings.model_shape import ModelShape
from vllm_sparse_backend.settings.modelcheck import layer_reasons
from vllm_sparse_backend.settings.reasons import Fallback, layer_fallback


def check(vllm_config: VllmConfig) -> None:
    """Raise ConfigurationError, one line, where the server could not do what was asked for.

    What was read from files goes on to the other processes in the configuration itself: they read none.
    """
    resolved = resolve(vllm_config, tp_size=vllm_config.parallel_config.tensor_parallel_size)
    refuse_on_cpu(resolved.config.engine)
    refuse(vllm_config, resolved)
    choices(vllm_config, resolved)
    hf_config, plan = compat.hf_config(vllm_config), resolved.plan
    shape = plan.shape
    # The shape knows older models' names for these.
    reasons = layer_reasons({**hf_config, "num_hidden_layers": shape.num_layers, "head_dim": shape.head_dim})
    everywhere = _server_reason(vllm_config, shape)
    if everywhere is not None:
        reasons = [everywhere] * shape.num_layers
    sparse = [i for i, reason in enumerate(reasons) if reason is None and plan.layer(i) is not None]
    if not sparse:
        raise ConfigurationError(no_layer_message({reason for reason in reasons if reason is not None}))
    warn_of_stores(vllm_config)
    vllm_config.additional_config = resolved.carry(vllm_config.additional_config)


def _server_reason(vllm_config: VllmConfig, shape: ModelShape) -> Fallback | None:
    """Why the server's own options keep every layer from going sparse, whatever the model."""
    cache = vllm_config.cache_config
    some_unquantised = bool(getattr(cache, "kv_cache_dtype_skip_layers", None))
    limits = compat.layer_limits(vllm_config, "auto" if some_unquantised else cache.cache_dtype)
    return layer_fallback(head_dim=shape.head_dim, **limits)


def no_layer_message(reasons: set[Fallback]) -> str:
    """Why a server that was asked to go sparse will not start."""
    why = "; ".join(f"{reason.value}: {reason.explain}" for reason in sorted(reasons)) or "all are in dense_layers"
    return f"--attention-backend sparse-prefill: no layer of this model can prefill sparsely ({why})"
