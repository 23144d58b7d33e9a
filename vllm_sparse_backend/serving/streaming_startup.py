# SPDX-License-Identifier: Apache-2.0
"""Decides, before a model loads, whether its server finds streaming heads. docs/streaming_heads.md lists the reasons.

By default, a server that cannot find them does without. If the operator sets ``streaming_heads``, it stops instead.
"""

import logging
from collections.abc import Iterator

from vllm.config import VllmConfig
from vllm.logger import init_logger

from vllm_sparse_backend.config.carried import finds_streaming_heads
from vllm_sparse_backend.config.errors import ConfigurationError
from vllm_sparse_backend.config.keys import SETTINGS
from vllm_sparse_backend.config.resolved import Resolved
from vllm_sparse_backend.identity import LOGGER
from vllm_sparse_backend.serving import compat
from vllm_sparse_backend.serving.level_policy import SALTED_STORES, kv_connectors
from vllm_sparse_backend.serving.resolution import carry_streaming, resolve, settings_of
from vllm_sparse_backend.streaming_heads import PROMPT_TOKENS

logger = init_logger(LOGGER)


def decide(vllm_config: VllmConfig, resolved: Resolved) -> None:
    """Add to the configuration whether this server finds streaming heads. The first process decides for all."""
    config = resolved.config
    if resolved.carried.finds_streaming_heads is not None:
        return
    replaces_scores = config.streaming_heads is not False and config.not_for_streaming() is None
    carry_streaming(vllm_config, replaces_scores)
    if not replaces_scores:
        return
    try:
        useless = next(_useless(vllm_config, resolved), None)
        reason = useless or next(_impossible(vllm_config), None)
    except Exception as error:  # a later release of vLLM may name its fields differently
        do_without(vllm_config, describe(error))
        return
    if reason is not None:
        do_without(vllm_config, f"given with {reason}", logging.DEBUG if useless else logging.INFO)


def do_without(vllm_config: VllmConfig, problem: str, level: int = logging.WARNING) -> None:
    """Leave this process without streaming heads. Raises ConfigurationError if the operator set them."""
    if settings_of(vllm_config).streaming_heads is True:
        raise ConfigurationError(f"{SETTINGS}.streaming_heads: {problem}; leave streaming_heads out")
    carry_streaming(vllm_config, False)
    logger.log(level, "sparse-prefill: all heads score keys: %s", problem)


def describe(error: Exception) -> str:
    """Format an error as one line."""
    first_line, _, _ = str(error).partition("\n")
    return f"{type(error).__name__}: {first_line}"


def _useless(vllm_config: VllmConfig, resolved: Resolved) -> Iterator[str]:
    """Yield why streaming heads would change nothing in this server."""
    max_len = vllm_config.model_config.max_model_len
    if max_len < PROMPT_TOKENS:
        yield f"--max-model-len {max_len}, expected at least {PROMPT_TOKENS}, on which the heads are measured"
    lengths = resolved.earliest_lengths()
    if lengths.min_tokens >= max_len:
        yield f"--max-model-len {max_len} and sparse prefill for {lengths}, so that every row prefills dense"


def _impossible(vllm_config: VllmConfig) -> Iterator[str]:
    """Yield why streaming heads cannot be found in this server."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    engines, stages = parallel.data_parallel_size, parallel.pipeline_parallel_size
    step_tokens = vllm_config.scheduler_config.max_num_batched_tokens
    checks = (
        (
            model.is_encoder_decoder,
            "an encoder-decoder model: the heads are measured on a prompt without an encoder's input",
        ),
        (
            compat.calculates_scales(vllm_config),
            "--calculate-kv-scales: the measurement's prompt would set the scales",
        ),
        (vllm_config.lora_config is not None, "--enable-lora: adapters can change what heads do"),
        (
            vllm_config.weight_transfer_config is not None,
            "--weight-transfer-config: weights that arrive later can change what heads do",
        ),
        (model.skip_tokenizer_init, "--skip-tokenizer-init: the measurement needs a prompt"),
        (
            engines > 1 and parallel.is_moe_model,
            f"--data-parallel-size {engines} and experts: engines would have to run the model together",
        ),
        (
            stages > 1 and compat.splits_tokens(vllm_config),
            f"--pipeline-parallel-size {stages} and sequence parallelism: each rank of a stage passes only a part of "
            "the tokens on",
        ),
        (parallel.enable_elastic_ep, "--enable-elastic-ep: a worker that joins later does not measure heads"),
        (
            model.is_multimodal_model and settings_of(vllm_config).streaming_heads is not True,
            "a multimodal model: finding heads was not tried on a real one; set streaming_heads to true to find them",
        ),
        (
            step_tokens < PROMPT_TOKENS,
            f"--max-num-batched-tokens {step_tokens}, expected at least {PROMPT_TOKENS}, because the heads are "
            "measured in a single step",
        ),
    )
    yield from (reason for applies, reason in checks if applies)


def shares_blocks(vllm_config: VllmConfig) -> bool:
    """Return whether other servers may read blocks that this server's streaming heads wrote."""
    return finds_streaming_heads(vllm_config.additional_config) and bool(kv_connectors(vllm_config) & SALTED_STORES)


def warn_of_weights(vllm_config: VllmConfig, source: str) -> None:
    """Warn, once, that a worker's weights may no longer be those on which heads were measured."""
    resolved = resolve(vllm_config)
    if not resolved.carried.finds_streaming_heads and resolved.carried.profile is None:
        return
    logger.warning_once(
        "sparse-prefill: %s can replace the model's weights, but streaming heads and profiles were measured on earlier "
        "weights, and stay as they are; restart the server to find streaming heads again", source,
    )  # fmt: skip
