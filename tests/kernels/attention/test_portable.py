# SPDX-License-Identifier: Apache-2.0
"""Properties of the portable engine: blocks by bulk copies and by pointers, and programs for parts of a tile."""

import dataclasses
from itertools import product

import pytest
import torch

from tests.helpers.batches import assert_close, random_batch, random_index
from tests.helpers.engine_cases import FULL, same
from tests.helpers.option_cases import check, lossless_batch, mixed_options, run
from vllm_sparse_kernels.attention.options import AttendOptions
from vllm_sparse_kernels.attention.portable import engine as portable
from vllm_sparse_kernels.attention.portable.engine import supports_bulk
from vllm_sparse_kernels.engine_trial import expected_attention


@pytest.mark.parametrize("with_options", [False, pytest.param(True, marks=FULL)], ids=["plain", "with options"])
@pytest.mark.parametrize(
    ("page_size", "block_tokens", "layout"),
    [
        (128, 64, "NHD"),
        *(pytest.param(*c, marks=FULL) for c in ((64, 64, "HND"), (128, 128, "NHD"), (128, 128, "HND"))),
    ],
)
def test_bulk_copies(device, page_size, block_tokens, layout, with_options):
    """Blocks loaded as matrices give the same results as blocks loaded by pointers."""
    lengths = [(641, 40), (500, 70)] if with_options else [(170, 40), (0, 50)]
    batch = lossless_batch(lengths, 2, 2, 64, page_size, torch.float16, device, layout)
    if device == "cuda" and not supports_bulk(batch.cache):
        pytest.skip("bulk tensor copies need Hopper or later")
    index = random_index(batch, block_tokens, 0.7 if with_options else 0.5, stripes=30)
    options = mixed_options(batch, index) if with_options else None
    by_copies = run(batch, index, options, bulk=True)
    if options is None:
        assert_close(expected_attention(batch, index), by_copies)
    else:
        check(batch, index, options, bulk=True)
    assert same(run(batch, index, options, bulk=False), by_copies)


SPLIT_LENGTHS = [[(170, 40), (0, 50)], [(333, 200)], [(100, 129), (64, 1), (0, 300)]]
"""Tiles with fewer queries than a program handles, with a few queries in each of several programs, and with a single
query."""


@pytest.mark.parametrize("num_queries", [64, 32])
@pytest.mark.parametrize(
    ("lengths", "block_tokens"),
    [
        (SPLIT_LENGTHS[0], 64),
        *(pytest.param(*case, marks=FULL) for case in zip(SPLIT_LENGTHS[1:], (32, 128))),
    ],
)
def test_programs_that_divide_a_tile_compute_what_it_does(device, lengths, block_tokens, num_queries, monkeypatch):
    """With stripes, sinks and options, results equal those of a single program for all of the tile's queries."""
    batch = lossless_batch(lengths, 4, 2, 64, 128, torch.float16, device)
    batch = dataclasses.replace(batch, sinks=torch.tensor([-30.0, 0.0, 5.0, 12.0], device=device))
    index = random_index(batch, block_tokens, 0.5, stripes=30)
    monkeypatch.setattr(portable, "program_queries", lambda head_dim, limit_bytes: num_queries)
    assert_close(expected_attention(batch, index), run(batch, index, None))
    int8 = AttendOptions.from_heads([None] * 4, [True, False, True, False], batch.q.device)
    assert_close(expected_attention(batch, index), run(batch, index, int8))
    nothing_skipped = AttendOptions.from_heads([-1e30] * 4, [False] * 4, batch.q.device)
    assert_close(expected_attention(batch, index), run(batch, index, nothing_skipped))


@pytest.mark.parametrize(
    ("lengths", "page_size"),
    [([(70, 90)], 128), *(pytest.param(*case, marks=FULL) for case in product(SPLIT_LENGTHS, (16, 128)))],
)
def test_head_dim_512(device, lengths, page_size):
    """Gemma 4's layers with full attention: each program takes half of a tile's queries."""
    batch = random_batch(lengths, 2, 1, 512, page_size, torch.float16, device, gap_tokens=3)
    index = random_index(batch, 64, 0.5, stripes=30)
    assert_close(expected_attention(batch, index), run(batch, index, None))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lengths", [[(0, 2049)], [(4000, 2049), (0, 63), (130, 1000)]], ids=str)
@pytest.mark.parametrize(("head_dim", "block_tokens"), [(128, 64), (128, 128), (64, 128), (256, 64)])
def test_pointers_on_gpu(lengths, dtype, head_dim, block_tokens):
    """Other devices load blocks by pointers. Hopper uses bulk copies (test_engines.py) unless they are disabled."""
    batch = random_batch(lengths, 8, 2, head_dim, 128, dtype, "cuda", gap_tokens=3)
    index = random_index(batch, block_tokens, 0.2, stripes=200)
    assert_close(expected_attention(batch, index), run(batch, index, None, bulk=False))
