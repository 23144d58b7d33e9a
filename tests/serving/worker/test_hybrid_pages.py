# SPDX-License-Identifier: Apache-2.0
"""Pages of hybrid models: vLLM's functions choose them for our backend as on Hopper."""

import inspect
from pathlib import Path

import pytest
import torch
from transformers import NemotronHConfig, Qwen3NextConfig
from vllm.config import CacheConfig, ModelConfig, VllmConfig, set_current_vllm_config
from vllm.platforms.interface import Platform
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.worker.utils import select_common_block_size

import tests.helpers.cpu_build  # noqa: F401 — skips where there is none
from tests.helpers.vllm_objects import make_config, make_model
from vllm_sparse_backend.serving import compat, startup
from vllm_sparse_backend.serving.worker.backend import SparsePrefillBackend

HOPPER_CAPABILITY = (9, 0)
PASSES_SPECS = "kv_cache_specs" in inspect.signature(select_common_block_size).parameters  # from 0.32 on
QWEN3_NEXT = Qwen3NextConfig(architectures=["Qwen3NextForCausalLM"])
NEMOTRON_H = NemotronHConfig(
    architectures=["NemotronHForCausalLM"], head_dim=128, num_attention_heads=32, num_key_value_heads=8,
    mamba_num_heads=128, mamba_head_dim=64, n_groups=8, ssm_state_size=128,
)  # fmt: skip


@pytest.fixture(params=[QWEN3_NEXT, NEMOTRON_H], ids=["Qwen3-Next", "Nemotron-H"])
def hybrid(request: pytest.FixtureRequest, tmp_path: Path) -> ModelConfig:
    request.param.save_pretrained(tmp_path)
    return ModelConfig(model=str(tmp_path), tokenizer=str(tmp_path), skip_tokenizer_init=True, dtype="bfloat16")


@pytest.fixture(autouse=True)
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate Hopper: like FlashAttention, the dense backend supports multiples of 16, and pages of 128 tokens are
    faster."""
    monkeypatch.setattr(compat.DenseBackend, "get_supported_kernel_block_sizes", lambda *_: [MultipleOf(16)])
    for module in ("compat", "worker.backend"):
        monkeypatch.setattr(f"vllm_sparse_backend.serving.{module}.prefers_bulk_pages", lambda: True)
    finder = "_find_non_ssm_backends" if hasattr(Platform, "_find_non_ssm_backends") else "_find_non_ssm_backend"
    backends = [SparsePrefillBackend] if finder.endswith("s") else SparsePrefillBackend
    monkeypatch.setattr(Platform, finder, classmethod(lambda cls, config: backends))


def aligned(model: ModelConfig, block_size: int | None) -> VllmConfig:
    """Return a configuration with this ``--block-size`` after vLLM has chosen its page size."""
    config = make_config(model)
    config.cache_config = CacheConfig(**({} if block_size is None else {"block_size": block_size}))
    Platform.update_block_size_for_backend(config)
    return config


def spec_of(model: ModelConfig, page_tokens: int) -> FullAttentionSpec:
    return FullAttentionSpec(
        block_size=page_tokens, num_kv_heads=model.get_total_num_kv_heads(), head_size=model.get_head_size(),
        dtype=torch.bfloat16,
    )  # fmt: skip


def kernel_page(page_tokens: int, spec: FullAttentionSpec | None = None) -> int:
    """Return the page that vLLM gives our kernels for the manager's page."""
    specs = ([spec],) if spec is not None and PASSES_SPECS else ()
    page: int = select_common_block_size(page_tokens, [SparsePrefillBackend], *specs)
    return page


@pytest.mark.parametrize("block_size", [None, 16, 32, 64, 128, 256])
def test_pages_are_on_the_fast_path_whatever_block_size_was_given(hybrid: ModelConfig, block_size: int | None) -> None:
    """vllm#37467: pages of 528 tokens, which no block of 64 or 128 keys divides; with units of 128, pages have 640."""
    assert hybrid.is_hybrid
    config = aligned(hybrid, block_size)
    page_tokens = config.cache_config.block_size
    assert page_tokens > 128
    assert page_tokens % 128 == 0
    assert startup.slow_path(page_tokens, compat.BULK_PAGE_TOKENS, HOPPER_CAPABILITY) is None
    if block_size is not None:
        assert page_tokens % block_size == 0


@pytest.mark.parametrize("block_size", [16, 48])
def test_a_model_of_another_kind_keeps_the_block_size_it_was_given(block_size: int, tmp_path: Path) -> None:
    config = aligned(make_model(tmp_path), block_size)
    assert config.cache_config.block_size == block_size
    with set_current_vllm_config(config):
        assert kernel_page(block_size) == block_size


def test_a_block_size_that_neither_divides_128_nor_is_a_multiple_still_runs(hybrid: ModelConfig) -> None:
    """Slower code reads it, and the log has the remedy."""
    config = aligned(hybrid, 48)
    page_tokens = config.cache_config.block_size
    assert page_tokens % 48 == 0
    assert "remove --block-size" in str(startup.slow_path(page_tokens, compat.BULK_PAGE_TOKENS, HOPPER_CAPABILITY))
    with set_current_vllm_config(config):
        assert kernel_page(page_tokens) == page_tokens


@pytest.mark.parametrize("block_size", [None, 16, 256])
def test_the_page_of_kernels_is_the_page_of_the_manager(hybrid: ModelConfig, block_size: int | None) -> None:
    """vllm#27547: kernels that used the manager's page size read garbage; ours have no other page size.

    Nothing splits pages for our kernels: the page stays whole for all specs that vLLM passes.
    """
    config = aligned(hybrid, block_size)
    page_tokens = config.cache_config.block_size
    spec = spec_of(hybrid, page_tokens)
    for cache_spec in (None, spec):
        with set_current_vllm_config(config):
            assert kernel_page(page_tokens, cache_spec) == page_tokens
        assert kernel_page(page_tokens, cache_spec) == page_tokens


@pytest.mark.skipif(not PASSES_SPECS, reason="this vLLM passes no specs")
def test_a_page_that_exists_already_is_never_refused(hybrid: ModelConfig) -> None:
    """The page of a draft or a packed group, which vLLM did not align to ours: the dense backend's sizes apply."""
    config = aligned(hybrid, None)
    with set_current_vllm_config(config):
        assert kernel_page(16, spec_of(hybrid, 16)) == 16
