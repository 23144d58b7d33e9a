# SPDX-License-Identifier: Apache-2.0
"""Attention's share of a model's prefill, which limits the TTFT speed-up of any method.

The estimate needs only a model's config. A prompt of N tokens costs

        linear layers: 2 · (weights applied to each token) · N
    attention:     4 · head_dim · query heads · (query, key) pairs, for each layer that attends

floating-point operations: N (N + 1) / 2 pairs, or the pairs within the layer's window or chunk. Both are divided by the
rates measured on an H100 in bf16 (docs/performance.md): ``LINEAR_FLOPS`` in linear layers of an 8B model's width, and
``ATTENTION_FLOPS`` in FlashAttention-3. Norms, rotary positions, the output head (applied to one token) and
communication are left out. Layers of linear attention and Mamba also update a state of
(key, value) elements per head for each token, at ``RECURRENCE_ELEMENTS`` elements per second. Experts of a MoE model
count as dense layers, but run slower, which overstates the speed-up. Another device changes the result only if the
ratios of the rates differ.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from vllm_sparse_backend.config.attention_reach import Reach
from vllm_sparse_backend.config.errors import ConfigurationError, unexpected
from vllm_sparse_backend.config.fallback import Fallback
from vllm_sparse_backend.config.model_check import layer_reasons
from vllm_sparse_backend.config.model_shape import ModelShape, layer_kinds
from vllm_sparse_backend.config.ranges import MOST_COUNT

LINEAR_FLOPS = 650e12
ATTENTION_FLOPS = {64: 441e12, 128: 600e12, 256: 658e12}
"""Rates by head_dim; others have the rate of the next larger one. At 128 over vLLM's pages of 16, else over pages of
128."""

RECURRENCE_ELEMENTS = 3.28e12
"""Elements of states that a recurrence updates per second, on an H100: what Qwen3-Next's shape leaves of stock's TTFT
at 65,536 tokens after linear layers and attention (vLLM 0.33, Triton's gated delta rule; docs/results/cards.json). The
rate of Mamba 2 is assumed to be the same."""

LENGTHS_TOKENS = (32_768, 131_072, 1_048_576)


@dataclass(frozen=True)
class PrefillShare:
    """Seconds on an H100 that a prompt spends in parts of a model.

    Attributes:
        linear_s: In linear layers.
        sparse_s: In attention that can run sparse.
        dense_s: In attention that stays dense.
        recurrence_s: In recurrences of linear attention and Mamba layers.
        num_unknown: Number of layers with a recurrence that the config does not describe in known fields. They count
            as linear layers of attention's size.
    """

    linear_s: float
    sparse_s: float
    dense_s: float
    recurrence_s: float = 0.0
    num_unknown: int = 0

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
    window, chunk = (config.get(name) or 0 for name in ("sliding_window", "attention_chunk_size"))
    near = Reach(window) if window else Reach(chunk=chunk)
    rate = next(
        (rate for head_dim, rate in ATTENTION_FLOPS.items() if shape.head_dim <= head_dim), ATTENTION_FLOPS[256]
    )
    pair_s = 4 * shape.head_dim * shape.num_heads / rate
    seconds = {"sparse": 0.0, "dense": 0.0}
    for reason in layer_reasons(config):
        if reason is not Fallback.NOT_DECODER:
            pairs = (near if reason is Fallback.SLIDING_WINDOW else Reach()).pairs(0, num_tokens)
            seconds["dense" if reason else "sparse"] += pair_s * pairs
    weights, states = zip(*_layer_sizes(config, shape, source), strict=True)
    linear_s = 2 * sum(weights) * num_tokens / LINEAR_FLOPS
    recurrence_s = sum(filter(None, states)) * num_tokens / RECURRENCE_ELEMENTS
    return PrefillShare(linear_s, seconds["sparse"], seconds["dense"], recurrence_s, states.count(None))


def _widths(config: Mapping[str, Any], source: str) -> dict[str, int]:
    """Return the widths and expert counts of a config; 0 for absent values."""
    others = {name: config[other] for name, other in OTHER_NAMES.items() if type(config.get(other)) is int}
    widths = {name: config.get(name) or others.get(name, 0) for name in WIDTHS}
    for name, width in widths.items():
        if type(width) is not int or not 0 <= width <= MOST_COUNT:  # some models list a width for each layer
            expected = f"one number for all layers, at most {MOST_COUNT}"
            raise ConfigurationError(f"{source}: {name}: {unexpected(width, expected)}")
    return widths


def _layer_sizes(config: Mapping[str, Any], shape: ModelShape, source: str) -> Iterator[tuple[int, int | None]]:
    """Yield for each layer the weights that apply to each token, and the elements of its recurrence's state.

    Weights are those of projections and active experts. The elements are None for a recurrence that is not known.
    """
    widths = _widths(config, source)
    hidden = widths["hidden_size"] or widths["n_embd"] or shape.num_heads * shape.head_dim
    model_type = config.get("model_type")
    matrices = 2 if model_type in UNGATED_MODELS else 3
    gates = shape.num_heads if config.get("attn_output_gate", model_type in GATED_ATTENTION_MODELS) else 0
    attention = hidden * shape.head_dim * (2 * shape.num_heads + 2 * shape.num_kv_heads + gates)
    recurrence = _recurrence_weights(widths, hidden) or attention
    kinds = (layer_kinds(config) or [])[: shape.num_layers]
    kinds += ["full_attention"] * (shape.num_layers - len(kinds))
    # Nemotron-H lists feed-forward layers as separate layers.
    is_split = any(kind in FEED_FORWARD_KINDS for kind in kinds)
    for layer, kind in enumerate(kinds):
        weights = 0
        state_elements: int | None = 0
        if kind == "hybrid":
            weights, state_elements = attention + recurrence, _state_elements(widths)
        elif "linear" in kind or "mamba" in kind:
            weights, state_elements = recurrence, _state_elements(widths)
        elif kind not in FEED_FORWARD_KINDS:
            weights = attention
        if kind in FEED_FORWARD_KINDS or not is_split:
            has_experts = kind == "moe" or (not is_split and layer >= widths["first_k_dense_replace"])
            weights += matrices * hidden * _inner_width(widths, hidden, has_experts)
        yield weights, state_elements


def _recurrence_weights(widths: Mapping[str, int], hidden: int) -> int:
    """Return the weights of the projections of a gated delta rule or Mamba 2 layer; 0 if the config describes none."""
    keys = widths["linear_num_key_heads"] * widths["linear_key_head_dim"]
    values = widths["linear_num_value_heads"] * widths["linear_value_head_dim"]
    if values:  # queries, keys, values, gates, two numbers per value head, and the output
        return hidden * (2 * keys + 3 * values + 2 * widths["linear_num_value_heads"])
    inner = widths["mamba_num_heads"] * widths["mamba_head_dim"]
    states = 2 * widths["n_groups"] * widths["ssm_state_size"]
    return hidden * (3 * inner + states + widths["mamba_num_heads"]) if inner else 0


def _state_elements(widths: Mapping[str, int]) -> int | None:
    """Return the elements of the state of a gated delta rule or Mamba 2 layer; None if the config describes none."""
    gated = widths["linear_num_value_heads"] * widths["linear_key_head_dim"] * widths["linear_value_head_dim"]
    return gated or widths["mamba_num_heads"] * widths["mamba_head_dim"] * widths["ssm_state_size"] or None


def _inner_width(widths: Mapping[str, int], hidden: int, has_experts: bool) -> int:
    """Return the inner width of a feed-forward layer: of a dense layer, or the sum over all experts of a token."""
    inner = widths["intermediate_size"] or widths["n_inner"] or 4 * hidden
    experts = widths["num_experts_per_tok"]
    if not experts or not has_experts:
        return inner
    expert = widths["moe_intermediate_size"] or inner
    of_one = widths["shared_expert_intermediate_size"] or widths["moe_shared_expert_intermediate_size"]
    return experts * expert + (of_one or widths["n_shared_experts"] * expert)


WIDTHS = (
    *("hidden_size", "n_embd", "intermediate_size", "n_inner", "num_experts_per_tok", "first_k_dense_replace"),
    *("moe_intermediate_size", "shared_expert_intermediate_size", "n_shared_experts"),
    *("moe_shared_expert_intermediate_size", "linear_num_key_heads", "linear_key_head_dim", "linear_num_value_heads"),
    *("linear_value_head_dim", "mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size"),
)

OTHER_NAMES = {
    "mamba_num_heads": "mamba_n_heads", "mamba_head_dim": "mamba_d_head", "n_groups": "mamba_n_groups",
    "ssm_state_size": "mamba_d_state",
}  # fmt: skip
"""Names of the same widths in the configs of Granite 4, Bamba and Falcon-H1."""

FEED_FORWARD_KINDS = ("mlp", "moe")
"""Kinds of layers without attention or recurrence."""

GATED_ATTENTION_MODELS = {"qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"}
"""Models whose attention projects a gate for each query, unless ``attn_output_gate`` is false."""

UNGATED_MODELS = {"gpt2", "gpt_neox", "gptj", "opt", "bloom", "mpt", "falcon", "nemotron_h", "phi", "starcoder2"}
"""Models whose feed-forward layers have two matrices. Other models have a third, the gate."""
