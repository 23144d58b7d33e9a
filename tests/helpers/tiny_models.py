# SPDX-License-Identifier: Apache-2.0
"""A small Llama-shaped model folder, made locally: nothing is downloaded, and the same seed gives the same weights.

The weights are random but not degenerate: every projection keeps its input's variance, and queries are scaled up to
make attention far from uniform. Errors in a prefill therefore change the tokens that follow it.
"""

import json
import math
import shutil
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import torch

from vllm_sparse_backend.prompts.texts import project_files

MAX_POSITIONS = 16384
VOCAB_SIZE = 2048
START, END = "<s>", "</s>"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
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
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "dtype": "float32",
    "torch_dtype": "float32",
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
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "dtype": "float32",
    "torch_dtype": "float32",
}
"""Multi-head latent attention with the head dimensions of DeepSeek-V3, without experts. vLLM's CPU build decodes only
with this ``kv_lora_rank``."""


def make_model(folder: Path, *, seed: int = 0, config: dict[str, Any] = CONFIG) -> Path:
    """Write the model to ``folder`` and return it. Leave an existing folder unchanged."""
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Written to a temporary folder and renamed at the end, so an interrupted run leaves no partial model.
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".making-") as aside:
        made = Path(aside) / folder.name
        made.mkdir()
        (made / "config.json").write_text(json.dumps(config, indent=1))
        write_tokenizer(made)
        _write_weights(made, seed, config)
        shutil.move(made, folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(project_files(), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{START} $A", special_tokens=[(START, 0)])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": START,
        "eos_token": END,
        "model_max_length": MAX_POSITIONS,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1))


def _write_weights(folder: Path, seed: int, config: dict[str, Any]) -> None:
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)

    def projection(out_features: int, in_features: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn(out_features, in_features, generator=generator) * (gain / math.sqrt(in_features))

    hidden, inner = config["hidden_size"], config["intermediate_size"]

    def attention() -> dict[str, torch.Tensor]:
        num_heads = config["num_attention_heads"]
        if "kv_lora_rank" not in config:
            q_size, kv_size = num_heads * config["head_dim"], config["num_key_value_heads"] * config["head_dim"]
            return {
                "q_proj": projection(q_size, hidden, QUERY_GAIN),
                "k_proj": projection(kv_size, hidden),
                "v_proj": projection(kv_size, hidden),
                "o_proj": projection(hidden, q_size),
            }
        latent, rope, value = config["kv_lora_rank"], config["qk_rope_head_dim"], config["v_head_dim"]
        nope = config["qk_nope_head_dim"]
        return {
            "q_proj": projection(num_heads * (nope + rope), hidden, QUERY_GAIN),
            "kv_a_proj_with_mqa": projection(latent + rope, hidden),
            "kv_a_layernorm": torch.ones(latent),
            "kv_b_proj": projection(num_heads * (nope + value), latent),
            "o_proj": projection(hidden, num_heads * value),
        }

    weights = {
        "model.embed_tokens.weight": torch.randn(VOCAB_SIZE, hidden, generator=generator),
        "model.norm.weight": torch.ones(hidden),
        "lm_head.weight": projection(VOCAB_SIZE, hidden),
    }
    for layer in range(config["num_hidden_layers"]):
        weights |= {
            f"model.layers.{layer}.{name}": tensor
            for name, tensor in {
                "input_layernorm.weight": torch.ones(hidden),
                **{f"self_attn.{name}.weight": tensor for name, tensor in attention().items()},
                "post_attention_layernorm.weight": torch.ones(hidden),
                "mlp.gate_proj.weight": projection(inner, hidden),
                "mlp.up_proj.weight": projection(inner, hidden),
                "mlp.down_proj.weight": projection(hidden, inner),
            }.items()
        }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


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
