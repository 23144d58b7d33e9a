# SPDX-License-Identifier: Apache-2.0
"""Properties of the portable engine: programs for parts of a tile."""

import dataclasses

import pytest
import torch

from tests.helpers.batches import assert_close, random_batch, random_index
from tests.helpers.engine_cases import FULL
from tests.helpers.option_cases import lossless_batch, run
from vllm_sparse_kernels.attention.options import AttendOptions
from vllm_sparse_kernels.attention.portable import engine as portable
from vllm_sparse_kernels.engine_trial import expected_attention

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


@pytest.mark.parametrize("lengths", [[(70, 90)], *(pytest.param(case, marks=FULL) for case in SPLIT_LENGTHS)])
def test_head_dim_512(device, lengths):
    """Gemma 4's layers with full attention: each program takes half of a tile's queries."""
    batch = random_batch(lengths, 2, 1, 512, 16, torch.float16, device, gap_tokens=3)
    index = random_index(batch, 64, 0.5, stripes=30)
    assert_close(expected_attention(batch, index), run(batch, index, None))
