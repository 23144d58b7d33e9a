# SPDX-License-Identifier: Apache-2.0
"""vLLM configurations made by hand, for models with a config in transformers."""

from types import SimpleNamespace
from typing import Any

import torch
import transformers

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64,
}  # fmt: skip

CACHE = {
    "cache_dtype": "auto", "kv_cache_dtype_skip_layers": [], "kv_offloading_size": None, "block_size": None,
    "user_specified_block_size": False,
}  # fmt: skip

FLAGS = {
    "use_ubatching": False,
    "is_moe_model": False,
    "enable_elastic_ep": False,
    "worker_extension_cls": "",
    "rank": 0,
}


def served(
    hf_config: transformers.PretrainedConfig, settings: Any = None, dtype: torch.dtype = torch.bfloat16,
    cache: dict[str, Any] | None = None, parallel: dict[str, Any] | None = None,
) -> Any:  # fmt: skip
    sizes = (
        *("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"),
        *("prefill_context_parallel_size", "decode_context_parallel_size"),
    )  # fmt: skip
    return SimpleNamespace(
        additional_config={} if settings is None else {"sparse_prefill": settings},
        model_config=SimpleNamespace(
            hf_config=hf_config,
            hf_text_config=hf_config.get_text_config(),
            model="/a/model",
            dtype=dtype,
            max_model_len=131_072,
            runner_type="generate",
            use_mla=False,
            rswa_window=None,
            is_mm_prefix_lm=False,
            is_encoder_decoder=False,
            is_multimodal_model=False,
            skip_tokenizer_init=False,
        ),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=8192),
        cache_config=SimpleNamespace(**(CACHE | (cache or {}))),
        parallel_config=SimpleNamespace(**(dict.fromkeys(sizes, 1) | FLAGS | (parallel or {}))),
        compilation_config=SimpleNamespace(pass_config=None),
        lora_config=None,
        weight_transfer_config=None,
        kv_transfer_config=None,
        speculative_config=None,
        quant_config=None,
    )


def llama(**changes: Any) -> transformers.LlamaConfig:
    return transformers.LlamaConfig(**(LLAMA | changes))
