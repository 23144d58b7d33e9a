# SPDX-License-Identifier: Apache-2.0
"""Pages of hybrid models: vLLM's functions choose them for our backend as on Hopper, and the engine ``hopper`` reads
them."""

import inspect
from pathlib import Path

import pytest
import torch
from transformers import NemotronHConfig, Qwen3NextConfig
from vllm.config import CacheConfig, ModelConfig, set_current_vllm_config
from vllm.platforms.interface import Platform
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.worker.utils import select_common_block_size

import tests.helpers.cpu_build  # noqa: F401 — skips where there is none
from tests.helpers.vllm_objects import make_config
from vllm_sparse_backend.serving import compat
from vllm_sparse_backend.serving.worker.backend import SparsePrefillBackend
from vllm_sparse_kernels import engine_choice
from vllm_sparse_kernels.attention.engine import AttendSpec
from vllm_sparse_kernels.attention.hopper.engine import HOPPER

PASSES_SPECS = "kv_cache_specs" in inspect.signature(select_common_block_size).parameters  # from 0.32 on
QWEN3_NEXT = Qwen3NextConfig(architectures=["Qwen3NextForCausalLM"])
NEMOTRON_H = NemotronHConfig(
    architectures=["NemotronHForCausalLM"], head_dim=128, num_attention_heads=32, num_key_value_heads=8,
    mamba_num_heads=128, mamba_head_dim=64, n_groups=8, ssm_state_size=128,
)  # fmt: skip


@pytest.mark.parametrize("block_size", [None, 48, 256])
@pytest.mark.parametrize("hf_config", [QWEN3_NEXT, NEMOTRON_H], ids=["Qwen3-Next", "Nemotron-H"])
def test_hopper_reads_the_pages_of_hybrids(
    hf_config: Qwen3NextConfig | NemotronHConfig,
    block_size: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vllm#37467: pages of 528 tokens, which no block of 64 or 128 keys divides. vllm#27547: kernels read
    garbage if they use the manager's page size. vLLM does not split these pages for our backend.
    """
    hf_config.save_pretrained(tmp_path)
    model = ModelConfig(model=str(tmp_path), tokenizer=str(tmp_path), skip_tokenizer_init=True, dtype="bfloat16")
    assert model.is_hybrid
    monkeypatch.setattr(compat.DenseBackend, "get_supported_kernel_block_sizes", lambda *_: [MultipleOf(16)])
    monkeypatch.setattr(engine_choice, "capability_of", lambda device: (9, 0))
    finder = "_find_non_ssm_backends" if hasattr(Platform, "_find_non_ssm_backends") else "_find_non_ssm_backend"
    backends = [SparsePrefillBackend] if finder.endswith("s") else SparsePrefillBackend
    monkeypatch.setattr(Platform, finder, classmethod(lambda cls, config: backends))
    config = make_config(model)
    config.cache_config = CacheConfig(**({} if block_size is None else {"block_size": block_size}))
    Platform.update_block_size_for_backend(config)

    page, num_kv_heads, head_dim = (
        config.cache_config.block_size, model.get_total_num_kv_heads(), model.get_head_size()
    )  # fmt: skip
    stride_token = 2 * head_dim * num_kv_heads
    spec = AttendSpec(
        torch.device("cpu"), torch.bfloat16, head_dim, page,
        (page * stride_token, stride_token, 2 * head_dim), block_tokens=32, has_stripes=False,
    )  # fmt: skip
    assert HOPPER.refusal(spec) is None
    cache_spec = FullAttentionSpec(
        block_size=page, num_kv_heads=num_kv_heads, head_size=head_dim, dtype=torch.bfloat16
    )  # fmt: skip
    specs = ([cache_spec],) if PASSES_SPECS else ()
    with set_current_vllm_config(config):
        assert select_common_block_size(page, [SparsePrefillBackend], *specs) == page
