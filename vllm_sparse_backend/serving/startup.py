# SPDX-License-Identifier: Apache-2.0
"""Checks before a model loads: the settings, the profile, vLLM's options, and that at least one layer can run sparse.

Some options of vLLM do not work with this backend or make it slow. The list comes from the sources of vLLM 0.30 to
0.33; docs/compatibility.md explains each option.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from vllm import envs
from vllm.config import VllmConfig

from vllm_sparse_backend.config.errors import ConfigurationError
from vllm_sparse_backend.config.fallback import Fallback
from vllm_sparse_backend.config.model_check import layer_reasons
from vllm_sparse_backend.identity import FLAG, RELEASES
from vllm_sparse_backend.serving import compat, streaming_startup
from vllm_sparse_backend.serving.level_policy import RUST_FRONTEND, level_policy, warn_of_stores
from vllm_sparse_backend.serving.resolution import carry_settings, resolve
from vllm_sparse_backend.serving.worker.engine_picker import refuse_on_cpu


def check(vllm_config: VllmConfig) -> None:
    """Validate vLLM's configuration before the model loads.

    This adds the texts of the named files, and the device for which ``auto`` is resolved, to the configuration. Other
    processes therefore read no file, and resolve the settings to the same values.
    """
    carry_settings(vllm_config)
    resolved = resolve(vllm_config)
    refuse_on_cpu(resolved.config.engine)
    refuse(FLAG, _reasons(vllm_config))
    streaming_startup.decide(vllm_config, resolved)
    level_policy(vllm_config)
    plan, cache = resolved.plan, vllm_config.cache_config
    # ``ModelShape`` also knows older models' names for these fields.
    usual = {"num_hidden_layers": plan.shape.num_layers, "head_dim": plan.shape.head_dim}
    # Layers that vLLM leaves out of quantisation can run sparse in any case.
    limits = compat.layer_limits(vllm_config, "auto" if cache.kv_cache_dtype_skip_layers else cache.cache_dtype)
    reasons = layer_reasons({**compat.hf_config(vllm_config), **usual}, **limits)
    if not any(reason is None and plan.layer(i) is not None for i, reason in enumerate(reasons)):
        raise ConfigurationError(no_layer_message(reasons))
    compat.capture_prefills(vllm_config)
    warn_of_stores(vllm_config)


def no_layer_message(layer_reasons: Iterable[Fallback | None]) -> str:
    """Format the error of a server whose layers all run dense."""
    reasons = sorted({reason for reason in layer_reasons if reason is not None})
    why = "; ".join(f"{reason.value}: {reason.explain}" for reason in reasons) or "all are in dense_layers"
    return f"--attention-backend sparse-prefill: no layer of this model can prefill sparsely ({why})"


def refuse(flag: str, problems: Iterator[str]) -> None:
    """Raise ConfigurationError for the first problem, if there is one."""
    problem = next(problems, None)
    if problem is not None:
        raise ConfigurationError(f"{flag}: {problem}")


def shared_refusals(vllm_config: VllmConfig) -> Iterator[str]:
    """List the models and options that neither the attention backend nor the prefill backend for MLA supports."""
    if envs.VLLM_BATCH_INVARIANT:
        yield (
            "VLLM_BATCH_INVARIANT is set, but the selected keys depend on how the scheduler cuts a prompt into chunks, "
            "and thus on other requests; unset it, or serve without this backend"
        )
    if envs.VLLM_USE_RUST_FRONTEND:
        yield (
            f"{RUST_FRONTEND} is set, but no part of this package runs in vLLM's front end in Rust, so nothing would "
            "check the levels of requests; unset it"
        )
    if vllm_config.model_config.runner_type == "pooling":
        yield (
            "the model is for pooling: its embeddings and scores are compared with stored values, and small errors go "
            "unnoticed; serve it without this backend"
        )


def _reasons(vllm_config: VllmConfig) -> Iterator[str]:
    """Yield options of vLLM that would make answers wrong, or whose guarantee this backend cannot give."""
    yield from shared_refusals(vllm_config)
    # It needs graphs for decodes of any length. Ours have drafts of a single length (compat.uniform_decode_graphs).
    if vllm_config.speculative_config is not None and vllm_config.speculative_config.enable_adaptive_verification:
        yield (
            "adaptive verification of drafts needs CUDA graphs for decodes of different lengths, which this backend "
            'does not capture; put "enable_adaptive_verification": false into --speculative-config'
        )
    if vllm_config.model_config.rswa_window is not None:
        yield (
            "the model attends within a reference sliding window (R-SWA), which needs prompt lengths that this backend "
            "does not pass on; serve it without this backend"
        )
    if vllm_config.model_config.is_mm_prefix_lm:
        yield (
            "parts of this model's prompts (its images) attend in both directions, which sparse prefill does not "
            "support; serve it without this backend"
        )


def other_decode(
    vllm_config: VllmConfig | None,
    head_dim: int,
    dtype: torch.dtype,
    kv_cache_dtype: Any = "auto",
    has_sink: bool = False,
) -> str | None:
    """Return why decodes and dense rows do not run as in stock vLLM on this device."""
    dense = compat.DenseBackend.get_name()
    stock = compat.stock_backend(vllm_config, head_dim, dtype, kv_cache_dtype, has_sink)
    if stock == dense:
        return None
    return (
        f"decodes and dense rows run on {dense}, but stock vLLM would decode on {stock} here, and no release from "
        f"{RELEASES} takes a decode backend of its own. Time per output token differs from stock's; this project has "
        "not measured the difference. Compare with `sparse-prefill bench serve`, or decode on stock servers "
        "(docs/disaggregated.md)"
    )
