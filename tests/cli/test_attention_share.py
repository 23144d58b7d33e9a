# SPDX-License-Identifier: Apache-2.0
"""Attention's share of prefill: against measured TTFT, by hand, and for models with layers without attention."""

from pathlib import Path

import pytest
import torch

from benchmarks.shape import make_shape
from tests.helpers.folders import LLAMA_8B
from vllm_sparse_backend.cli.attention_share import LINEAR_FLOPS, RECURRENCE_ELEMENTS, prefill_share
from vllm_sparse_backend.config.model_check import read_config


@pytest.mark.parametrize(
    ("num_tokens", "first_token_s", "attention_s", "best"), [(131_072, 10.3, 7.5, 3.7), (32_768, 1.21, 0.45, 1.6)]
)
def test_it_is_what_was_measured(num_tokens: int, first_token_s: float, attention_s: float, best: float) -> None:
    """Measured with stock vLLM 0.26 on an H100 with an 8B model; and FlashAttention-3 alone, times 32 layers."""
    share = prefill_share(LLAMA_8B, num_tokens)
    assert share.sparse_s == pytest.approx(attention_s, rel=0.05)
    assert share.linear_s + share.sparse_s == pytest.approx(first_token_s, rel=0.06)
    assert share.best_speedup == pytest.approx(best, abs=0.1)


def test_windows_and_chunks_stay_and_cost_what_is_within_them() -> None:
    whole, pairs = prefill_share(LLAMA_8B, 8192), 8192 * 8193 / 2
    assert whole.of_pairs == 1
    windows = {"layer_types": ["sliding_attention", "full_attention"] * 16, "sliding_window": 1024}
    chunks = {"layer_types": ["chunked_attention", "full_attention"] * 16, "attention_chunk_size": 1000}
    for more, of_query in ((windows, lambda i: min(i + 1, 1024)), (chunks, lambda i: i % 1000 + 1)):
        mixed, within = prefill_share(LLAMA_8B | more, 8192), sum(map(of_query, range(8192)))
        assert mixed.sparse_s == pytest.approx(whole.sparse_s / 2)
        assert mixed.dense_s == pytest.approx(whole.sparse_s / 2 * within / pairs)
        assert mixed.of_pairs == pytest.approx(pairs / (pairs + within))
        assert mixed.best_speedup < whole.best_speedup


def test_of_experts_only_those_that_a_token_is_sent_to_count() -> None:
    def linear_s(**more: int) -> float:
        return prefill_share(LLAMA_8B | more, 8192).linear_s

    two = {"num_experts_per_tok": 2, "num_local_experts": 8}
    assert linear_s(**two) == pytest.approx(linear_s(intermediate_size=2 * 14336))
    small = linear_s(**two, moe_intermediate_size=1000, n_shared_experts=1)
    assert small == pytest.approx(linear_s(intermediate_size=3000))
    assert linear_s(**two, first_k_dense_replace=32) == pytest.approx(linear_s())


@pytest.mark.parametrize("name", ["qwen3-next", "nemotron-h"])
def test_hybrids_count_the_weights_that_their_layers_have(name: str, tmp_path: Path) -> None:
    """Weights are compared with the matrices of transformers' model, created without memory."""
    transformers = pytest.importorskip("transformers")
    folder = make_shape(tmp_path / name, 65536, name)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder))
    matrices = {
        place: weights.numel()
        for place, weights in model.named_parameters()
        if ".layers." in place and weights.dim() == 2
    }
    share = prefill_share(read_config(folder), 65536)
    assert share.linear_s * LINEAR_FLOPS / (2 * 65536) == pytest.approx(sum(matrices.values()), rel=0.01)


def test_recurrences_of_mamba_count() -> None:
    state = {"mamba_num_heads": 128, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8}
    mixed = {"layer_types": ["mamba", "full_attention"] * 16}
    share = prefill_share(LLAMA_8B | mixed | state, 8192)
    assert share.recurrence_s == pytest.approx(16 * 128 * 64 * 128 * 8192 / RECURRENCE_ELEMENTS)
    assert prefill_share(LLAMA_8B, 8192).recurrence_s == 0
    renamed = {"mamba_n_heads": 128, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 8}
    assert prefill_share(LLAMA_8B | mixed | renamed, 8192) == share
    for unknown in {}, {"linear_attn_config": {"num_heads": 32}}, renamed | {"mamba_d_head": "auto"}:
        assert prefill_share(LLAMA_8B | mixed | unknown, 8192).recurrence_s == 0
