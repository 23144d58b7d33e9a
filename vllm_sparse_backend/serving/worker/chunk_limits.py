# SPDX-License-Identifier: Apache-2.0
"""The maximum number of tokens of a request that vLLM's scheduler can put into one step."""

from typing import NamedTuple

from vllm.config import VllmConfig

from vllm_sparse_backend.config.ranges import MOST_COUNT


class ChunkLimits(NamedTuple):
    """Maximum number of new tokens of one request in a step."""

    alone: int
    """In a step without other requests."""
    with_decodes: int
    """In a step with as many decodes as the scheduler allows."""

    @staticmethod
    def of(vllm_config: VllmConfig) -> "ChunkLimits":
        """Return the limits that the scheduler's settings imply."""
        scheduler, drafts = vllm_config.scheduler_config, vllm_config.num_speculative_tokens
        decode_tokens = (scheduler.max_num_seqs - 1) * (1 + drafts)
        step_tokens = scheduler.max_num_batched_tokens
        request_tokens = scheduler.long_prefill_token_threshold or MOST_COUNT
        return ChunkLimits(min(step_tokens, request_tokens), max(min(step_tokens - decode_tokens, request_tokens), 1))
