# SPDX-License-Identifier: Apache-2.0
"""Structured data: what it says of itself, held against exact attention."""

import pytest
import torch

from benchmarks.oracle import oracle_density
from tests.helpers.lined import DEVICE
from vllm_sparse_backend.measure.structured import NUM_SINKS, SEQUENCE, paged_batch, structured


def probabilities(data, head):
    """[query_len, seq_len] float64 of one head."""
    kv_head = head // (data.q.shape[1] // data.k.shape[1])
    scores = data.q[:, head].double() @ data.k[:, kv_head].double().T * data.scale
    return scores.masked_fill_(~torch.ones_like(scores, dtype=torch.bool).tril_(data.context_len), -torch.inf).softmax(
        -1
    )


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 3, 64), (4, 4, 16), (4, 2, 66)])
def test_shapes_that_cannot_be_made_are_refused(heads, kv_heads, head_dim):
    with pytest.raises(ValueError, match=f"given head_dim {head_dim}, {heads} heads on {kv_heads} kv heads"):
        structured(8, 8, heads, kv_heads, head_dim)


@pytest.mark.full
def test_the_oracle_is_what_whole_matrices_say():
    data = structured(300, 437, 16, 4, 64, device=DEVICE)
    got = oracle_density(data, 0.9, num_queries=1000)  # more than there are: all of them
    for head in range(16):
        shares = []
        for i, row in enumerate(probabilities(data, head)):
            kept = row[: 437 + i + 1].sort(descending=True).values.cumsum(0)
            shares.append((int((kept < 0.9).sum()) + 1) / (437 + i + 1))
        assert float(got[head]) == pytest.approx(sum(shares) / len(shares), rel=1e-3)


@pytest.mark.full
def test_every_part_is_there():
    """Sinks, band, slashes and heavy keys, each where a head's kind has it, hold more mass than their number would."""
    data = structured(512, 7000, 16, 4, 128, device=DEVICE, seed=2)
    mass = {kind: [] for kind in SEQUENCE}
    distance = data.context_len + torch.arange(512, device=DEVICE)[:, None] - torch.arange(7512, device=DEVICE)
    for head, kind in enumerate(data.kinds):
        p = probabilities(data, head)
        sinks, near = p[:, :NUM_SINKS].sum(1).mean(), (p * (distance < 1024)).sum(1).mean()
        by_distance = torch.zeros(7512, dtype=p.dtype, device=p.device)
        by_distance.scatter_add_(0, distance.clamp(min=0).flatten(), p.flatten())
        peak = by_distance[64:6000].max() / by_distance[64:6000].median()
        far = p[:, NUM_SINKS : data.context_len - 1024]
        heaviest = far.sum(0).topk(32).values.sum() / far.sum()
        mass[kind].append([float(x) for x in (sinks, near, peak, heaviest)])
    of = {kind: [sum(x) / len(x) for x in zip(*rows)] for kind, rows in mass.items()}
    assert of["sink"][0] > 0.4 > 0.1 > of["spread"][0]
    assert of["local"][1] > 0.7 > 0.3 > of["spread"][1]
    assert of["slash"][2] > 5000 > 50 > of["spread"][2]
    assert of["heavy"][3] > 0.6 > 0.2 > of["spread"][3]


def test_keys_have_a_common_mean_and_values_last():
    data = structured(4096, 0, 4, 2, 128, device=DEVICE)
    mean, spread = data.k.mean(0), data.k.std(0)
    assert bool((mean.abs().amax(-1) > 3 * spread.mean(-1)).all())
    centred = data.v[NUM_SINKS:] - data.v[NUM_SINKS:].mean(0)
    near = (centred[:-1] * centred[1:]).mean() / centred.square().mean()
    far = (centred[:-64] * centred[64:]).mean() / centred.square().mean()
    assert float(near) > 0.4
    assert abs(float(far)) < 0.05


@pytest.mark.parametrize(("page_size", "layout"), [(16, "NHD"), (128, "HND")])
def test_the_paged_batch_holds_the_same(page_size, layout):
    data = structured(100, 333, 4, 2, 64, torch.float16, DEVICE)
    batch = paged_batch(data, page_size, layout)
    assert (batch.rows.query_lens, batch.rows.context_lens, batch.scale) == ((100,), (333,), 64**-0.5)
    keys, values = batch.cache.gather(batch.rows.block_table[0], 433)
    assert torch.equal(keys, data.k)
    assert torch.equal(values, data.v)
    assert batch.cache.keys.untyped_storage().data_ptr() == batch.cache.values.untyped_storage().data_ptr()
    pages = batch.rows.block_table[0, : -(-433 // page_size)]
    assert page_size == 128 or bool((pages.diff() < 0).any())
