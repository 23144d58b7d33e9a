# SPDX-License-Identifier: Apache-2.0
"""Writes a small model with fixed random weights and the bundled model's tokenizer. Nothing is downloaded.

The weights are not degenerate: every projection keeps its input's variance, and queries are scaled up to make attention
far from uniform. Errors in a prefill therefore change the tokens that follow it.
"""

import json
import math
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import torch

from vllm_sparse_backend.demo.model import BUNDLED

MAX_POSITIONS = 16384
VOCAB_SIZE = 2048
QUERY_GAIN = 2.0

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": MAX_POSITIONS,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "dtype": "float32",
}


MLA_CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 0,
    "first_k_dense_replace": 2,
    "num_nextn_predict_layers": 0,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": MAX_POSITIONS,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "dtype": "float32",
}
"""Multi-head latent attention with the head dimensions of DeepSeek-V3, without experts. vLLM's CPU build decodes only
with this ``kv_lora_rank``."""


def make_model(folder: Path, config: dict[str, Any] = CONFIG) -> Path:
    """Write the model to a new folder and return it."""
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUNDLED / name, folder)
    weights = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).state_dict()
    generator = torch.Generator().manual_seed(0)
    for name in sorted(weights, key=lambda name: "layers" in name):  # the embeddings first
        matrix = weights[name]
        if matrix.dim() == 2:  # all others are norms, which are 1
            gain = QUERY_GAIN if "q_proj" in name else 1.0
            matrix.normal_(0, 1.0 if "embed" in name else gain / math.sqrt(matrix.shape[1]), generator=generator)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def make_adapter(folder: Path) -> Path:
    """Write a LoRA adapter of ``CONFIG``'s model that changes its attention."""
    from safetensors.torch import save_file

    folder.mkdir()
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "o_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    wide, narrow = CONFIG["num_attention_heads"] * CONFIG["head_dim"], CONFIG["hidden_size"]
    generator, tensors = torch.Generator().manual_seed(1), {}
    for layer, (name, inputs, outputs) in product(
        range(CONFIG["num_hidden_layers"]), (("q_proj", narrow, wide), ("o_proj", wide, narrow))
    ):
        prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
        tensors[f"{prefix}.lora_A.weight"] = torch.randn(8, inputs, generator=generator) / 8
        tensors[f"{prefix}.lora_B.weight"] = torch.randn(outputs, 8, generator=generator) / 8
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder
