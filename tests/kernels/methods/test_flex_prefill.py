# SPDX-License-Identifier: Apache-2.0
"""FlexPrefill's vertical-slash: kernels against the float32 reference, and the paper's promises."""

import dataclasses

import pytest
import torch

from tests.helpers.lined import assert_between, kept_keys, lined_batch
from tests.helpers.masks import density_of
from tests.helpers.method_cases import DEVICE, DTYPES, SHAPES, by_turns, select
from vllm_sparse_kernels.methods.flex_prefill import reference
from vllm_sparse_kernels.methods.flex_prefill.method import FlexVerticalSlash
from vllm_sparse_kernels.methods.references import diagonal_sums, softmax_of

MARGIN = 1e-4
"""Kernels and reference get the same inputs and round float32 sums differently, so lines that decide over less than
this share of the mass may differ."""


def check_between(method, batch, index):
    """Check that the kept keys are between the reference's keys at a slightly lower and at a slightly higher γ."""
    heads = range(batch.num_heads)
    bounds = [
        kept_keys(select(dataclasses.replace(method, gamma=g), batch, index.block_tokens, by_reference=True), heads)
        for g in (method.gamma - MARGIN, method.gamma + MARGIN)
    ]
    assert_between(kept_keys(index, heads), *bounds)


METHODS = [
    FlexVerticalSlash(0.8),
    FlexVerticalSlash(0.8, last_queries=64, estimating="spread"),
    FlexVerticalSlash(0.8, last_queries=17),
    FlexVerticalSlash(0.8, last_queries=128),
]


@pytest.mark.full
@pytest.mark.parametrize(("shape", "dtype", "method"), by_turns(SHAPES, DTYPES, METHODS), ids=str)
def test_kernels_keep_what_the_reference_keeps(shape, dtype, method):
    *sizes, block_tokens, layout = shape
    batch = lined_batch(*sizes, dtype, layout=layout, gap_tokens=3)
    index = select(method, batch, block_tokens)
    check_between(method, batch, index)
    assert density_of(index) < 0.95


def test_queries_spread_over_the_chunk_end_with_its_last():
    spread = FlexVerticalSlash(last_queries=3, estimating="spread")
    assert reference.estimating_queries(spread, 256).tolist() == [84, 169, 255]
    assert reference.estimating_queries(spread, 2).tolist() == [0, 1]
    assert reference.estimating_queries(FlexVerticalSlash(last_queries=3), 256).tolist() == [253, 254, 255]


def test_diagonals_are_those_of_blocks():
    """A diagonal is a query's block minus a key's block, at any places within the blocks."""
    weights = torch.zeros(2, 300)
    weights[0, 63], weights[0, 64], weights[1, 63], weights[1, 290] = 1, 2, 4, 8
    assert diagonal_sums(weights, torch.tensor([255, 290]), 64).tolist() == [8, 0, 2, 1, 4]


@pytest.mark.full
def test_crowded_columns_become_whole_blocks():
    """With room for few stripes, no line is lost, and no tile exceeds its room."""
    batch = lined_batch([(400, 130)], 2, 1, 64, 16)
    method, roomy = FlexVerticalSlash(0.9, max_stripes=8), select(FlexVerticalSlash(0.9), batch, 64)
    index = select(method, batch, 64)
    assert int(index.stripe_counts.max()) <= 8 < int(roomy.stripe_counts.max())
    check_between(method, batch, index)
    for few, many in zip(kept_keys(index, range(2)), kept_keys(roomy, range(2))):
        assert not bool((many & ~few).any())


def test_kept_lines_hold_gamma_of_the_estimate():
    """Columns alone, and diagonals of blocks alone, reach γ of Â's mass, and with one line fewer they would not."""
    batch = lined_batch([(300, 64)], 1, 1, 64, 16)
    keys, _ = batch.cache.gather(batch.rows.block_table[0], 364)
    positions = torch.arange(300, 364, device=DEVICE)
    weights = softmax_of(batch.q[:, 0].float(), keys[:, 0].float(), positions, batch.scale)
    for sums in (weights.sum(0), diagonal_sums(weights, positions, 64)):
        kept = reference.fewest_with_mass(sums, 0.8)
        mass = float(sums[kept].sum() / sums.sum())
        assert mass >= 0.8 - 1e-6
        assert mass - float(sums[kept].min() / sums.sum()) < 0.8
        assert 0 < int(kept.sum()) < len(kept)


def test_whole_blocks_are_the_fullest():
    columns = torch.zeros(256, dtype=torch.bool)
    columns[64:69], columns[128:131], columns[192:194] = True, True, True
    assert reference.whole_blocks(columns, 10, 64).tolist() == [True, False, False, False]
    assert reference.whole_blocks(columns, 5, 64).tolist() == [True, True, False, False]
    assert reference.whole_blocks(columns, 4, 64).tolist() == [True, True, True, False]
    assert reference.whole_blocks(columns, 0, 64).tolist() == [True, True, True, True]
