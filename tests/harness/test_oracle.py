# SPDX-License-Identifier: Apache-2.0
"""The oracle against whole matrices in float64, and on cases with known recall and density."""

import itertools

import pytest
import torch

from benchmarks.oracle import Bound, Quality, exact_masses, measure
from tests.helpers.batches import random_batch, random_index
from tests.helpers.lined import DEVICE
from tests.helpers.masks import density_of, mask_of
from vllm_sparse_kernels.engine_trial import Batch
from vllm_sparse_kernels.index import SparseIndex, causal_pairs

LENGTHS = [(0, 1), (0, 63), (437, 200), (61, 300)]


def quality(batch: Batch, index: SparseIndex) -> Quality:
    return measure(batch.q, batch.cache, index, batch.scale)


def shares(batch: Batch, index: SparseIndex) -> torch.Tensor:
    """Return the recalled share by definition [num_heads, num_tokens]: the softmax of all causal scores of a row, and
    the index as a mask."""
    rows, group, parts = batch.rows, batch.num_heads // batch.cache.num_kv_heads, []
    for row, (token, query_len) in enumerate(zip(rows.query_starts, rows.query_lens, strict=True)):
        keys = batch.cache.gather(rows.block_table[row], rows.seq_lens[row])[0].double()
        q = batch.q[token : token + query_len].double()
        scores = torch.einsum("qhd,khd->hqk", q, keys.repeat_interleave(group, 1)) * batch.scale
        causal = torch.ones_like(scores, dtype=torch.bool).tril_(rows.context_lens[row])
        parts.append((scores.masked_fill(~causal, -torch.inf).softmax(-1) * mask_of(index, row)).sum(-1))
    return torch.cat(parts, 1)


def by_whole_matrices(batch: Batch, index: SparseIndex) -> Quality:
    kept = sum(mask_of(index, row).sum((1, 2)) for row in range(batch.rows.num_rows))
    return Quality(shares(batch, index).mean(1), kept.double() / causal_pairs(batch.rows))


@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.float32, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "page_size", "block_tokens", "layout"),
    [
        (4, 2, 96, 64, 128, "HND"),
        pytest.param(4, 4, 64, 16, 64, "NHD", marks=pytest.mark.full),
        pytest.param(8, 2, 128, 128, 64, "NHD", marks=pytest.mark.full),
        pytest.param(8, 1, 64, 32, 128, "HND", marks=pytest.mark.full),
    ],
)
def test_it_is_what_whole_matrices_say(num_heads, num_kv_heads, head_dim, page_size, block_tokens, layout, dtype):
    more = {"layout": layout, "gap_tokens": 3}
    batch = random_batch(LENGTHS, num_heads, num_kv_heads, head_dim, page_size, dtype, DEVICE, **more)
    batch.q.mul_(2)
    index = random_index(batch, block_tokens, 0.4, stripes=17)
    got, expected = quality(batch, index), by_whole_matrices(batch, index)
    assert got.recall.shape == got.density.shape == (num_heads,)
    torch.testing.assert_close(got.recall, expected.recall, rtol=0, atol=1e-5)
    assert torch.equal(got.density, expected.density)
    indices = [index, random_index(batch, block_tokens, 0.2)]
    masses = list(exact_masses(batch.q, batch.cache, batch.rows, batch.scale, indices))
    for i, index_at_density in enumerate(indices):
        by_query = torch.cat([mass.query_recalls[i] for mass in masses], 1).double()
        torch.testing.assert_close(by_query, shares(batch, index_at_density), rtol=0, atol=1e-5)
    assert float(got.density.mean()) == pytest.approx(density_of(index), abs=1e-12)
    assert bool((got.recall < 0.99).all())
    assert {float(x) for figures in quality(batch, random_index(batch, block_tokens, 1.0)) for x in figures} == {1.0}
    batch.q.mul_(500)  # scores far apart
    got, expected = quality(batch, index), by_whole_matrices(batch, index)
    torch.testing.assert_close(got.recall, expected.recall, rtol=0, atol=1e-3)


@pytest.mark.parametrize("block_tokens", [1, 64, 128])
def test_bound_is_the_greedy_choice(block_tokens):
    batch = random_batch([(100, 300), (0, 200)], 4, 2, 64, 16, device=DEVICE)
    batch.q.mul_(2)
    bound, ranked = Bound(block_tokens), []
    for mass in exact_masses(batch.q, batch.cache, batch.rows, batch.scale):
        bound.add(mass)
        for place, i_tile in enumerate(mass.tiles):
            tile = batch.rows.tile_list[i_tile]
            for first in range(0, tile.last_position + 1, block_tokens):
                keys = slice(first, min(first + block_tokens, tile.last_position + 1))
                pairs = int(mass.pairs()[place, keys].sum())
                forced = block_tokens > 1 and first + block_tokens > tile.position
                ranked += [(1.0 if forced else x / pairs, x, pairs) for x in mass.keys[:, place, keys].sum(-1).tolist()]
    total_mass, total_pairs = sum(x for _, x, _ in ranked), sum(n for _, _, n in ranked)
    assert total_mass == pytest.approx(4 * 500, rel=1e-5)
    assert total_pairs == 4 * causal_pairs(batch.rows)
    best = list(itertools.accumulate(sorted(ranked, reverse=True), lambda a, b: (0, a[1] + b[1], a[2] + b[2])))
    densities, recalls = bound.curve()
    for density, recall in zip(densities, recalls):
        if density:
            mass_of_best = max(x for _, x, n in best if n <= round(density * total_pairs))
            assert recall == pytest.approx(mass_of_best / total_mass, rel=1e-4)


@pytest.mark.gpu
def test_thirty_two_thousand_tokens_fit_into_a_gigabyte():
    batch = random_batch([(0, 32768)], 32, 8, 128, 128, torch.bfloat16, "cuda")
    index = random_index(batch, 128, 0.1)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    measured = quality(batch, index)
    assert torch.cuda.max_memory_allocated() - before < 2**30
    assert float(measured.density.mean()) == pytest.approx(density_of(index))
    assert bool(((measured.recall > 0) & (measured.recall < 1)).all())
