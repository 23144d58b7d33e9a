# SPDX-License-Identifier: Apache-2.0
"""Reads the sizes of a model's linear layers and recurrences from its config.

They determine how much time a prompt spends outside of attention.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from statistics import fmean
from typing import Any

from vllm_sparse_backend.config.errors import ConfigurationError, refusal
from vllm_sparse_backend.config.model_shape import ModelShape, layer_kinds
from vllm_sparse_backend.config.ranges import MOST_COUNT

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


ReadWidth = Callable[[str], int]
"""Returns a width or count of experts of a config by its name."""


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
    width = partial(_width, config, source)
    hidden = width("hidden_size") or width("n_embd") or shape.num_heads * shape.head_dim
    model_type = config.get("model_type")
    matrices = 2 if model_type in UNGATED_MODELS else 3
    gates = shape.num_heads if config.get("attn_output_gate", model_type in GATED_ATTENTION_MODELS) else 0
    attention = hidden * shape.head_dim * (2 * shape.num_heads + 2 * shape.num_kv_heads + gates)
    recurrence = _recurrence_weights(width, hidden) or attention
    kinds = [str(kind) for kind in layer_kinds(config) or ()][: shape.num_layers]
    kinds += ["full_attention"] * (shape.num_layers - len(kinds))
    # Nemotron-H lists feed-forward layers as separate layers.
    is_split = any(kind in FEED_FORWARD_KINDS for kind in kinds)
    for layer, kind in enumerate(kinds):
        weights = state_elements = 0
        if kind == "hybrid":
            weights, state_elements = attention + recurrence, _state_elements(width)
        elif "linear" in kind or "mamba" in kind:
            weights, state_elements = recurrence, _state_elements(width)
        elif kind not in FEED_FORWARD_KINDS:
            weights = attention
        if kind in FEED_FORWARD_KINDS or not is_split:
            has_experts = kind == "moe" or (not is_split and layer >= width("first_k_dense_replace"))
            weights += matrices * hidden * _inner_width(width, hidden, has_experts)
        yield weights, state_elements


def _width(config: Mapping[str, Any], source: str, name: str) -> int:
    """Return a width or count of experts: 0 if it is absent, the mean of a list with one for each layer."""
    other = config.get(OTHER_NAMES.get(name, name))
    width = config.get(name) or (other if type(other) is int else 0)
    numbers = width if isinstance(width, list) else [width]
    if not all(type(number) is int and 0 <= number <= MOST_COUNT for number in numbers):
        expected = f"one number for all layers or one for each, at most {MOST_COUNT}"
        raise refusal(f"{source}: {name}", width, expected)
    return round(fmean(numbers))


def _recurrence_weights(width: ReadWidth, hidden: int) -> int:
    """Return the weights of the projections of a gated delta rule or Mamba 2 layer; 0 if the config describes none."""
    keys = width("linear_num_key_heads") * width("linear_key_head_dim")
    values = width("linear_num_value_heads") * width("linear_value_head_dim")
    if values:  # queries, keys, values, gates, two numbers per value head, and the output
        return hidden * (2 * keys + 3 * values + 2 * width("linear_num_value_heads"))
    inner = width("mamba_num_heads") * width("mamba_head_dim")
    states = 2 * width("n_groups") * width("ssm_state_size")
    return hidden * (3 * inner + states + width("mamba_num_heads")) if inner else 0


def _state_elements(width: ReadWidth) -> int:
    """Return the elements of the state of a gated delta rule or Mamba 2 layer; 0 if the config describes none."""
    gated = width("linear_num_value_heads") * width("linear_key_head_dim") * width("linear_value_head_dim")
    return gated or width("mamba_num_heads") * width("mamba_head_dim") * width("ssm_state_size")


def _inner_width(width: ReadWidth, hidden: int, has_experts: bool) -> int:
    """Return the inner width of a feed-forward layer; with experts, the sum of the widths of a token's experts."""
    inner = width("intermediate_size") or width("n_inner") or 4 * hidden
    experts = width("num_experts_per_tok")
    if not experts or not has_experts:
        return inner
    expert = width("moe_intermediate_size") or inner
    shared = width("shared_expert_intermediate_size") or width("moe_shared_expert_intermediate_size")
    return experts * expert + (shared or width("n_shared_experts") * expert)
