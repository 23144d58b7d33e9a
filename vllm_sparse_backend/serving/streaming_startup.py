# SPDX-License-Identifier: Apache-2.0
"""Decides, before a model loads, whether its server finds streaming heads. docs/streaming_heads.md lists the reasons.

By default, a server that cannot find them does without. If the operator sets ``streaming_heads``, it stops instead.
"""

import logging
from collections.abc import Iterator
from itertools import chain
from typing import Any

from vllm.config import VllmConfig

from vllm_sparse_backend.calibration.streaming_heads import PROMPT_TOKENS
from vllm_sparse_backend.config.resolved import Resolved, carried_streaming
from vllm_sparse_backend.config.settings import KEY, OPTION
from vllm_sparse_backend.identity import LOGGER
from vllm_sparse_backend.serving.level_policy import BY_BLOCK_HASH, kv_connectors

logger = logging.getLogger(LOGGER)

LEAVE_OUT = f"leave {OPTION} {KEY}.streaming_heads out"


def decide(vllm_config: VllmConfig, resolved: Resolved) -> bool:
    """Decide whether this server finds streaming heads. The first process decides for all."""
    decided = carried_streaming(vllm_config.additional_config)
    if decided is not None:
        return decided
    config = resolved.config
    if config.streaming_heads is None or config.not_for_streaming() is not None:
        return False
    if next(_always_dense(vllm_config, resolved), None) is not None:
        return False
    useless = next(_too_short(vllm_config, resolved), None)
    impossible = None if useless else next(_impossible(vllm_config), None)
    if impossible is not None:
        logger.info(
            "sparse-prefill: all heads score keys in long prompts: streaming heads are not found with %s", impossible
        )
    reason = useless or impossible
    if reason is not None:
        _warn_of_stores(vllm_config, reason)
    return reason is None


def _warn_of_stores(vllm_config: VllmConfig, reason: str) -> None:
    """Warn that servers with streaming heads do not share blocks with this server, which has none."""
    stores = kv_connectors(vllm_config) & BY_BLOCK_HASH
    if stores:
        logger.warning(
            "sparse-prefill: this server does not find streaming heads (%s), so in %s its blocks have other hashes "
            "than those of servers that find them. If such servers share the store, set %s %s.streaming_heads to null "
            "on all of them", reason, ", ".join(sorted(stores)), OPTION, KEY,
        )  # fmt: skip


def problems(vllm_config: VllmConfig, resolved: Resolved) -> Iterator[str]:
    """List why streaming heads, which the operator turned on, cannot be found here or would change nothing."""
    reasons = _too_short(vllm_config, resolved), _always_dense(vllm_config, resolved), _impossible(vllm_config)
    for reason in chain.from_iterable(reasons):
        yield f"streaming_heads: given with {reason}; {LEAVE_OUT}"


def _always_dense(vllm_config: VllmConfig, resolved: Resolved) -> Iterator[str]:
    """Yield why no row of this server runs sparse."""
    if resolved.is_dense:
        yield "a pooling model, every row of which prefills dense"
    max_len, exact_tokens = vllm_config.model_config.max_model_len, resolved.exact_tokens()
    if exact_tokens is None or exact_tokens >= max_len:
        limit = "no crossover" if exact_tokens is None else f"min_tokens {exact_tokens}"
        yield f"{limit} and --max-model-len {max_len}, so that every row prefills dense"


def _too_short(vllm_config: VllmConfig, resolved: Resolved) -> Iterator[str]:
    """Yield why the rows of this server are too short for streaming heads."""
    settings = resolved.config.streaming_heads
    assert settings is not None
    max_len = vllm_config.model_config.max_model_len
    needed = max(settings.min_context_tokens + 1, PROMPT_TOKENS)
    if max_len < needed:
        yield (
            f"--max-model-len {max_len}, expected at least {needed}: the heads are measured on {PROMPT_TOKENS} tokens, "
            f"and keep fewer keys after {settings.min_context_tokens} tokens of a request"
        )


def _impossible(vllm_config: VllmConfig) -> Iterator[str]:
    """Yield why streaming heads cannot be found in this server."""
    for is_given, what, why in _unsupported(vllm_config):
        if is_given:
            yield f"{what}: {why}"
    step_tokens = vllm_config.scheduler_config.max_num_batched_tokens
    if step_tokens < PROMPT_TOKENS:
        yield (
            f"--max-num-batched-tokens {step_tokens}, expected at least {PROMPT_TOKENS}, because the heads are "
            "measured in a single step"
        )


def _unsupported(vllm_config: VllmConfig) -> Iterator[tuple[bool, str, str]]:
    """Yield (whether it is given, the option or kind of model, why streaming heads cannot be found with it)."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    other_inputs = "the heads are measured on a prompt of text tokens only"
    yield _flag(model, "is_multimodal_model"), "a multimodal model", other_inputs
    yield _flag(model, "enable_prompt_embeds"), "--enable-prompt-embeds", other_inputs
    yield _flag(model, "uses_mrope"), "a model with M-RoPE", other_inputs
    other_layers = "the heads are measured in a run without a cache, in which only plain attention works"
    yield _flag(model, "is_hybrid"), "a hybrid model", other_layers
    yield _flag(model, "is_encoder_decoder"), "an encoder-decoder model", other_layers
    has_dynamic_scales = _flag(vllm_config.cache_config, "calculate_kv_scales")
    yield has_dynamic_scales, "--calculate-kv-scales", "the measurement's prompt would set the scales"
    yield getattr(vllm_config, "lora_config", None) is not None, "--enable-lora", "adapters can change what heads do"
    replaces_weights = getattr(vllm_config, "weight_transfer_config", None) is not None
    yield replaces_weights, "--weight-transfer-config", "weights that arrive later can change what heads do"
    yield _flag(model, "skip_tokenizer_init"), "--skip-tokenizer-init", "the measurement needs a prompt"
    passes = getattr(getattr(vllm_config, "compilation_config", None), "pass_config", None)
    splits_tokens = _flag(passes, "enable_sp") or _flag(passes, "fuse_gemm_comms")
    stages = getattr(parallel, "pipeline_parallel_size", 1)
    yield (
        stages > 1 and splits_tokens,
        f"--pipeline-parallel-size {stages} and sequence parallelism",
        "each rank of a stage passes only a part of the tokens on",
    )
    engines = getattr(parallel, "data_parallel_size", 1)
    in_lockstep = engines > 1 and getattr(parallel, "is_moe_model", None) is not False
    yield in_lockstep, f"--data-parallel-size {engines} and experts", "engines would have to run the model together"
    yield (
        _flag(parallel, "enable_elastic_ep"),
        "--enable-elastic-ep",
        "a worker that joins later does not measure heads",
    )


def _flag(part: Any, name: str) -> bool:
    """Return whether a flag of vLLM's configuration is set; False if this version does not have it."""
    return bool(getattr(part, name, False))
