# SPDX-License-Identifier: Apache-2.0
"""The portable engine's own: blocks by bulk copies and by pointers, and what shared memory has room for."""

import pytest
import torch

from benchmarks.batches import random_batch, random_index
from vllm_sparse_kernels.attend import supports_bulk, widest_block
from vllm_sparse_kernels.attend.portable import attend
from vllm_sparse_kernels.index import SparseIndex
from vllm_sparse_kernels.paged import PagedCache
from vllm_sparse_kernels.rows import Rows
from vllm_sparse_kernels.trial import Batch, expected_attention


def run(batch: Batch, index: SparseIndex, bulk: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse of the kernel, poisoned before."""
    out = batch.empty_out()
    lse = torch.full((batch.num_heads, len(batch.q)), float("nan"), device=batch.q.device)
    attend(batch.q, batch.cache, index, out, batch.scale, lse, bulk=bulk)
    return out, lse


@pytest.mark.parametrize(
    ("page_size", "block_tokens", "layout"),
    [
        (128, 64, "NHD"),
        *(pytest.param(*c, marks=pytest.mark.full) for c in ((64, 64, "HND"), (128, 128, "NHD"), (128, 128, "HND"))),
    ],
)
def test_bulk_copies(device, page_size, block_tokens, layout):
    """Blocks fetched as matrices give what blocks fetched by pointers give."""
    batch = random_batch([(170, 40), (0, 50)], 2, 2, 64, page_size, torch.float16, device, layout=layout)
    if device == "cuda" and not supports_bulk(batch.cache):
        pytest.skip("bulk tensor copies need Hopper or later")
    index = random_index(batch, block_tokens, 0.5, stripes=30)
    by_copies = run(batch, index, bulk=True)
    expected_attention(batch, index).assert_close(*by_copies)
    assert all(torch.equal(a, b) for a, b in zip(run(batch, index, bulk=False), by_copies, strict=True))


@pytest.mark.parametrize(("page_size", "stride_page"), [(16, 16 * 64), (64, 64 * 64 + 8)])
def test_bulk_copies_that_cannot_be_had(device, page_size, stride_page):
    """Pages smaller than a block, and pages whose stride is no multiple of a token's."""
    keys = torch.zeros(3 * stride_page, device=device).as_strided((3, page_size, 1, 64), (stride_page, 64, 64, 1))
    rows = Rows((0,), (5,), (0,), torch.zeros(1, 1, dtype=torch.int32, device=device))
    index = SparseIndex.allocate(rows, 1, 64)
    index.set_blocks(0, 0, torch.ones(1, dtype=torch.bool, device=device))
    q = torch.zeros(5, 1, 64, device=device)
    with pytest.raises(ValueError, match="bulk copies cannot read"):
        attend(q, PagedCache(keys, keys), index, torch.empty_like(q), 1.0, bulk=True)


@pytest.mark.parametrize(
    ("head_dim", "limit_kib", "widest"),
    [(128, 227, 128), (64, 99, 128), (128, 163, 128), (128, 99, 64), (96, 99, 64), (256, 227, 64), (256, 163, 64)],
)
def test_blocks_fit_shared_memory(head_dim, limit_kib, widest):
    """H100 has 227 KiB a program, A100 163, an RTX 4090 99."""
    assert widest_block(head_dim, limit_kib * 1024) == widest


def test_no_block_fits():
    assert widest_block(256, 99 * 1024) is None


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lengths", [[(0, 2049)], [(4000, 2049), (0, 63), (130, 1000)]], ids=str)
@pytest.mark.parametrize(("head_dim", "block_tokens"), [(128, 64), (128, 128), (64, 128), (256, 64)])
def test_pointers_on_gpu(lengths, dtype, head_dim, block_tokens):
    """What other devices run; Hopper takes bulk copies (test_engines.py) unless it is told not to."""
    batch = random_batch(lengths, 8, 2, head_dim, 128, dtype, "cuda", gap_tokens=3)
    index = random_index(batch, block_tokens, 0.2, stripes=200)
    expected_attention(batch, index).assert_close(*run(batch, index, bulk=False))
