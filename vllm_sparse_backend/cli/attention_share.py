# SPDX-License-Identifier: Apache-2.0
"""Attention's share of a model's prefill, which limits the TTFT speed-up of any method.

The estimate needs only a model's config. A prompt of N tokens costs

        linear layers: 2 · (weights applied to each token) · N
    attention:     4 · head_dim · query heads · (query, key) pairs, for each layer that attends

floating-point operations: N (N + 1) / 2 pairs, or the pairs within the layer's window or chunk. Both are divided by the
rates measured on an H100 in bf16 (docs/research/performance.md): ``LINEAR_FLOPS`` in linear layers of an 8B model's
width, and ``ATTENTION_FLOPS`` in FlashAttention-3. Norms, rotary positions, the output head (applied to one token) and
communication are left out. Layers of linear attention and Mamba also update a state of
(key, value) elements per head for each token, at ``RECURRENCE_ELEMENTS`` elements per second; a recurrence that the
config describes in other fields is left out. Experts of a MoE model count as dense layers, but run slower. Both
overstate the speed-up. Another device changes the result only if the ratios of the rates differ.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm_sparse_backend.config.fallback import Fallback
from vllm_sparse_backend.config.layer_weights import layer_sizes
from vllm_sparse_backend.config.model_check import layer_reasons
from vllm_sparse_backend.config.model_shape import ModelShape

LINEAR_FLOPS = 650e12
ATTENTION_FLOPS = {64: 441e12, 128: 600e12, 256: 658e12}
"""Rates by head_dim; others have the rate of the next larger one. At 128 over vLLM's pages of 16, else over pages of
128."""

RECURRENCE_ELEMENTS = 3.28e12
"""Elements of states that a recurrence updates per second, on an H100: what Qwen3-Next's shape leaves of stock's TTFT
at 65,536 tokens after linear layers and attention (vLLM 0.33, Triton's gated delta rule;
docs/results/performance.jsonl). The rate of Mamba 2 is assumed to be the same."""

LENGTHS_TOKENS = (8192, 16_384, 32_768, 65_536, 131_072, 262_144, 1_048_576)

HARDLY_PAYS = 1.2
"""Largest possible speed-up below which sparse prefill is hardly worth its errors."""


def causal_pairs(num_tokens: int) -> int:
    """Count the (query, key) pairs of a prompt in which each query attends to all tokens up to its own."""
    return num_tokens * (num_tokens + 1) // 2


@dataclass(frozen=True)
class PrefillShare:
    """Seconds on an H100 that a prompt spends in parts of a model."""

    linear_s: float
    sparse_s: float
    dense_s: float
    recurrence_s: float

    @property
    def attention(self) -> float:
        """Share of prefill time that is spent in attention that can run sparse."""
        return self.sparse_s / (self.linear_s + self.sparse_s + self.dense_s + self.recurrence_s)

    @property
    def of_pairs(self) -> float:
        """Share of (query, key) pairs in layers that can run sparse, as on /metrics (docs/metrics.md)."""
        return self.sparse_s / (self.sparse_s + self.dense_s)

    @property
    def best_speedup(self) -> float:
        """Speed-up of TTFT if sparse attention took no time."""
        return 1 / (1 - self.attention)


def prefill_share(config: Mapping[str, Any], num_tokens: int, source: str = "config.json") -> PrefillShare:
    """Estimate the times of a prompt of ``num_tokens`` in an empty server, from a model's (text) config.

    Raises a ConfigurationError that names ``source`` if the config has no heads or a width is not a single number.
    """
    shape = ModelShape.from_config(config, source)
    near_pairs = all_pairs = causal_pairs(num_tokens)
    if window := config.get("sliding_window"):
        within = min(window, num_tokens)
        near_pairs = causal_pairs(within) + (num_tokens - within) * within
    elif chunk := config.get("attention_chunk_size"):
        # Each query attends to the tokens of its own chunk of positions.
        num_chunks, remainder = divmod(num_tokens, chunk)
        near_pairs = num_chunks * causal_pairs(chunk) + causal_pairs(remainder)
    rate_head_dim = min((head_dim for head_dim in ATTENTION_FLOPS if head_dim >= shape.head_dim), default=256)
    pair_s = 4 * shape.head_dim * shape.num_heads / ATTENTION_FLOPS[rate_head_dim]
    seconds = {"sparse": 0.0, "dense": 0.0}
    for reason in layer_reasons(config):
        if reason is not Fallback.NOT_DECODER:
            pairs = near_pairs if reason is Fallback.SLIDING_WINDOW else all_pairs
            seconds["dense" if reason else "sparse"] += pair_s * pairs
    weights, states = zip(*layer_sizes(config, shape, source), strict=True)
    linear_s = 2 * sum(weights) * num_tokens / LINEAR_FLOPS
    recurrence_s = sum(states) * num_tokens / RECURRENCE_ELEMENTS
    return PrefillShare(linear_s, seconds["sparse"], seconds["dense"], recurrence_s)
