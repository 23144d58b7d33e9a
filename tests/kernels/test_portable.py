# SPDX-License-Identifier: Apache-2.0
"""The portable engine's own: blocks by bulk copies and by pointers, and what shared memory has room for."""

import pytest
import torch

from benchmarks.batches import random_index
from tests.kernels.test_attend_options import check, lossless_batch, mixed_options, run
from tests.kernels.test_engines import FULL, same
from vllm_sparse_kernels.attend import supports_bulk, widest_block
from vllm_sparse_kernels.attend.portable import attend
from vllm_sparse_kernels.index import SparseIndex
from vllm_sparse_kernels.paged import PagedCache
from vllm_sparse_kernels.rows import Rows
from vllm_sparse_kernels.trial import expected_attention


@pytest.mark.parametrize("drops", [None, pytest.param((1,), marks=FULL)], ids=["plain", "with options"])
@pytest.mark.parametrize(
    ("page_size", "block_tokens", "layout"),
    [
        (128, 64, "NHD"),
        *(pytest.param(*c, marks=FULL) for c in ((64, 64, "HND"), (128, 128, "NHD"), (128, 128, "HND"))),
    ],
)
def test_bulk_copies(device, page_size, block_tokens, layout, drops):
    """Blocks fetched as matrices give what blocks fetched by pointers give."""
    lengths = [(170, 40), (0, 50)] if drops is None else [(641, 40), (500, 70)]
    batch = lossless_batch(lengths, 2, 2, 64, page_size, torch.float16, device, layout)
    if device == "cuda" and not supports_bulk(batch.cache):
        pytest.skip("bulk tensor copies need Hopper or later")
    index = random_index(batch, block_tokens, 0.5 if drops is None else 0.7, stripes=30)
    options = None if drops is None else mixed_options(batch, index, drops=drops)
    by_copies = run(batch, index, options, bulk=True)
    if options is None:
        expected_attention(batch, index).assert_close(*by_copies)
    else:
        check(batch, index, options, bulk=True)
    assert same(run(batch, index, options, bulk=False), by_copies)


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
    [
        (128, 227, 128),
        (64, 99, 128),
        (128, 163, 128),
        (128, 99, 64),
        (96, 99, 64),
        (256, 227, 64),
        (256, 99, None),
    ],
)
def test_blocks_fit_shared_memory(head_dim, limit_kib, widest):
    """H100 has 227 KiB a program, A100 163, an RTX 4090 99."""
    assert widest_block(head_dim, limit_kib * 1024) == widest
