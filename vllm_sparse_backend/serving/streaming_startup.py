# SPDX-License-Identifier: Apache-2.0
"""Checks before a model with ``streaming_heads`` loads. docs/streaming_heads.md lists them."""

from collections.abc import Iterator
from typing import Any

from vllm.config import VllmConfig

from vllm_sparse_backend.calibration.streaming_heads import PROMPT_TOKENS
from vllm_sparse_backend.config.resolved import Resolved
from vllm_sparse_backend.config.settings import KEY, OPTION

LEAVE_OUT = f"leave {OPTION} {KEY}.streaming_heads out"


def problems(vllm_config: VllmConfig, resolved: Resolved) -> Iterator[str]:
    """List why streaming heads cannot be found in this server, or would change nothing.

    Args:
        vllm_config: vLLM's configuration.
        resolved: The settings, which turn streaming heads on.

    Yields:
        What was given, what is expected, and what to do.
    """
    if resolved.is_dense:
        yield f"streaming_heads: given, but every row of this pooling model prefills dense; {LEAVE_OUT}"
    for is_given, what, why in _unsupported(vllm_config):
        if is_given:
            yield f"streaming_heads: given with {what}: {why}; {LEAVE_OUT}"
    yield from _length_problems(vllm_config, resolved)


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
    yield has_dynamic_scales, "--calculate-kv-scales", "the scales would be those of the prompt for the measurement"
    yield getattr(vllm_config, "lora_config", None) is not None, "--enable-lora", "adapters can change what heads do"
    yield _flag(model, "skip_tokenizer_init"), "--skip-tokenizer-init", "the measurement needs a prompt"
    stages = getattr(parallel, "pipeline_parallel_size", 1)
    yield stages > 1, f"--pipeline-parallel-size {stages}", "only the first stage gets the prompt's tokens"
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


def _length_problems(vllm_config: VllmConfig, resolved: Resolved) -> Iterator[str]:
    settings = resolved.config.streaming_heads
    assert settings is not None
    step_tokens = vllm_config.scheduler_config.max_num_batched_tokens
    if step_tokens < PROMPT_TOKENS:
        yield (
            f"streaming_heads: given with --max-num-batched-tokens {step_tokens}, expected at least {PROMPT_TOKENS}, "
            f"because the heads are measured in a single step; raise it, or {LEAVE_OUT}"
        )
    max_len = vllm_config.model_config.max_model_len
    needed = max(settings.min_context_tokens + 1, PROMPT_TOKENS)
    if max_len < needed:
        yield (
            f"streaming_heads: given with --max-model-len {max_len}, expected at least {needed}: the heads are "
            f"measured on {PROMPT_TOKENS} tokens, and keep fewer keys after {settings.min_context_tokens} tokens of a "
            f"request; raise it, lower min_context_tokens, or {LEAVE_OUT}"
        )
