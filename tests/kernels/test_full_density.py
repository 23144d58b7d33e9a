# SPDX-License-Identifier: Apache-2.0
"""Every method, set to keep everything: selection and `attend` give dense attention, within attention's own budget."""

import pytest
import torch

from benchmarks.batches import random_batch
from vllm_sparse_kernels.attend import attend
from vllm_sparse_kernels.index import SparseIndex, causal_pairs
from vllm_sparse_kernels.methods import METHODS
from vllm_sparse_kernels.trial import expected_attention

ROWS = [(0, 300), (77, 200), (0, 1), (401, 63)]
LONG_ROWS = [(0, 2049), (6143, 1000), (0, 63), (2999, 1)]


def check(name: str, rows: list[tuple[int, int]], heads: tuple[int, int, int], page_size: int, dtype, device: str):
    num_heads, num_kv_heads, head_dim = heads
    method = METHODS[name].full.merged([METHODS[name].full] * num_heads)
    batch = random_batch(rows, num_heads, num_kv_heads, head_dim, page_size, dtype, device, gap_tokens=5)
    layout = method.stripe_layout(batch.rows)
    layouts = dict.fromkeys(range(num_heads), layout) if layout.capacity else None
    index = SparseIndex.allocate(batch.rows, num_heads, method.block_tokens, layouts)
    every = torch.arange(num_heads, dtype=torch.int32, device=device)
    method.select(batch.q, batch.cache, index, every, batch.scale)
    index.check()
    assert int(index.kept_pairs()) == num_heads * causal_pairs(batch.rows)

    out = batch.empty_out()
    attend(batch.q, batch.cache, index, out, batch.scale)
    dense = SparseIndex.allocate(batch.rows, num_heads, 64)
    METHODS["dense"].reference(METHODS["dense"].full, batch.q, batch.cache, dense, every, batch.scale)
    expected_attention(batch, dense).assert_close(out)


@pytest.mark.parametrize("name", METHODS)
def test_equals_dense(name: str, device: str) -> None:
    check(name, ROWS, (4, 2, 64), 16, torch.float16, device)


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [16, 128])
@pytest.mark.parametrize("name", METHODS)
def test_equals_dense_on_gpu(name: str, page_size: int) -> None:
    check(name, LONG_ROWS, (8, 2, 128), page_size, torch.bfloat16, "cuda")
