# SPDX-License-Identifier: Apache-2.0
"""Caches in fp8 through the backend: vLLM's bytes and scales, and the engines that may read them."""

import re
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM")

from tests.helpers.vllm_configs import llama, served
from tests.helpers.worker_layers import HAS_CUDA, SHAPE, make_impls
from vllm_sparse_backend.config.errors import ConfigurationError
from vllm_sparse_backend.config.fallback import Fallback
from vllm_sparse_backend.serving import compat, startup
from vllm_sparse_backend.serving.worker.arena import consecutive_rows, kernel_rows
from vllm_sparse_backend.serving.worker.impl import SparsePrefillImpl
from vllm_sparse_backend.serving.worker.rows import Slab, SparseStep
from vllm_sparse_kernels.paged import FP8

CPU = torch.device("cpu")
Q_SCALE, K_SCALE, V_SCALE = 0.02, 0.05, 0.3
PAGE_TOKENS = 16


@pytest.fixture
def as_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "IS_CPU", False)
    monkeypatch.setattr(compat, "DEVICE_TYPE", "cuda")
    monkeypatch.setattr(compat, "reads_fp8", lambda: True)


def scaled_layer(**changes: Any) -> Any:
    """Return the part of vLLM's Attention that defines the scales of a cache."""
    scales = {"_q_scale_float": Q_SCALE, "_k_scale_float": K_SCALE, "_v_scale_float": V_SCALE}
    return SimpleNamespace(**(scales | changes))


def rounded(x: torch.Tensor, scale: float) -> torch.Tensor:
    return (x / scale).clamp(-448, 448).to(FP8)


@pytest.mark.skipif(HAS_CUDA, reason="needs Triton's interpreter, whose kernels need no device")
def test_a_layer_attends_to_what_vllm_has_written(as_on_hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """``forward`` with queries in fp8 and a cache of bytes, against softmax over the values that they represent."""
    impls = make_impls("dense", {}, CPU)
    seq_len, query_len, num_pages = 150, 70, 12
    heads, kv_heads, dim = SHAPE.num_heads, SHAPE.num_kv_heads, SHAPE.head_dim
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(seq_len, n, dim, generator=generator) for n in (heads, kv_heads, kv_heads))
    q = rounded(q[-query_len:], Q_SCALE)
    # vLLM's form: [pages, kv heads, tokens, keys next to values] of bytes, tokens before heads in memory.
    physical = torch.zeros(num_pages, PAGE_TOKENS, kv_heads, 2 * dim, dtype=torch.uint8)
    table = torch.randperm(num_pages, generator=generator)[: -(-seq_len // PAGE_TOKENS)].int()
    positions = torch.arange(seq_len)
    written = torch.cat((rounded(k, K_SCALE), rounded(v, V_SCALE)), -1).view(torch.uint8)
    physical[table[positions // PAGE_TOKENS].long(), positions % PAGE_TOKENS] = written
    slab = Slab(kernel_rows(consecutive_rows([(seq_len - query_len, query_len)]), table[None]))
    out = torch.full((query_len, heads, dim), float("nan"), dtype=torch.float16)
    impl = impls[0]
    metadata = SimpleNamespace(sparse=SparseStep(slabs=(slab,), dense_runs=()))
    monkeypatch.setattr(impl.worker.recorder, "count_pairs", lambda *_: None)
    SparsePrefillImpl.forward(impl, scaled_layer(), q, None, None, physical.transpose(1, 2), metadata, out)

    group = heads // kv_heads
    scaled = (q, Q_SCALE), (rounded(k, K_SCALE), K_SCALE), (rounded(v, V_SCALE), V_SCALE)
    exact_q, exact_k, exact_v = (x.float() * scale for x, scale in scaled)
    scores = torch.einsum("qhd,khd->hqk", exact_q, exact_k.repeat_interleave(group, 1)) * impl.scale
    scores.masked_fill_(positions > positions[-query_len:, None], -torch.inf)
    expected = torch.einsum("hqk,khd->qhd", scores.softmax(-1), exact_v.repeat_interleave(group, 1))
    torch.testing.assert_close(out.float(), expected, atol=2e-3, rtol=2e-3)


def test_other_caches_count_what_they_are(as_on_hopper: None) -> None:
    cache = compat.paged_cache(torch.zeros(2, 1, 16, 64, dtype=torch.bfloat16), 32)
    assert compat.with_scales(cache, scaled_layer()) is cache


def test_scales_are_read_anew(as_on_hopper: None) -> None:
    """vLLM may load weights again, and their scales with them."""
    cache = compat.paged_cache(torch.zeros(2, 1, 16, 64, dtype=torch.uint8), 32)
    assert cache.keys.dtype == cache.values.dtype == FP8
    cache_of_layer, other = (
        compat.with_scales(cache, layer) for layer in (scaled_layer(), scaled_layer(_v_scale_float=2.0))
    )
    assert (cache_of_layer.score_scale, cache_of_layer.value_scale) == (Q_SCALE * K_SCALE, V_SCALE)
    assert other.value_scale == 2.0


@pytest.mark.parametrize(
    ("cache_dtype", "scheme", "reason"),
    [
        ("fp8", None, None),
        ("fp8_e4m3", {"strategy": "tensor", "num_bits": 8}, None),
        ("fp8_e5m2", None, Fallback.QUANTISED_CACHE),
        ("fp8", {"strategy": "attn_head", "num_bits": 8}, Fallback.HEAD_SCALES),
    ],
)
def test_servers_that_read_fp8(as_on_hopper: None, cache_dtype: str, scheme: Any, reason: Fallback | None) -> None:
    config = served(llama(), cache={"cache_dtype": cache_dtype})
    config.quant_config = SimpleNamespace(kv_cache_scheme=scheme)
    with nullcontext() if reason is None else pytest.raises(ConfigurationError, match=re.escape(reason.explain)):
        startup.check(config)
