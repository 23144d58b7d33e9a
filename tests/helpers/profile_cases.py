# SPDX-License-Identifier: Apache-2.0
"""A small model's shape, MInference's patterns for it, and a profile with levels."""

SHAPE = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 256}

PATTERNS = [
    {"0": ["vertical_and_slash", 100, 800, 0.9], "1": ["stream_llm", 128, 512, 0.8]}
    | {head: ["vertical_and_slash", 1000, 6096, 0.9] for head in ("2", "3")},
    {head: ["block_sparse", 1000, 1024, 0.7] for head in "0123"},
]

LEVELS = """\
format: 1
model: {architecture: LlamaForCausalLM, num_layers: 2, num_heads: 4, num_kv_heads: 2, head_dim: 64}
level: high
default: {method: sale, tau: 0.01}
layers:
  1: {heads: {0-1: {method: a_shape, sink_tokens: 64, local_tokens: 256}}}
levels:
  fast: {dense_layers: [0], default: {method: sale, tau: 0.03}}
provenance:
  bounds: {error: 0.05, p99: 0.4}
  device: a card
  figures: {density: {0: [0.5, 0.5, 0.5, 0.5], 1: [0.1, 0.2, 0.3, 0.4]}, p99_error: {1: [0.01, 0.03, 0.0, 0.02]}}
"""
