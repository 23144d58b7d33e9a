# SPDX-License-Identifier: Apache-2.0
"""Writes a model folder of a real model's shape without weights, for `vllm serve --load-format dummy`.

    python -m benchmarks.shape FOLDER [--like llama-8b] [--positions 135168]

Random weights make attention nearly uniform. Methods that depend on attention then keep nearly everything, and show
their cost if nothing can be left out. A-shape's density does not depend on weights.
"""

import json
import shutil
from pathlib import Path
from typing import Annotated, Any

import typer

from vllm_sparse_backend.demo.model import BUNDLED

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 128256, "rope_theta": 500000.0, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "attention_bias": False, "mlp_bias": False,
}  # fmt: skip

QWEN3_NEXT: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "hidden_size": 2048,
    "intermediate_size": 5632, "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 2,
    "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "vocab_size": 151936, "num_experts": 16,
    "num_experts_per_tok": 10, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 12, "mlp_only_layers": list(range(47)),
    "decoder_sparse_step": 1, "norm_topk_prob": True, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000_000.0, "partial_rotary_factor": 0.25},
}  # fmt: skip
"""Attention in every fourth layer. Feed-forward layers are dense, as wide as the experts that a token activates; vLLM
loads no model without experts."""

NEMOTRON_H: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "hidden_size": 4096,
    "intermediate_size": 21504, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128, "vocab_size": 131072,
    "layers_block_type": [
        {"M": "linear_attention", "-": "mlp", "*": "full_attention"}[letter]
        for letter in "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
    ],
    "conv_kernel": 4, "chunk_size": 128, "use_conv_bias": True, "mamba_hidden_act": "silu",
    "mlp_hidden_act": "relu2", "layer_norm_epsilon": 1e-5,
}  # fmt: skip

DEEPSEEK_R1: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 7168,
    "intermediate_size": 2304, "num_hidden_layers": 4, "num_attention_heads": 16, "num_key_value_heads": 16,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "vocab_size": 16384, "n_routed_experts": 0, "first_k_dense_replace": 4, "num_nextn_predict_layers": 0,
    "rms_norm_eps": 1e-6, "hidden_act": "silu", "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip
"""Four layers of one GPU's part of eight: 16 of 128 heads, and dense feed-forward layers as wide as this part of the
experts that a token activates."""

SHAPES = {"llama-8b": LLAMA_8B, "qwen3-next": QWEN3_NEXT, "nemotron-h": NEMOTRON_H, "deepseek-r1": DEEPSEEK_R1}


def make_shape(folder: Path, positions: int, like: str = "llama-8b") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    common = {"tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
    config = common | SHAPES[like] | {"max_position_embeddings": positions, "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUNDLED / name, folder / name)
    _name_all_tokens(folder / "tokenizer.json", config["vocab_size"])
    return folder


def _name_all_tokens(file: Path, vocab_size: int) -> None:
    """Give each token a text, because a model with random weights may answer with any token.

    After a token without text, vLLM decodes the whole prompt again with every token until one has text. This takes 15
    to 25 ms per token after 131,072 tokens, more than the model.
    """
    tokenizer = json.loads(file.read_text(encoding="utf-8"))
    words = tokenizer["model"]["vocab"]
    words |= {f"Ġ{number}": number for number in range(len(words), vocab_size)}  # no merge produces them
    file.write_text(json.dumps(tokenizer), encoding="utf-8")


def main(
    folder: Annotated[Path, typer.Argument(help="Model folder to create.")],
    like: Annotated[str, typer.Option(help=f"{', '.join(SHAPES)}.")] = "llama-8b",
    positions: Annotated[int, typer.Option(help="Longest sequence.")] = 135168,
) -> None:
    if like not in SHAPES:
        raise typer.BadParameter(f"--like: given {like!r}, expected one of {', '.join(SHAPES)}")
    print(make_shape(folder, positions, like))


if __name__ == "__main__":
    typer.run(main)
