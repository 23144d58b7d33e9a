# SPDX-License-Identifier: Apache-2.0
"""A worker's log at start-up: dense layers, the plan of each level, and settings under which no row runs sparse.

docs/operations.md explains each line.
"""

from collections.abc import Mapping

from vllm.config import VllmConfig

from vllm_sparse_backend.config.crossover_table import AUTO, NEVER, Lengths
from vllm_sparse_backend.config.fallback import Fallback
from vllm_sparse_backend.config.profile import ON, SHARE
from vllm_sparse_backend.config.ranges import MOST_COUNT, format_ranges
from vllm_sparse_backend.config.request_levels import FIELD
from vllm_sparse_backend.config.resolved import Resolved
from vllm_sparse_backend.identity import logger
from vllm_sparse_backend.serving import compat
from vllm_sparse_backend.serving.level_policy import level_policy
from vllm_sparse_kernels.rows import round_up


def log_dense_layers(reasons: Mapping[int, Fallback | None]) -> None:
    """Log the layers that prefill dense, one line for each reason."""
    for reason in Fallback:
        dense = [number for number, why in reasons.items() if why is reason]
        if dense:
            logger.info("sparse-prefill: layers %s prefill dense: %s", format_ranges(dense), reason.explain)


def log_plans(vllm_config: VllmConfig, resolved: Resolved, lengths: Mapping[str, Lengths]) -> None:
    """Log the plan of each level, the levels that requests may choose, and a warning if no row can run sparse."""
    for level, plan in resolved.plans.items():
        if level == SHARE:  # its plan is the server's own
            continue
        for line in plan.describe(lengths[level]):
            logger.info("sparse-prefill: %s", line)
    log_levels(vllm_config, lengths[ON])


def log_levels(vllm_config: VllmConfig, lengths: Lengths) -> None:
    """Log the levels that requests may choose, and a warning if no row of the server's own level can run sparse."""
    policy = level_policy(vllm_config)
    logger.info("sparse-prefill: values of %s in a request's vllm_xargs: %s; default %s", FIELD, policy, policy.default)
    _warn_if_never_sparse(vllm_config, lengths)


def _warn_if_never_sparse(vllm_config: VllmConfig, lengths: Lengths) -> None:
    """Warn if requests or their chunks are too short to run sparse at the server's own level."""
    if lengths.min_tokens == NEVER.min_tokens:
        return  # the plan's line says so
    max_len = vllm_config.model_config.max_model_len
    if max_len <= lengths.min_tokens:
        logger.warning("sparse-prefill: requests have at most %d tokens, so all of them run dense", max_len)
        return
    scheduler, drafts = vllm_config.scheduler_config, vllm_config.num_speculative_tokens
    step_tokens = scheduler.max_num_batched_tokens
    request_tokens = scheduler.long_prefill_token_threshold or MOST_COUNT
    decode_tokens = (scheduler.max_num_seqs - 1) * (1 + drafts)
    alone = min(step_tokens, request_tokens)
    with_decodes = max(min(step_tokens - decode_tokens, request_tokens), 1)
    if with_decodes < lengths.min_query_tokens:
        logger.warning(
            "sparse-prefill: a step has at most %d new tokens of a request, and %d next to the maximum number of "
            "decodes, but rows with fewer than %d run dense: raise --max-num-batched-tokens (and "
            "--long-prefill-token-threshold, if it is set), or lower min_query_tokens",
            alone, with_decodes, lengths.min_query_tokens,
        )  # fmt: skip
    most_new = min(alone, max_len - lengths.min_tokens)
    if (pairs := lengths.pairs(most_new, max_len)) < lengths.min_pairs:
        logger.warning(
            "sparse-prefill: the new tokens of a step have at most %d pairs with earlier keys, but rows with fewer "
            "than %d run dense: raise --max-num-batched-tokens or --max-model-len, or set min_tokens and "
            "min_query_tokens",
            pairs, lengths.min_pairs,
        )  # fmt: skip


def warn_if_no_chunk_begins_after(vllm_config: VllmConfig, min_tokens: int) -> None:
    """Warn if no chunk of any uncached prompt begins after ``min_tokens``, where MLA's rows run sparse."""
    max_len, scheduler = vllm_config.model_config.max_model_len, vllm_config.scheduler_config
    step_tokens = scheduler.max_num_batched_tokens
    chunk_tokens = min(step_tokens, scheduler.long_prefill_token_threshold or step_tokens)
    if min_tokens < max_len <= round_up(min_tokens, chunk_tokens):
        logger.warning(
            "sparse-prefill: requests have at most %d tokens, so none of their chunks of %d tokens begins after %d "
            "tokens (min_tokens), and uncached prompts run dense: lower --max-num-batched-tokens or min_tokens",
            max_len, chunk_tokens, min_tokens,
        )  # fmt: skip


def warn_of_other_device(resolved: Resolved, rank: int) -> None:
    """Warn if a worker's device differs from the device for which ``auto`` was resolved. The server's numbers apply."""
    device, resolved_for = compat.device_name(), resolved.carried.device
    uses_auto = any(AUTO in (plan.min_tokens, plan.min_query_tokens) for plan in resolved.plans.values())
    if uses_auto and device != resolved_for:
        logger.warning(
            "sparse-prefill: rank %d runs on %s, but auto uses the measurements of %s, where the server started, "
            "because all processes need the same lengths: set min_tokens and min_query_tokens to choose others",
            rank, device, resolved_for,
        )  # fmt: skip
