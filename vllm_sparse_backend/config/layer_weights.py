# SPDX-License-Identifier: Apache-2.0
"""Reads the sizes of a model's linear layers and recurrences from its config.

They determine how much time a prompt spends outside of attention.
"""

from collections.abc import Iterator, Mapping
from statistics import fmean
from typing import Any

from vllm_sparse_backend.config.errors import ConfigurationError, unexpected
from vllm_sparse_backend.config.model_shape import ModelShape, layer_kinds
from vllm_sparse_backend.config.ranges import MOST_COUNT

WIDTHS = (
    "hidden_size", "n_embd", "intermediate_size", "n_inner", "num_experts_per_tok", "first_k_dense_replace",
    "moe_intermediate_size", "shared_expert_intermediate_size", "n_shared_experts",
    "moe_shared_expert_intermediate_size", "linear_num_key_heads", "linear_key_head_dim", "linear_num_value_heads",
    "linear_value_head_dim", "mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size",
)  # fmt: skip

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


def mean_layer_weights(config: Mapping[str, Any], shape: ModelShape, source: str) -> int:
    """Return the weights of linear layers that apply to each token, mean over a model's layers."""
    return round(fmean(weights for weights, _ in layer_sizes(config, shape, source)))


def layer_weights_if_known(config: Mapping[str, Any], shape: ModelShape) -> int | None:
    """Return ``mean_layer_weights``; None if the config does not tell, because a server runs such models too."""
    try:
        return mean_layer_weights(config, shape, "config.json")
    except ConfigurationError:
        return None


def layer_sizes(config: Mapping[str, Any], shape: ModelShape, source: str) -> Iterator[tuple[int, int]]:
    """Yield for each layer the weights that apply to each token, and the elements of its recurrence's state."""
    widths = _widths(config, source)
    hidden = widths["hidden_size"] or widths["n_embd"] or shape.num_heads * shape.head_dim
    model_type = config.get("model_type")
    matrices = 2 if model_type in UNGATED_MODELS else 3
    gates = shape.num_heads if config.get("attn_output_gate", model_type in GATED_ATTENTION_MODELS) else 0
    attention = hidden * shape.head_dim * (2 * shape.num_heads + 2 * shape.num_kv_heads + gates)
    recurrence = _recurrence_weights(widths, hidden) or attention
    kinds = [str(kind) for kind in layer_kinds(config) or ()][: shape.num_layers]
    kinds += ["full_attention"] * (shape.num_layers - len(kinds))
    # Nemotron-H lists feed-forward layers as separate layers.
    is_split = any(kind in FEED_FORWARD_KINDS for kind in kinds)
    for layer, kind in enumerate(kinds):
        weights = state_elements = 0
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


def _widths(config: Mapping[str, Any], source: str) -> dict[str, int]:
    """Return the widths and expert counts of a config: 0 for absent values, the mean of a list with one per layer."""
    others = {name: config[other] for name, other in OTHER_NAMES.items() if type(config.get(other)) is int}
    widths = {name: config.get(name) or others.get(name, 0) for name in WIDTHS}
    for name, width in widths.items():
        numbers = width if isinstance(width, list) else [width]
        if not all(type(number) is int and 0 <= number <= MOST_COUNT for number in numbers):
            expected = f"one number for all layers or one for each, at most {MOST_COUNT}"
            raise ConfigurationError(f"{source}: {name}: {unexpected(width, expected)}")
        widths[name] = round(fmean(numbers))
    return widths


def _recurrence_weights(widths: Mapping[str, int], hidden: int) -> int:
    """Return the weights of the projections of a gated delta rule or Mamba 2 layer; 0 if the config describes none."""
    keys = widths["linear_num_key_heads"] * widths["linear_key_head_dim"]
    values = widths["linear_num_value_heads"] * widths["linear_value_head_dim"]
    if values:  # queries, keys, values, gates, two numbers per value head, and the output
        return hidden * (2 * keys + 3 * values + 2 * widths["linear_num_value_heads"])
    inner = widths["mamba_num_heads"] * widths["mamba_head_dim"]
    states = 2 * widths["n_groups"] * widths["ssm_state_size"]
    return hidden * (3 * inner + states + widths["mamba_num_heads"]) if inner else 0


def _state_elements(widths: Mapping[str, int]) -> int:
    """Return the elements of the state of a gated delta rule or Mamba 2 layer; 0 if the config describes none."""
    gated = widths["linear_num_value_heads"] * widths["linear_key_head_dim"] * widths["linear_value_head_dim"]
    return gated or widths["mamba_num_heads"] * widths["mamba_head_dim"] * widths["ssm_state_size"]


def _inner_width(widths: Mapping[str, int], hidden: int, has_experts: bool) -> int:
    """Return the inner width of a feed-forward layer; with experts, the sum of the widths of a token's experts."""
    inner = widths["intermediate_size"] or widths["n_inner"] or 4 * hidden
    experts = widths["num_experts_per_tok"]
    if not experts or not has_experts:
        return inner
    expert = widths["moe_intermediate_size"] or inner
    shared = widths["shared_expert_intermediate_size"] or widths["moe_shared_expert_intermediate_size"]
    return experts * expert + (shared or widths["n_shared_experts"] * expert)
