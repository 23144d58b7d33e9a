# SPDX-License-Identifier: Apache-2.0
"""A minimal Llama, whose parameters have the names of Hugging Face's files."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.needle.tokens import VOCAB_SIZE

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 16384,
    # Half of a head's channels turn by less than a radian over the longest prompt, to compare words at any distance.
    "rope_theta": 500000.0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "initializer_range": 0.02,
    "dtype": "bfloat16",
    "torch_dtype": "bfloat16",
}


CONSTANT, CONTRAST = 5.0, 1.6
"""Size of the channel that is the same for all words, and size of its contribution, in standard deviations. At the
start, a head of layer 0 puts nine tenths of its weight on one token."""


def _linear(in_features: int, out_features: int) -> nn.Linear:
    return nn.Linear(in_features, out_features, bias=False)


class Norm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class Layer(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, inner, self.head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
        q_size, kv_size = (config[f"num_{kind}_heads"] * self.head_dim for kind in ("attention", "key_value"))
        self.self_attn = nn.ModuleDict({
            "q_proj": _linear(hidden, q_size), "k_proj": _linear(hidden, kv_size),
            "v_proj": _linear(hidden, kv_size), "o_proj": _linear(q_size, hidden),
        })  # fmt: skip
        self.mlp = nn.ModuleDict({
            "gate_proj": _linear(hidden, inner), "up_proj": _linear(hidden, inner), "down_proj": _linear(inner, hidden),
        })  # fmt: skip
        self.input_layernorm = Norm(hidden, config["rms_norm_eps"])
        self.post_attention_layernorm = Norm(hidden, config["rms_norm_eps"])

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        normed, attention = self.input_layernorm(x), self.self_attn
        q, k, v = (
            attention[name](normed).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        group = q.shape[1] // k.shape[1]
        k = _rotate(k, cos, sin).repeat_interleave(group, 1)
        attended = F.scaled_dot_product_attention(
            _rotate(q, cos, sin), k, v.repeat_interleave(group, 1), is_causal=True
        )
        x = x + attention["o_proj"](attended.transpose(1, 2).flatten(2))
        normed, mlp = self.post_attention_layernorm(x), self.mlp
        return x + mlp["down_proj"](F.silu(mlp["gate_proj"](normed)) * mlp["up_proj"](normed))


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Needle(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config, depth = config, config["num_hidden_layers"]
        self.model = nn.ModuleDict({
            "embed_tokens": nn.Embedding(config["vocab_size"], config["hidden_size"]),
            "layers": nn.ModuleList(Layer(config) for _ in range(depth)),
            "norm": Norm(config["hidden_size"], config["rms_norm_eps"]),
        })  # fmt: skip
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                std = 0.02 if "embed" in name else 1 / math.sqrt(parameter.shape[1])
                # Deeper models write less into the residual stream.
                std /= math.sqrt(2 * depth) if name.endswith(("o_proj.weight", "down_proj.weight")) else 1
                nn.init.normal_(parameter, std=std)
        self._look_back()

    @torch.no_grad()
    def _look_back(self) -> None:
        """Initialise layer 0 with heads that look 1, 2, 3 ... tokens back, because copying needs the order of tokens.

        Training also finds such heads, but late, and the model learns nothing before. One channel of all embeddings
        holds a constant, which queries and keys read. Keys are then equal except for their rotation. A query is that
        key rotated back by the head's distance, so their product is highest at this distance.
        """
        embed = self.get_parameter("model.embed_tokens.weight")
        embed[:, 0] = CONSTANT * embed.std()
        half = self.config["head_dim"] // 2
        turns = self.config["rope_theta"] ** (-torch.arange(half) / half)
        size = CONTRAST * (turns > 0.1)  # slow channels do not separate neighbours
        q, k = (
            self.get_parameter(f"model.layers.0.self_attn.{name}.weight").unflatten(0, (-1, 2 * half))
            for name in ("q_proj", "k_proj")
        )
        # Random contributions of other channels would hide it.
        q *= 0.2
        k *= 0.2
        k[:, :half, 0], k[:, half:, 0] = size, 0
        for head in range(q.shape[0]):
            back = (head + 1) * turns
            q[head, :half, 0], q[head, half:, 0] = size * back.cos(), -size * back.sin()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return logits [batch, tokens, vocabulary] for ids [batch, tokens]."""
        half, device = self.config["head_dim"] // 2, ids.device
        turns = self.config["rope_theta"] ** (-torch.arange(half, device=device) / half)
        angles = torch.arange(ids.shape[1], device=device)[:, None] * turns
        x = self.model["embed_tokens"](ids)
        if torch.is_autocast_enabled(device.type):
            x = x.to(torch.get_autocast_dtype(device.type))
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for layer in self.model["layers"].children():
            x = layer(x, cos, sin)
        return F.linear(self.model["norm"](x), self.get_parameter("model.embed_tokens.weight"))
